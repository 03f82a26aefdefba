"""Probes of TensorFlow's servers: running, suspended, killed and restarted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests._waiting import until
from tfd_notebook.net.ports import reserve_port
from tfd_notebook.net.probe import (
    Prober,
    assigned_tasks,
    complete_tasks,
    dispatcher_workers,
    probe,
    probe_many,
)

pytestmark = pytest.mark.integration


@pytest.fixture
def ports() -> Iterator[list[int]]:
    held = [reserve_port() for _ in range(3)]
    ports = [sock.getsockname()[1] for sock in held]
    held.pop().close()  # a tf.distribute server needs an unreserved port
    yield ports
    for sock in held:
        sock.close()


@pytest.fixture
def pids(tasks: Any, ports: list[int]) -> Iterator[list[int]]:
    """Yield the pids of a dispatcher, a data worker and a parameter server."""
    started = [
        tasks.dispatcher(ports[0]),
        tasks.worker(ports[1], ports[0]),
        tasks.start("ps", spec={"ps": [f"localhost:{ports[2]}"]}),
    ]
    yield started
    for pid in started:
        tasks.end(pid)


def address(port: int) -> str:
    return f"localhost:{port}"


def test_probe_returns_the_kind_of_server(ports: list[int], pids: list[int]) -> None:
    probes = probe_many(map(address, ports))
    assert [p.kind for p in probes] == ["dispatcher", "data_worker", "server"]
    assert all(p.alive for p in probes)
    assert probes[0].version
    assert probes[2].devices[0].name == "/job:ps/replica:0/task:0/device:CPU:0"
    assert probes[2].devices[0].incarnation


def test_workers_and_their_tasks_are_listed(ports: list[int], pids: list[int]) -> None:
    assert dispatcher_workers(address(ports[0])) == (address(ports[1]),)
    assert probe(address(ports[1])).tasks == ()


def test_tasks_of_a_dead_worker_are_listed_and_completed(
    tasks: Any, ports: list[int], pids: list[int]
) -> None:
    import tensorflow as tf

    dispatcher, worker = map(address, ports[:2])
    # The end of a bare iterator may wait a minute for the autotuning thread.
    options = tf.data.Options()
    options.autotune.enabled = False
    distribute = tf.data.experimental.service.distribute("parallel_epochs", f"grpc://{dispatcher}")
    elements = iter(tf.data.Dataset.range(10**9).apply(distribute).with_options(options))
    next(elements)
    assigned = tuple(task.task_id for task in probe(worker).tasks)
    assert len(assigned) == 1
    tasks.end(pids[1])
    assert assigned_tasks(dispatcher, worker) == assigned
    complete_tasks(dispatcher, worker, assigned)
    assert assigned_tasks(dispatcher, worker) == ()
    assert sum(1 for _ in elements) < 10**8


def test_request_for_tasks_registers_an_unknown_worker(ports: list[int], pids: list[int]) -> None:
    """The reason why an error server checks the address first."""
    dispatcher, worker = map(address, ports[:2])
    assert assigned_tasks(dispatcher, "localhost:1") == ()
    assert set(dispatcher_workers(dispatcher)) == {worker, "localhost:1"}


def _stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(path.read_text().rpartition(")")[2].split()[0] == "T" for path in threads)


def test_suspended_process_is_hung(ports: list[int], pids: list[int]) -> None:
    with Prober() as prober:
        for port, pid in zip(ports, pids, strict=True):
            assert prober.probe(address(port)).alive
            os.kill(pid, signal.SIGSTOP)
            # Each thread stops when the kernel schedules it next.
            until(lambda: _stopped(pid))  # noqa: B023 - called in this iteration only
            assert prober.probe(address(port), timeout=0.3).state == "hung"
            assert probe(address(port), timeout=0.3).state == "hung"
            os.kill(pid, signal.SIGCONT)
            assert prober.probe(address(port)).alive


def test_killed_server_is_refused_until_its_restart(
    tasks: Any, ports: list[int], pids: list[int]
) -> None:
    with Prober() as prober:
        assert prober.probe(address(ports[1]), expect="data_worker").alive
        for _ in range(3):
            tasks.end(pids[1])
            for _ in range(5):
                assert prober.probe(address(ports[1]), expect="data_worker").state == "refused"
            pids[1] = tasks.worker(ports[1], ports[0])
            probed = prober.probe(address(ports[1]), expect="data_worker")
            assert probed.alive
            assert probed.latency_ms < 100


def test_twenty_probes_per_second_use_little_cpu(ports: list[int], pids: list[int]) -> None:
    with Prober() as prober:
        for expect, port in zip(("dispatcher", "data_worker", "server"), ports, strict=True):
            prober.probe(address(port), expect=expect)
            rounds = []
            for _ in range(5):
                start = time.process_time()
                for _ in range(20):
                    assert prober.probe(address(port), expect=expect).kind == expect
                rounds.append(time.process_time() - start)
            assert min(rounds) < 0.03  # 3 % of a core; the measured use is 0.3 to 0.5 %
