"""Receivers of replies of TensorFlow's servers, of a dispatcher's journal, and of a panel."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from hypothesis import strategies as st

from tests._fuzzing import RAW, Receiver, as_json, direct, like, near
from tfd_notebook import errors
from tfd_notebook.data.service.journal import JOURNAL_DIR, Journal
from tfd_notebook.net import probe, tf_messages
from tfd_notebook.ui import jupyter_server

# Replies to a probe

DEVICE = {"name": "/job:worker/replica:0/task:1/device:CPU:0", "device_type": "CPU"}
REPLIES = (
    tf_messages.GetStatusResponse(device_attributes=[DEVICE]),
    tf_messages.GetVersionResponse(version=1),
    tf_messages.GetWorkersResponse(workers=[{"address": "h:1"}]),
    tf_messages.GetWorkerTasksResponse(tasks=[{"task_id": 1, "iteration_id": 2}]),
    tf_messages.WorkerHeartbeatResponse(new_tasks=[{"task_id": 1, "iteration_id": 2}]),
)
CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


@contextlib.contextmanager
def grpc_server(directory: Path) -> Iterator[Any]:
    """Yield the receiver of replies of a server, which are bytes or codes with details."""
    reply: list[Any] = [b""]

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        if isinstance(reply[0], bytes):
            return reply[0]
        context.abort(*reply[0])
        raise AssertionError("unreachable")

    with ThreadPoolExecutor(4) as pool, probe.Prober() as prober:
        server = grpc.server(pool, handlers=[Handler()])
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()

        def receive(value: Any) -> None:
            reply[0] = value
            result = prober.probe(address, 60)
            assert result.task is None or ":" in result.task
            for request in (
                lambda: probe.dispatcher_workers(address, 60),
                lambda: probe.assigned_tasks(address, "h:1", 60),
                lambda: probe.complete_tasks(address, "h:1", [1], 60),
            ):
                with contextlib.suppress(errors.DataError, errors.TimeLimit):
                    request()

        try:
            yield receive
        finally:
            server.stop(0).wait()


# The journal of a dispatcher on another host

UPDATES = (
    {"register_worker": {"worker_address": "h:1"}},
    {"register_dataset": {"dataset_id": "1"}},
    {"create_job": {"job_id": 5, "job_name": "anonymous_job_5", "dataset_id": "1"}},
    {"create_iteration": {"iteration_id": 2, "job_id": 5, "repetition": 1}},
    {"create_task": {"task_id": 4, "iteration_id": 2, "worker_address": "h:1"}},
    {"create_pending_task": {"task_id": 6, "iteration_id": 2, "worker_address": "h:1"}},
    {"acquire_iteration_client": {"iteration_id": 2, "iteration_client_id": 3}},
    {"produce_split": {"iteration_id": 2, "repetition": 1}},
    {"release_iteration_client": {"iteration_client_id": 3, "time_micros": 7}},
    {"finish_task": {"task_id": 4}},
    {"remove_task": {"task_id": 4}},
    {"garbage_collect_iteration": {"iteration_id": 2}},
)
RECORDS = tuple(tf_messages.Update(**update).SerializeToString() for update in UPDATES)


def journal_of(records: Any) -> bytes:
    return b"".join(struct.pack("<QI", len(data), 0) + data + bytes(4) for data in records)


@contextlib.contextmanager
def journal_file(directory: Path) -> Iterator[Any]:
    (directory / JOURNAL_DIR).mkdir()

    def receive(data: bytes) -> None:
        (directory / JOURNAL_DIR / "journal_0").write_bytes(data)
        journal = Journal(directory, keep_seconds=1.0)
        state = journal.read()
        assert state.open_iterations <= len(state.iterations)
        state.finished("anonymous_job_5")
        journal.interrupt("data_worker:0")

    yield receive


# Requests of a panel to the server


def receive_from_panel(request: tuple[str, bytes]) -> None:
    with contextlib.suppress(errors.UnknownName):  # a valid request
        asyncio.run(jupyter_server.act(*request))


SERVICES = {
    "replies to a probe": Receiver(
        near(*(message.SerializeToString() for message in REPLIES))
        | st.tuples(st.sampled_from(CODES), st.text(max_size=20)),
        grpc_server,
        gate=10,
    ),
    "journal of a dispatcher": Receiver(
        near(journal_of(RECORDS))
        | st.lists(st.sampled_from(RECORDS) | near(*RECORDS), max_size=12).map(journal_of),
        journal_file,
        (errors.DataError,),
        found=(journal_of([b"\x42\xff"]),),
    ),
    "panel at the Jupyter server": Receiver(
        st.tuples(
            st.sampled_from(["c", "--all", "", "\ud800"]) | st.text(max_size=9),
            as_json(like({"action": "stop", "agent": 7}, {"action": "renew", "hours": 8}))
            | near(b'{"action": "stop", "agent": 7}', b'{"action": "renew", "hours": 8.5}')
            | RAW,
        ),
        direct(receive_from_panel),
        (errors.TfdError,),
    ),
}
