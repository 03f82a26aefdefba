"""Probes of servers of all kinds, without TensorFlow."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from tests._grpc import STATUS, Server, fails
from tests._ports import free_port
from tests._waiting import until
from tfd_notebook.errors import DataError, DispatcherLost, TimeLimit, UsageError
from tfd_notebook.net import probe as net_probe
from tfd_notebook.net import tf_messages
from tfd_notebook.net.probe import (
    Kind,
    Prober,
    WorkerTask,
    complete_tasks,
    dispatcher_workers,
    probe_many,
)

SECONDS = 60.0
probe = functools.partial(net_probe.probe, timeout=SECONDS)

VERSION = "/tensorflow.data.DispatcherService/GetVersion"
WORKERS = "/tensorflow.data.DispatcherService/GetWorkers"
UPDATE = "/tensorflow.data.DispatcherService/WorkerUpdate"
TASKS = "/tensorflow.data.WorkerService/GetWorkerTasks"


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """Run a TCP server that sends `answer` to every client, or accepts no connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        if answer is None:
            yield address
            return
        event = threading.Event()

        def serve() -> None:
            server.settimeout(0.05)
            while not event.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(SECONDS)
                    connection.recv(100)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield address
        finally:
            event.set()
            thread.join()


DISPATCHER = {VERSION: tf_messages.GetVersionResponse(version=9).SerializeToString()}
WORKER = {TASKS: b""}


def test_dispatcher_is_recognized() -> None:
    with Server(DISPATCHER) as server:
        result = probe(f"grpc://{server.address}")
    assert (result.address, result.state, result.kind) == (server.address, "alive", "dispatcher")
    assert result.alive
    assert result.version == 9
    assert not result.reason
    assert result.latency_ms > 0


def test_server_reports_its_devices() -> None:
    status = tf_messages.GetStatusResponse()
    status.device_attributes.add(
        name="/job:ps/replica:0/task:1/device:CPU:0",
        device_type="CPU",
        memory_limit=268435456,
        incarnation=2**63 + 1,
        physical_device_desc="a CPU",
    )
    with Server({STATUS: status.SerializeToString()}) as server:
        result = probe(server.address)
    assert result.kind == "server"
    (device,) = result.devices
    assert device.name.startswith("/job:ps/replica:0/task:1/")
    assert device.type == "CPU"
    assert device.memory_bytes == 268435456
    assert device.incarnation == 2**63 + 1
    assert device.description == "a CPU"


@pytest.mark.parametrize(("expect", "calls"), [(None, 3), ("data_worker", 1), ("dispatcher", 3)])
def test_expected_kind_needs_one_call(expect: str | None, calls: int) -> None:
    with Server(WORKER) as server:
        assert probe(server.address, expect=expect).kind == "data_worker"
        assert len(server.methods) == calls


def test_closed_port_is_refused() -> None:
    result = probe(f"127.0.0.1:{free_port()}")
    assert (result.state, result.kind) == ("refused", None)
    assert "refused" in result.reason


def test_unknown_name_is_unreachable() -> None:
    result = probe("missing.invalid:1")
    assert result.state == "unreachable"
    assert result.reason.startswith("the address of the host is unknown: ")
    assert len(result.reason) < 80


@pytest.mark.slow
def test_hung_server_is_reported_within_the_timeout() -> None:
    with listening(None) as address, Prober() as prober:
        for _ in range(2):  # the second call uses a cached connection
            start = time.monotonic()
            result = prober.probe(address, timeout=0.3)
            assert time.monotonic() - start > 0.2
            assert result.state == "hung"
            assert "0.3 s" in result.reason
        with pytest.raises(TimeLimit, match=r"0\.3 s"):
            dispatcher_workers(address, timeout=0.3)


@pytest.mark.slow
def test_unreachable_address_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        waiting = []
        for _ in range(4):  # fill the queue, so that the kernel drops new connections
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(server.getsockname())
        result = probe("{}:{}".format(*server.getsockname()), timeout=0.3)
        for connection in waiting:
            connection.close()
    assert result.state == "unreachable"
    assert "no connection" in result.reason


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n"], ids=["http", "ssh"]
)
def test_other_protocols_are_foreign(answer: bytes) -> None:
    with listening(answer) as address:
        result = probe(address)
    assert (result.state, result.kind) == ("foreign", None)


@pytest.mark.parametrize("expect", ["dispatcher", "data_worker", "server"])
def test_server_with_invalid_answers_is_foreign(expect: Kind) -> None:
    garbage = b"\xff" * 9
    with Server(dict.fromkeys((STATUS, VERSION, TASKS, WORKERS), garbage)) as server:
        result = probe(server.address, expect=expect)
        assert (result.state, result.kind) == ("foreign", "grpc")
        with pytest.raises(DispatcherLost, match="another server answers"):
            dispatcher_workers(server.address, SECONDS)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@pytest.mark.parametrize(("method", "expect"), [(STATUS, "server"), (TASKS, "data_worker")])
def test_long_reply_is_foreign(method: str, expect: Kind, compression: grpc.Compression) -> None:
    """A server may send a reply without an end, which is valid and can be small on the network."""
    status, tasks = tf_messages.GetStatusResponse(), tf_messages.GetWorkerTasksResponse()
    status.device_attributes.add(physical_device_desc="x" * 5_000_000)
    tasks.tasks.add(worker_address="x" * 5_000_000)
    reply = {STATUS: status, TASKS: tasks}[method].SerializeToString()

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_compression(compression)
        return reply

    with Server({method: answer}) as server:
        result = probe(server.address, expect=expect)
    assert (result.state, result.kind) == ("foreign", "grpc")


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_long_list_of_workers_is_refused(compression: grpc.Compression) -> None:
    workers = tf_messages.GetWorkersResponse()
    workers.workers.add(address="x" * 5_000_000)
    reply = workers.SerializeToString()

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_compression(compression)
        return reply

    with (
        Server({WORKERS: answer}) as server,
        pytest.raises(DispatcherLost, match="another server answers"),
    ):
        dispatcher_workers(server.address, SECONDS)


def test_other_grpc_server_is_foreign() -> None:
    with Server({}) as server:
        result = probe(server.address)
    assert (result.state, result.kind) == ("foreign", "grpc")


def test_refusal_has_a_reason() -> None:
    with Server({TASKS: fails(grpc.StatusCode.DATA_LOSS, "gone for good")}) as server:
        result = probe(server.address, expect="data_worker")
    assert (result.state, result.kind, result.reason) == ("foreign", "grpc", "gone for good")


def test_restarted_server_is_detected_at_once() -> None:
    port = free_port()
    with Prober() as prober:
        for _ in range(3):
            for _ in range(3):
                assert prober.probe(f"127.0.0.1:{port}", SECONDS).state == "refused"
            with Server(WORKER, port):
                assert prober.probe(f"127.0.0.1:{port}", SECONDS, "data_worker").alive
        # After a restart between two probes, the cached connection is dead but the task runs.
        with Server(WORKER, port):
            assert prober.probe(f"127.0.0.1:{port}", SECONDS, "data_worker").alive
        with Server(WORKER, port):
            assert prober.probe(f"127.0.0.1:{port}", SECONDS, "data_worker").alive


def test_probe_leaves_no_connection() -> None:
    with Server(WORKER) as server:
        probe(server.address)
        descriptors, threads = len(os.listdir("/dev/fd")), set(threading.enumerate())
        prober = Prober()
        for _ in range(20):
            prober.probe(server.address, SECONDS, "data_worker")
            probe(server.address)
        prober.close()
        prober.close()
        probe_many([server.address] * 8, SECONDS)
        until(lambda: len(os.listdir("/dev/fd")) <= descriptors)
        new = set(threading.enumerate()) - threads
        assert not [thread for thread in new if thread.name.startswith("tfd-probe")]


def test_probe_can_be_closed_by_another_thread() -> None:
    prober = Prober()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        address = "{}:{}".format(*server.getsockname())
        result = pool.submit(prober.probe, address, SECONDS)
        with server.accept()[0]:
            prober.close()
            assert result.result().state == "unreachable"


def test_many_probes_keep_their_order() -> None:
    with Server(DISPATCHER) as server, listening(b"SSH-2.0-OpenSSH_9.2\r\n") as ssh:
        addresses = [ssh, server.address, f"127.0.0.1:{free_port()}", ssh, ssh]
        result = probe_many(addresses, SECONDS)
    assert [p.address for p in result] == addresses
    assert [p.state for p in result] == ["foreign", "alive", "refused", "foreign", "foreign"]
    assert probe_many([]) == ()


def test_proxy_is_used_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with Server(DISPATCHER) as server:
        assert probe(server.address).alive
        assert not probe(server.address, via_proxy=True).alive


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:0", ":1", "a b:1:2", "localhost:99999"]
)
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError):
        probe(address)


def test_workers_and_tasks_of_a_dispatcher() -> None:
    workers, tasks = tf_messages.GetWorkersResponse(), tf_messages.GetWorkerTasksResponse()
    workers.workers.add(address="a:1")
    workers.workers.add(address="b:2")
    tasks.tasks.add(task_id=4000, iteration_id=2000)
    answers = {WORKERS: workers.SerializeToString(), TASKS: tasks.SerializeToString()}
    with Server(answers) as server:
        assert dispatcher_workers(server.address, SECONDS) == ("a:1", "b:2")
        assert probe(server.address).tasks == (WorkerTask(4000, 2000),)


def test_failed_requests_raise_errors() -> None:
    closed = f"127.0.0.1:{free_port()}"
    with pytest.raises(DispatcherLost, match="refused"):
        dispatcher_workers(closed)
    with Server({}) as server, pytest.raises(DispatcherLost, match="another server answers"):
        dispatcher_workers(server.address)
    broken = {WORKERS: fails(grpc.StatusCode.INTERNAL, "disk full")}
    with Server(broken) as server, pytest.raises(DataError, match="disk full"):
        dispatcher_workers(server.address)


def test_completed_tasks_are_listed() -> None:
    completed: list[tuple[str, int]] = []

    def update(request: bytes, context: grpc.ServicerContext) -> bytes:
        message = tf_messages.WorkerUpdateRequest.FromString(request)
        for progress in message.updates:
            if progress.task_id == 2:
                context.abort(grpc.StatusCode.NOT_FOUND, "Task 2 not found")
            assert progress.completed
            completed.append((message.worker_address, progress.task_id))
        return b""

    with Server({UPDATE: update}) as server:
        complete_tasks(server.address, "localhost:5", [1, 2, 3])
    assert completed == [("localhost:5", 1), ("localhost:5", 3)]
