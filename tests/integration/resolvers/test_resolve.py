"""`tfd.resolve` for TensorFlow's servers: running, suspended, killed, swapped and replaced."""

from __future__ import annotations

import http.server
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import tfd_notebook as tfd
from tests._ports import free_port
from tests._waiting import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(150),
    pytest.mark.usefixtures("plain_environment"),
]


class Servers:
    """Context manager with the servers of a cluster, each in a separate process."""

    def __init__(self, tasks: Any, **counts: int) -> None:
        self.spec = {
            job: [f"127.0.0.1:{free_port()}" for _ in range(count)] for job, count in counts.items()
        }
        self._tasks = tasks
        self._pids: dict[str, int] = {}

    def start(self, task: str) -> None:
        job, _, index = task.partition(":")
        self._pids[task] = self._tasks.start(job, spec=self.spec, index=int(index))

    def signal(self, task: str, number: int) -> None:
        os.kill(self._pids[task], number)

    def end(self, task: str) -> None:
        self._tasks.end(self._pids.pop(task))

    def __enter__(self) -> Servers:
        for job, addresses in self.spec.items():
            for index in range(len(addresses)):
                self.start(f"{job}:{index}")
        return self

    def __exit__(self, *_: object) -> None:
        for task in list(self._pids):
            self.end(task)


@pytest.fixture(scope="module")
def servers(tasks: Any) -> Iterator[Servers]:
    with Servers(tasks, ps=1, worker=2) as servers:
        yield servers


@pytest.fixture
def own_servers(tasks: Any) -> Iterator[Servers]:
    """Return two workers that a test may end."""
    with Servers(tasks, worker=2) as servers:
        yield servers


@contextmanager
def website(port: int) -> Iterator[None]:
    """Serve HTTP on a port."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", port), http.server.BaseHTTPRequestHandler
    )
    server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign,assignment]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_running_tasks_are_alive_and_can_be_attached(servers: Servers) -> None:
    resolution = tfd.resolve(servers.spec)
    frame = resolution.to_frame()
    assert list(frame["state"]) == ["alive"] * 3
    assert list(frame["identity"]) == ["ps:0", "worker:0", "worker:1"]
    assert list(frame["accelerators"]) == [""] * 3
    assert resolution.cell.endswith("strategy = cluster.strategy()")
    cluster = resolution.attach(connect=False)
    try:
        assert [task.name for task in cluster.tasks] == ["ps:0", "worker:0", "worker:1"]
        assert tfd.resolve(cluster).last.counts == {"alive": 3}
        local = tfd.resolve("local", name="found")
        assert local.cluster_spec().as_dict() == resolution.cluster_spec().as_dict()
    finally:
        cluster.stop()
    resolution.close()


def test_swapped_tasks_are_a_mismatch(servers: Servers) -> None:
    swapped = {"ps": servers.spec["worker"][:1], "worker": servers.spec["worker"][::-1]}
    frame = tfd.resolve(swapped).to_frame()
    assert list(frame["state"]) == ["mismatch"] * 3
    assert list(frame["identity"]) == ["worker:0", "worker:1", "worker:0"]


def test_suspended_process_is_hung_until_it_continues(servers: Servers) -> None:
    resolution = tfd.resolve(servers.spec)
    servers.signal("worker:1", signal.SIGSTOP)
    try:
        until(lambda: resolution.probe().tasks[2].state == "hung")
        assert resolution.last.counts == {"alive": 2, "hung": 1}
        assert "no answer" in resolution.last.tasks[2].reason
        # A new connection gets the same result.
        assert tfd.resolve(servers.spec).last.tasks[2].state == "hung"
    finally:
        servers.signal("worker:1", signal.SIGCONT)
    until(lambda: resolution.probe().counts == {"alive": 3})
    changes = [(change.task, change.before, change.after) for change in resolution.last.changes]
    assert changes == [("worker:1", "alive", "hung"), ("worker:1", "hung", "alive")]
    resolution.close()


def test_replaced_task_is_refused_then_foreign_then_alive(own_servers: Servers) -> None:
    resolution = tfd.resolve(own_servers.spec)
    looks = resolution.watch(120, every=0.1)
    assert next(looks).counts == {"alive": 2}
    own_servers.end("worker:1")
    assert next(looks).counts == {"alive": 1, "refused": 1}
    port = int(own_servers.spec["worker"][1].rpartition(":")[2])
    with website(port):
        assert next(looks).counts == {"alive": 1, "foreign": 1}
    assert next(looks).counts == {"alive": 1, "refused": 1}
    own_servers.start("worker:1")
    while (look := next(looks)).counts != {"alive": 2}:
        pass
    assert {change.task for change in look.changes} == {"worker:1"}
    ups_and_downs = resolution.history().to_frame()
    assert ups_and_downs["before"][0] == "alive"
    assert list(ups_and_downs["after"])[-1] == "alive"
    looks.close()
    resolution.close()


def test_data_service_of_this_process_is_detected() -> None:
    with tfd.Cluster(data_workers=1, name="images"):
        resolution = tfd.resolve("local")
        frame = resolution.to_frame()
        assert list(frame["job"]) == ["dispatcher", "data_worker"]
        assert list(frame["state"]) == ["alive"] * 2
        assert "tfd.attach" in resolution.cell
        resolution.close()
