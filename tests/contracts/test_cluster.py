"""A cluster of child processes: start, crashes, restarts, scaling, logs and magics."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell

import tfd_notebook as tfd
from tests._waiting import until
from tests.contracts._gate import WAIT
from tfd_notebook import errors
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.net.probe import probe
from tfd_notebook.ui import magics

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_coordinator")]

PRELOAD = """
import os
print("preloaded with", os.environ["TFD_GREETING"], "in", os.getcwd(), flush=True)
"""
CELL: dict[str, Any] = {
    "data_workers": 1,
    "workers": 2,
    "ps": 1,
    "evaluator": True,
    "name": "contract",
    "env": {"TFD_GREETING": "hello"},
    "preload": ["tfd_contract_preload"],
}


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, no_coordinator: None
) -> Iterator[tfd.Cluster]:
    directory = tmp_path_factory.mktemp("modules")
    (directory / "tfd_contract_preload.py").write_text(PRELOAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        with tfd.Cluster(**CELL) as cluster:
            yield cluster


def row(cluster: tfd.Cluster, task: str) -> TaskRow:
    result = cluster.snapshot().task(task)
    assert result is not None
    return result


def pids(cluster: tfd.Cluster) -> dict[str, int | None]:
    return {task.name: task.pid for task in cluster.tasks}


def notices(cluster: tfd.Cluster, task: str) -> list[str]:
    return [notice.what for notice in cluster.snapshot().notices if notice.task == task]


def answers(address: str, role: str) -> bool:
    """Return True if a server of this role answers a probe."""
    kind = role if role in ("dispatcher", "data_worker") else "server"
    probed = probe(address, timeout=WAIT, expect=kind)
    return probed.alive and probed.kind == kind


def ended(*processes: int | None) -> bool:
    return not any(psutil.pid_exists(pid) for pid in processes if pid)


def is_free(port: int) -> bool:
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("", port))
        except OSError:
            return False
        return True


def restarted(cluster: tfd.Cluster, before: TaskRow) -> TaskRow:
    """Wait until another process serves the task, and return its row."""

    def now() -> TaskRow | None:
        now = row(cluster, before.task)
        return now if now.pid != before.pid and now.state == "ready" else None

    result: TaskRow = until(now, WAIT)
    return result


# The first test, because the agent listens later at the ports of tasks that have failed or left.
def test_only_tasks_listen(cluster: tfd.Cluster) -> None:
    tasks = set(pids(cluster).values())
    helpers = [p for p in psutil.Process().children(recursive=True) if p.pid not in tasks]
    assert helpers
    connections = [item for helper in helpers for item in helper.net_connections("inet")]
    assert psutil.CONN_LISTEN not in {item.status for item in connections}


def test_started_tasks_are_ready_and_answer(cluster: tfd.Cluster) -> None:
    names = [task.name for task in cluster.tasks]
    assert names == [
        *("dispatcher:0", "data_worker:0", "ps:0", "worker:0", "worker:1", "evaluator:0"),
    ]
    for task in cluster.tasks:
        assert task.state == "ready"
        assert answers(task.address, str(task.role))
        assert row(cluster, task.name).open_to == "loopback"
    assert cluster.state == "ready"


def test_same_cell_returns_the_running_cluster(cluster: tfd.Cluster) -> None:
    before = pids(cluster)
    assert tfd.Cluster(**CELL) is cluster
    assert pids(cluster) == before
    assert list(tfd.clusters()) == ["contract"]


@pytest.mark.parametrize("task", ["data_worker:0", "ps:0", "evaluator:0"])
def test_killed_task_restarts_on_its_port(cluster: tfd.Cluster, task: str) -> None:
    before = row(cluster, task)
    assert before.pid
    os.kill(before.pid, signal.SIGKILL)
    after = restarted(cluster, before)
    assert (after.address, after.restarts) == (before.address, before.restarts + 1)
    assert answers(after.address, str(after.role))
    assert any("SIGKILL" in notice for notice in notices(cluster, task))


def test_kill_counts_as_a_crash(cluster: tfd.Cluster) -> None:
    before = row(cluster, "worker:0")
    assert cluster.kill("worker:0") == before.pid
    after = restarted(cluster, before)
    assert (after.address, after.restarts) == (before.address, before.restarts + 1)
    assert any("SIGKILL" in notice for notice in notices(cluster, "worker:0"))


@pytest.mark.parametrize("task", ["data_worker:0", "ps:0", "worker:0"])
def test_restart_starts_a_new_process(cluster: tfd.Cluster, task: str) -> None:
    before = row(cluster, task)
    cluster.restart(task)
    after = row(cluster, task)
    assert (after.state, after.address) == ("ready", before.address)
    assert after.pid != before.pid
    assert answers(after.address, str(after.role))


def test_scaling_adds_and_removes_only_the_last_tasks(cluster: tfd.Cluster) -> None:
    before = pids(cluster)
    cluster.scale(data_workers=2, workers=3)
    added = {name: pid for name, pid in pids(cluster).items() if name not in before}
    assert list(added) == ["data_worker:1", "worker:2"]
    for name in added:
        assert answers(row(cluster, name).address, str(row(cluster, name).role))
    cluster.scale(data_workers=1, workers=2)
    until(lambda: ended(*added.values()), WAIT)
    assert pids(cluster) == before


def test_function_runs_next_to_each_training_worker(cluster: tfd.Cluster) -> None:
    before = pids(cluster)

    def rank(factor: int, ctx: Any) -> tuple[int, int, int]:
        return factor * ctx.worker_num, ctx.num_workers, os.getpid()

    results = cluster.run(rank, 10, timeout=WAIT)
    assert [result[:2] for result in results] == [(0, 2), (10, 2)]
    processes = {result[2] for result in results}
    assert len(processes) == 2
    assert not processes & {*before.values(), os.getpid()}
    until(lambda: ended(*processes), WAIT)
    assert pids(cluster) == before


def test_task_has_environment_directory_and_log(cluster: tfd.Cluster) -> None:
    line = f"preloaded with hello in {os.getcwd()}"
    assert line in cluster.logs("data_worker:0")
    assert line in next(task for task in cluster.tasks if task.name == "ps:0").logs()


def test_frame_and_snapshot_show_each_task(cluster: tfd.Cluster) -> None:
    until(
        lambda: all(row.rss_mb and row.cpu_percent is not None for row in cluster.snapshot().tasks),
        WAIT,
    )
    frame = cluster.to_frame()
    assert list(frame.columns) == [
        *("task", "role", "index", "host", "address", "pid", "state", "reason"),
        *("cpu_percent", "rss_mb", "pss_mb", "gpu", "open_to", "restarts"),
    ]
    assert frame.task.tolist() == [task.name for task in cluster.tasks]
    assert set(frame.state) == {"ready"}
    assert frame.pid.tolist() == [task.pid for task in cluster.tasks]


def test_port_in_use_is_refused(cluster: tfd.Cluster) -> None:
    port = int(cluster.dispatcher.target.rpartition(":")[2])
    with pytest.raises(errors.PortInUse, match=str(port)):
        tfd.Cluster(name="second", service=tfd.Service(port=port))
    assert list(tfd.clusters()) == ["contract"]


def test_invalid_preload_names_the_task(cluster: tfd.Cluster) -> None:
    with pytest.raises(errors.LaunchError, match=r"ModuleNotFoundError.*tfd_no_such") as caught:
        tfd.Cluster(data_workers=1, name="invalid", preload="tfd_no_such_module")
    assert caught.value.task == "dispatcher:0"
    assert list(tfd.clusters()) == ["contract"]


def test_failed_task_has_the_reason_and_can_be_restarted() -> None:
    policy = tfd.Policy(restarts=0)
    with tfd.Cluster(data_workers=1, name="fragile", policy=policy) as cluster:
        before = row(cluster, "data_worker:0")
        assert before.pid
        os.kill(before.pid, signal.SIGKILL)
        until(lambda: row(cluster, "data_worker:0").state == "failed", WAIT)
        assert "SIGKILL" in row(cluster, "data_worker:0").reason
        assert cluster.state == "degraded"
        cluster.restart("data_worker:0")
        after = row(cluster, "data_worker:0")
        assert (after.state, after.address) == ("ready", before.address)
        assert cluster.state == "ready"


def test_end_of_a_with_block_stops_everything() -> None:
    with tfd.Cluster(data_workers=1, workers=1, ps=1, name="block") as cluster:
        processes = pids(cluster).values()
        ports = [int(task.address.rpartition(":")[2]) for task in cluster.tasks]
    assert cluster.state == "stopped"
    assert {row.state for row in cluster.snapshot().tasks} == {"stopped"}
    assert ended(*processes)
    for port in ports:
        until(lambda port=port: is_free(port), WAIT)  # a connection of another process may have it


def test_stop_works_from_any_thread() -> None:
    cluster = tfd.Cluster(data_workers=1, name="thread")
    stopper = threading.Thread(target=cluster.stop)
    stopper.start()
    assert cluster.dispatcher.join(timeout=WAIT)
    stopper.join(WAIT)
    assert cluster.state == "stopped"
    assert "thread" not in tfd.clusters()


def test_magics_start_show_and_stop_a_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFD_PRELOAD", "off")
    shell = InteractiveShell()
    magics.load_ipython_extension(shell)
    try:
        shell.run_cell("%tfd_cluster start --data-workers 1 --name magic")
        assert "it is in the variable 'cluster'" in capsys.readouterr().out
        cluster = shell.user_ns["cluster"]
        with cluster:
            address = row(cluster, "data_worker:0").address
            shell.run_cell("%tfd_cluster status magic")
            assert re.search(rf"data_worker:0 +● ready +{address}", capsys.readouterr().out)
            shell.run_cell("%tfd_cluster stop magic")
            assert "is stopped" in capsys.readouterr().out
            assert cluster.state == "stopped"
    finally:
        magics.unload_ipython_extension(shell)
        shell.history_manager.end_session()
