"""Errors and killed processes: each ends the cluster within a limit and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.agent.bridges.spark_bootstrap import SECRETS
from tfd_notebook.net import runtime_dir
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.driver import startup
from tfd_notebook.spark.driver.registry import running
from tfd_notebook.spark.TFCluster import InputMode

pytestmark = pytest.mark.integration

#: Timeout in seconds of steps that take 1 s on an idle machine.
LONG = 60.0


def waiting_function() -> Any:
    """Return a function that never ends. Spark pickles a local function by value."""

    def function(args: Any, ctx: Any) -> None:
        import threading

        threading.Event().wait()

    return function


@contextlib.contextmanager
def running_cluster(sc: Any, function: Any = None, nodes: int = 2, **options: Any) -> Iterator[Any]:
    """Yield a running cluster and end it afterwards."""
    cluster = TFCluster.run(sc, function or waiting_function(), None, nodes, 0, **options)
    try:
        yield cluster
    finally:
        cluster.fail(errors.SparkError("the test is over"))
        until(lambda: cluster.name not in running(), LONG)


def all_ended(pids: list[int]) -> bool:
    return not any(runtime_dir.process_start(pid) for pid in pids)


def processes_of(cluster: Any) -> list[int]:
    """Return the pids of the nodes' processes and of their supervisors."""
    pids = [node.pid for node in cluster.nodes]
    return [*pids, *(psutil.Process(pid).ppid() for pid in pids)]


def fork_servers_of(jvm: int) -> list[psutil.Process]:
    """Return the fork servers of an executor."""
    return [process for process in psutil.process_iter() if _is_fork_server_of(process, jvm)]


def _is_fork_server_of(process: psutil.Process, jvm: int) -> bool:
    with contextlib.suppress(psutil.Error):
        value = process.environ().get("TFD_SPARK_FORK_SERVER")
        command = " ".join(process.cmdline())
        return (
            "executor.fork_server" in command and value is not None and json.loads(value)[1] == jvm
        )
    return False


def computes(sc: Any) -> bool:
    return bool(sc.parallelize(range(4), 2).sum() == 6)


@pytest.mark.parametrize("mode", list(InputMode))
def test_an_error_of_a_node_is_raised_at_once(sc: Any, tmp_path: Path, mode: InputMode) -> None:
    def function(args: Any, ctx: Any) -> None:
        while not (tmp_path / "gate").exists():
            time.sleep(0.01)
        if ctx.task_index == 0:
            time.sleep(1000)
        with (tmp_path / "raised").open("a") as file:
            file.write("raised\n")
        raise ValueError("no such column: price")

    def endless(_: Any) -> Iterator[int]:
        while True:
            time.sleep(0.01)
            yield 1

    # The heartbeat limit does not end this cluster within the timeouts of the test.
    with running_cluster(sc, function, input_mode=mode, heartbeat_limit=10 * LONG) as cluster:
        pids = processes_of(cluster)
        if mode is InputMode.SPARK:
            rows = sc.parallelize(range(2), 2).mapPartitions(endless)
            future = cluster.train(rows, 1, wait=False)
            until(lambda: cluster.phase == "feeding", LONG)
        else:
            future = cluster.shutdown(timeout=LONG, wait=False)
        (tmp_path / "gate").touch()
        with pytest.raises(errors.NodeFailed, match="price") as caught:
            future.result(LONG)
        assert caught.value.task == "worker:1"
        assert 'raise ValueError("no such column: price")' in str(caught.value)
        until(lambda: all_ended(pids), LONG)
        # The executors are free again: Spark neither continues the feed nor retries it.
        until(lambda: computes(sc), LONG)
    assert (tmp_path / "raised").read_text() == "raised\n"


def test_a_killed_executor_ends_the_cluster_and_fork_server(sc: Any) -> None:
    with running_cluster(sc) as cluster:
        pids = processes_of(cluster)
        victim = cluster.nodes[1]
        fork_servers = fork_servers_of(victim.jvm)
        assert fork_servers
        started = runtime_dir.process_start(victim.jvm) or 0.0
        os.kill(victim.jvm, signal.SIGKILL)
        runtime_dir.wait_for_end(victim.jvm, started)
        assert cluster.wait(LONG)
        assert cluster.phase == "failed"
        assert isinstance(cluster.error, errors.NodeLost)
        assert cluster.error.task == "worker:1"
        assert "executor" in str(cluster.error)
        until(lambda: all_ended([*pids, *(process.pid for process in fork_servers)]), LONG)
        with pytest.raises(errors.NodeLost):
            cluster.shutdown(timeout=LONG)
    assert computes(sc)


def test_a_cluster_runs_again_on_a_new_executor(sc: Any, tmp_path: Path) -> None:
    def function(args: Any, ctx: Any) -> None:
        (tmp_path / str(ctx.task_index)).touch()

    TFCluster.run(sc, function, None, 2, 0).shutdown(timeout=LONG)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_a_killed_executor_fails_the_feed(sc: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed()
        while not feed.should_stop():
            feed.next_batch(10)

    def slowly(_: Any) -> Iterator[int]:
        while True:
            time.sleep(0.01)
            yield 1

    with running_cluster(sc, function, input_mode=InputMode.SPARK) as cluster:
        feeding = cluster.train(sc.parallelize(range(4), 4).mapPartitions(slowly), 1, wait=False)
        until(lambda: all(row.rows for row in cluster.snapshot().spark.nodes), LONG)
        os.kill(cluster.nodes[0].jvm, signal.SIGKILL)
        with pytest.raises(errors.NodeLost) as caught:
            feeding.result(LONG)
        assert caught.value is cluster.error
    until(lambda: computes(sc), LONG)


def test_a_killed_node_fails_the_cluster(sc: Any) -> None:
    with running_cluster(sc) as cluster:
        pids = processes_of(cluster)
        os.kill(cluster.nodes[0].pid, signal.SIGKILL)
        assert cluster.wait(LONG)
        assert isinstance(cluster.error, errors.NodeLost)
        assert "worker:0" in str(cluster.error)
        assert "SIGKILL" in str(cluster.error)
        until(lambda: all_ended(pids), LONG)
    assert computes(sc)


def test_a_killed_supervisor_fails_the_cluster(sc: Any) -> None:
    with running_cluster(sc, heartbeat_limit=5) as cluster:
        pids = processes_of(cluster)
        os.kill(psutil.Process(cluster.nodes[0].pid).ppid(), signal.SIGKILL)
        assert cluster.wait(LONG)
        assert isinstance(cluster.error, errors.NodeLost)
        until(lambda: all_ended(pids), LONG)


def test_child_processes_of_a_function_end_with_it(sc: Any, tmp_path: Path) -> None:
    def function(args: Any, ctx: Any) -> None:
        import subprocess

        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (tmp_path / "pid").write_text(str(child.pid))

    TFCluster.run(sc, function, None, 1, 0).shutdown(timeout=LONG)
    until(lambda: all_ended([int((tmp_path / "pid").read_text())]), LONG)


def test_too_few_slots_are_refused_before_the_start(
    sc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(_: Any, description: str, __: Any) -> None:
        raise AssertionError(f"the Spark job {description!r} was submitted")

    monkeypatch.setattr(startup, "Job", job)
    with pytest.raises(errors.TfdError, match="3") as caught:
        TFCluster.run(sc, waiting_function(), None, 3, 0)
    assert isinstance(caught.value, errors.NotEnoughSlots)
    assert "2" in str(caught.value)
    assert not running()


def test_the_reservation_timeout_ends_the_start(sc: Any) -> None:
    released = threading.Event()
    rdd = sc.parallelize([0], 1)

    def occupy() -> None:
        with contextlib.suppress(Exception):
            sc.setJobGroup("occupy", "", interruptOnCancel=True)
            rdd.foreach(lambda _: __import__("time").sleep(1000))
        released.set()

    thread = threading.Thread(target=occupy)
    thread.start()
    until(lambda: sc.statusTracker().getActiveJobsIds(), LONG)
    with pytest.raises(errors.ReservationLimit, match="0 of 2 nodes") as caught:
        TFCluster.run(sc, waiting_function(), None, 2, 0, reservation_timeout=3)
    assert isinstance(caught.value, TimeoutError)
    sc.cancelJobGroup("occupy")
    assert released.wait(LONG)
    thread.join()
    assert computes(sc)


def test_shutdown_raises_after_its_timeout(sc: Any) -> None:
    with running_cluster(sc) as cluster:
        pids = processes_of(cluster)
        with pytest.raises(errors.TimeLimit, match="worker:0, worker:1"):
            cluster.shutdown(timeout=1)
        assert cluster.phase == "failed"
        until(lambda: all_ended(pids), LONG)
    assert computes(sc)


@pytest.mark.parametrize("limit", [0, 2.9, -1, float("nan"), float("inf"), True, "30", None])
def test_invalid_heartbeat_limits(sc: Any, limit: Any) -> None:
    with pytest.raises(errors.UsageError, match=r"invalid heartbeat_limit=.* 3 or more seconds"):
        TFCluster.run(sc, waiting_function(), None, 1, 0, heartbeat_limit=limit)
    assert not running()


@pytest.mark.parametrize("options", [{"timeout": -2}, {"grace_secs": -1}])
def test_invalid_timeouts_of_shutdown(sc: Any, options: dict[str, Any]) -> None:
    with running_cluster(sc, nodes=1) as cluster:
        with pytest.raises(errors.UsageError):
            cluster.shutdown(**options)
        until(lambda: cluster.phase == "running", LONG)


def test_ctrl_c_ends_the_wait_for_workers_only(sc: Any, tmp_path: Path) -> None:
    def function(args: Any, ctx: Any) -> None:
        while not (tmp_path / "gate").exists():
            time.sleep(0.05)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    try:
        with running_cluster(sc, function) as cluster:
            timer = threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                cluster.shutdown(timeout=-1)
            timer.join()
            until(lambda: cluster.phase == "running", LONG)
            (tmp_path / "gate").touch()
            cluster.shutdown(timeout=-1)
            assert cluster.phase == "stopped"
    finally:
        signal.signal(signal.SIGINT, before)


def test_shutdown_does_not_sleep_for_the_grace_period(sc: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        if ctx.job_name == "evaluator":
            time.sleep(1.0)

    with running_cluster(sc, function, eval_node=True) as cluster:
        # A shutdown that waits for the whole grace period returns without an error, but too late.
        cluster.shutdown(grace_secs=4 * LONG, wait=False).result(LONG)
        states = {row.node: row.state for row in cluster.snapshot().spark.nodes}
    assert states == {"evaluator:0": "finished", "worker:0": "finished"}


def test_nodes_are_stopped_after_the_grace_period(sc: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        import threading

        if ctx.job_name == "evaluator":
            threading.Event().wait()

    with running_cluster(sc, function, eval_node=True) as cluster:
        pids = [node.pid for node in cluster.nodes]
        began = time.monotonic()
        cluster.shutdown(grace_secs=2, timeout=LONG)
        assert time.monotonic() - began >= 2
        states = {row.node: row.state for row in cluster.snapshot().spark.nodes}
        until(lambda: all_ended(pids), LONG)
    assert states == {"evaluator:0": "stopped", "worker:0": "finished"}


def test_feed_timeout_counts_time_without_progress(sc: Any, tmp_path: Path) -> None:
    def function(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed()
        feed.next_batch(10)
        while not (tmp_path / "gate").exists():
            time.sleep(0.05)
        while not feed.should_stop():
            feed.next_batch(1000)

    def many(_: Any) -> Iterator[bytes]:
        return (bytes(100_000) for _ in range(1000))

    with running_cluster(sc, function, nodes=1, input_mode=InputMode.SPARK) as cluster:
        message = r"worker:0 .*for 3 s.* \d+ in its queue wait, the last batch was \d+ s ago"
        with pytest.raises(errors.FeedTimeout, match=message):
            cluster.train(sc.parallelize([0], 1).mapPartitions(many), 1, feed_timeout=3)
        (tmp_path / "gate").touch()
        until(lambda: cluster.phase == "running", LONG)
        cluster.shutdown(timeout=LONG)


def test_nodes_have_no_secret_of_spark_in_their_environment(sc: Any) -> None:
    secret = sc.getConf().get("spark.authenticate.secret")
    with running_cluster(sc, nodes=1) as cluster:
        node = psutil.Process(cluster.nodes[0].pid)
        assert secret in psutil.Process(cluster.nodes[0].jvm).environ().values()
        fork_servers = fork_servers_of(cluster.nodes[0].jvm)
        assert fork_servers
        for process in (node, node.parent(), *fork_servers):
            environment = process.environ()
            assert secret not in environment.values()
            assert not [name for name in environment if name.startswith(SECRETS)]


def test_secrets_are_not_printed(sc: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with running_cluster(sc) as cluster:
        secret = bytes(cluster.server.secret)
        reprs = repr(cluster) + repr(cluster.cluster_meta) + repr(cluster.cluster_info)
        reprs += repr(cluster.nodes) + repr(cluster._launch._plan) + cluster.logs()
        commands = "".join(
            " ".join(psutil.Process(pid).cmdline()) + repr(psutil.Process(pid).environ())
            for pid in processes_of(cluster)
        )
    out, err = capfd.readouterr()
    import base64

    for text in (reprs, commands, out, err):
        assert secret.hex() not in text
        assert repr(secret)[2:-1] not in text
        assert base64.b64encode(secret).decode() not in text


def test_nodes_end_without_messages_from_the_driver(sc: Any) -> None:
    """Nodes end by themselves if they receive no message within the heartbeat limit."""
    with running_cluster(sc, heartbeat_limit=3.0) as cluster:
        pids = processes_of(cluster)
        cluster.server.close()
        until(lambda: all_ended(pids), LONG)
