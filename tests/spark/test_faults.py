"""What must happen when something goes wrong, each within a limit, and nothing is left behind."""

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
from tfd_notebook.spark.driver.registry import running
from tfd_notebook.spark.executor import executor
from tfd_notebook.spark.TFCluster import InputMode

pytestmark = pytest.mark.integration

#: Seconds for what takes one on an idle machine.
LONG = 60.0
#: Seconds for what takes one by itself; any limit that could be at work instead is longer.
PROMPT = 10.0


def waits() -> Any:
    """Return a function that never ends; made here, it travels by value."""

    def function(args: Any, ctx: Any) -> None:
        import threading

        threading.Event().wait()

    return function


@contextlib.contextmanager
def started(sc: Any, function: Any = None, nodes: int = 2, **options: Any) -> Iterator[Any]:
    """Have a cluster, and be sure of its end."""
    cluster = TFCluster.run(sc, function or waits(), None, nodes, 0, **options)
    try:
        yield cluster
    finally:
        cluster.fail(errors.SparkError("the test is over"))
        until(lambda: cluster.name not in running(), LONG)


def gone(pids: list[int]) -> bool:
    return not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in pids
    )


def processes_of(cluster: Any) -> list[int]:
    """Return the pids of the nodes' processes and of their supervisors."""
    pids = [node.pid for node in cluster.nodes]
    return [*pids, *(psutil.Process(pid).ppid() for pid in pids)]


def works(sc: Any) -> bool:
    return bool(sc.parallelize(range(4), 2).sum() == 6)


@pytest.mark.parametrize("mode", list(InputMode))
def test_an_error_is_told_at_once(sc: Any, tmp_path: Path, mode: InputMode) -> None:
    def function(args: Any, ctx: Any) -> None:
        while not (tmp_path / "gate").exists():
            time.sleep(0.01)
        if ctx.task_index == 0:
            time.sleep(1000)
        with (tmp_path / "raised").open("a") as file:
            file.write(f"{time.time()}\n")
        raise ValueError("no such column: price")

    def endless(_: Any) -> Iterator[int]:
        while True:
            time.sleep(0.01)
            yield 1

    with started(sc, function, input_mode=mode) as cluster:
        pids = processes_of(cluster)
        if mode is InputMode.SPARK:
            rows = sc.parallelize(range(2), 2).mapPartitions(endless)
            ending = cluster.train(rows, 1, wait=False)
            until(lambda: cluster.phase == "feeding", LONG)
        else:
            ending = cluster.shutdown(timeout=LONG, wait=False)
        (tmp_path / "gate").touch()
        with pytest.raises(errors.NodeFailed, match="price") as caught:
            ending.result(LONG)
        heard = time.time()
        assert caught.value.task == "worker:1"
        assert 'raise ValueError("no such column: price")' in str(caught.value)
        until(lambda: gone(pids), LONG)
        # The executors are free again: Spark does not go on with the feed, nor tries again.
        until(lambda: works(sc), LONG)
    (raised,) = (tmp_path / "raised").read_text().split()
    assert heard - float(raised) < PROMPT


def test_an_executor_is_killed(sc: Any) -> None:
    with started(sc) as cluster:
        pids = processes_of(cluster)
        victim = cluster.nodes[1]
        os.kill(victim.jvm, signal.SIGKILL)
        assert cluster.wait(LONG)
        assert cluster.phase == "failed"
        assert isinstance(cluster.error, errors.NodeLost)
        assert cluster.error.task == "worker:1"
        assert "executor" in str(cluster.error)
        until(lambda: gone(pids), LONG)
        with pytest.raises(errors.NodeLost):
            cluster.shutdown(timeout=LONG)
    assert works(sc)


def test_it_can_be_run_again_when_spark_has_a_new_executor(sc: Any, tmp_path: Path) -> None:
    def function(args: Any, ctx: Any) -> None:
        (tmp_path / str(ctx.task_index)).touch()

    TFCluster.run(sc, function, None, 2, 0).shutdown(timeout=LONG)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_an_executor_is_killed_while_it_is_fed(sc: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed()
        while not feed.should_stop():
            feed.next_batch(10)

    def slowly(_: Any) -> Iterator[int]:
        while True:
            time.sleep(0.01)
            yield 1

    with started(sc, function, input_mode=InputMode.SPARK) as cluster:
        feeding = cluster.train(sc.parallelize(range(4), 4).mapPartitions(slowly), 1, wait=False)
        until(lambda: all(row.rows for row in cluster.snapshot().spark.nodes), LONG)
        os.kill(cluster.nodes[0].jvm, signal.SIGKILL)
        with pytest.raises(errors.NodeLost) as caught:
            feeding.result(LONG)
        assert caught.value is cluster.error
    until(lambda: works(sc), LONG)


def test_a_node_is_killed(sc: Any) -> None:
    with started(sc) as cluster:
        pids = processes_of(cluster)
        os.kill(cluster.nodes[0].pid, signal.SIGKILL)
        assert cluster.wait(LONG)
        assert isinstance(cluster.error, errors.NodeLost)
        assert "worker:0" in str(cluster.error)
        assert "SIGKILL" in str(cluster.error)
        until(lambda: gone(pids), LONG)
    assert works(sc)


def test_a_supervisor_is_killed(sc: Any) -> None:
    with started(sc, heartbeat_limit=5) as cluster:
        pids = processes_of(cluster)
        os.kill(psutil.Process(cluster.nodes[0].pid).ppid(), signal.SIGKILL)
        assert cluster.wait(LONG)
        assert isinstance(cluster.error, errors.NodeLost)
        until(lambda: gone(pids), LONG)


def test_what_the_function_has_started_ends_with_it(sc: Any, tmp_path: Path) -> None:
    def function(args: Any, ctx: Any) -> None:
        import subprocess

        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (tmp_path / "pid").write_text(str(child.pid))

    TFCluster.run(sc, function, None, 1, 0).shutdown(timeout=LONG)
    until(lambda: gone([int((tmp_path / "pid").read_text())]), LONG)


def test_too_few_slots_are_refused_before_anything_starts(sc: Any) -> None:
    began = time.monotonic()
    with pytest.raises(errors.TfdError, match="3") as caught:
        TFCluster.run(sc, waits(), None, 3, 0)
    assert isinstance(caught.value, errors.NotEnoughSlots)
    assert "2" in str(caught.value)
    assert time.monotonic() - began < LONG
    assert not running()


def test_reservations_have_a_limit(sc: Any) -> None:
    release = threading.Event()
    held = sc.parallelize([0], 1)

    def occupy() -> None:
        with contextlib.suppress(Exception):
            sc.setJobGroup("occupy", "", interruptOnCancel=True)
            held.foreach(lambda _: __import__("time").sleep(1000))
        release.set()

    thread = threading.Thread(target=occupy)
    thread.start()
    until(lambda: sc.statusTracker().getActiveJobsIds(), LONG)
    with pytest.raises(errors.ReservationLimit, match="0 of 2 nodes") as caught:
        TFCluster.run(sc, waits(), None, 2, 0, reservation_timeout=3)
    assert isinstance(caught.value, TimeoutError)
    sc.cancelJobGroup("occupy")
    assert release.wait(LONG)
    thread.join()
    assert works(sc)


def test_shutdown_has_a_limit_and_raises(sc: Any) -> None:
    with started(sc) as cluster:
        pids = processes_of(cluster)
        with pytest.raises(errors.TimeLimit, match="worker:0, worker:1"):
            cluster.shutdown(timeout=1)
        assert cluster.phase == "failed"
        until(lambda: gone(pids), LONG)
    assert works(sc)


@pytest.mark.parametrize("limit", [0, 2.9, -1, float("nan"), float("inf"), True, "30", None])
def test_a_heartbeat_limit_that_cannot_be_meant(sc: Any, limit: Any) -> None:
    with pytest.raises(errors.UsageError, match=r"invalid heartbeat_limit .* 3 or more seconds"):
        TFCluster.run(sc, waits(), None, 1, 0, heartbeat_limit=limit)
    assert not running()


@pytest.mark.parametrize("options", [{"timeout": -2}, {"grace_secs": -1}])
def test_limits_that_cannot_be_meant(sc: Any, options: dict[str, Any]) -> None:
    with started(sc, nodes=1) as cluster:
        with pytest.raises(errors.UsageError):
            cluster.shutdown(**options)
        until(lambda: cluster.phase == "running", LONG)


def test_ctrl_c_ends_the_wait_for_workers_and_not_the_cluster(sc: Any, tmp_path: Path) -> None:
    def function(args: Any, ctx: Any) -> None:
        while not (tmp_path / "gate").exists():
            time.sleep(0.05)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    try:
        with started(sc, function) as cluster:
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


def test_grace_is_a_limit_and_no_sleep(sc: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        if ctx.job_name == "evaluator":
            time.sleep(1.0)

    with started(sc, function, eval_node=True) as cluster:
        began = time.monotonic()
        cluster.shutdown(grace_secs=LONG, timeout=4 * LONG)
        assert time.monotonic() - began < LONG
        states = {row.node: row.state for row in cluster.snapshot().spark.nodes}
    assert states == {"evaluator:0": "finished", "worker:0": "finished"}


def test_grace_has_a_limit(sc: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        import threading

        if ctx.job_name == "evaluator":
            threading.Event().wait()

    with started(sc, function, eval_node=True) as cluster:
        pids = [node.pid for node in cluster.nodes]
        began = time.monotonic()
        cluster.shutdown(grace_secs=2, timeout=LONG)
        assert time.monotonic() - began >= 2
        states = {row.node: row.state for row in cluster.snapshot().spark.nodes}
        until(lambda: gone(pids), LONG)
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

    with started(sc, function, nodes=1, input_mode=InputMode.SPARK) as cluster:
        said = r"worker:0 .*for 3 s.* \d+ in its queue wait, the last batch was \d+ s ago"
        with pytest.raises(errors.FeedTimeout, match=said):
            cluster.train(sc.parallelize([0], 1).mapPartitions(many), 1, feed_timeout=3)
        (tmp_path / "gate").touch()
        until(lambda: cluster.phase == "running", LONG)
        cluster.shutdown(timeout=LONG)


def test_no_secret_of_sparks_is_in_the_environment_of_nodes(sc: Any) -> None:
    secret = sc.getConf().get("spark.authenticate.secret")
    with started(sc, nodes=1) as cluster:
        node = psutil.Process(cluster.nodes[0].pid)
        executor = psutil.Process(cluster.nodes[0].jvm).environ()
        assert secret in executor.values()
        zygotes = [one for one in psutil.process_iter() if _is_zygote_of(one, cluster.nodes[0].jvm)]
        assert zygotes
        for process in (node, node.parent(), *zygotes):
            found = process.environ()
            assert secret not in found.values()
            assert not [name for name in found if name.startswith(SECRETS)]


def test_no_secret_is_printed(sc: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with started(sc) as cluster:
        secret = bytes(cluster.server.secret)
        shown = repr(cluster) + repr(cluster.cluster_meta) + repr(cluster.cluster_info)
        shown += repr(cluster.nodes) + repr(cluster._launch._plan) + cluster.logs()
        commands = "".join(
            " ".join(psutil.Process(pid).cmdline()) + repr(psutil.Process(pid).environ())
            for pid in processes_of(cluster)
        )
    out, err = capfd.readouterr()
    import base64

    for text in (shown, commands, out, err):
        assert secret.hex() not in text
        assert repr(secret)[2:-1] not in text
        assert base64.b64encode(secret).decode() not in text


def test_the_driver_falls_silent(sc: Any) -> None:
    """Nodes end by themselves when they hear nothing for the limit."""
    with started(sc, heartbeat_limit=3.0) as cluster:
        pids = processes_of(cluster)
        cluster.server.close()
        until(lambda: gone(pids), LONG)


def test_zygotes_end_with_their_executor(sc: Any) -> None:
    with started(sc) as cluster:
        (jvm,) = {node.jvm for node in cluster.nodes if node.assignment.index == 0}
        watch = executor.Watch(jvm, runtime_dir.process_start(jvm) or 0.0)
        found = [process.pid for process in psutil.process_iter() if _is_zygote_of(process, jvm)]
        assert found
        os.kill(jvm, signal.SIGKILL)
        watch.wait()
        watch.close()
        until(lambda: gone(found), LONG)


def _is_zygote_of(process: psutil.Process, jvm: int) -> bool:
    with contextlib.suppress(psutil.Error):
        value = process.environ().get("TFD_SPARK_ZYGOTE")
        command = " ".join(process.cmdline())
        return (
            "executor.fork_server" in command and value is not None and json.loads(value)[1] == jvm
        )
    return False
