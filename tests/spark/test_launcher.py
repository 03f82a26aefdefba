"""``launcher="spark"`` on executors of this host; between hosts, see ``tests/hosts``."""

from __future__ import annotations

import signal
import stat
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests._bridges import bridges
from tests._recording import Relay
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.launchers.client import engine_workers
from tfd_notebook.net import runtime_dir
from tfd_notebook.testing import check_launcher

pytestmark = pytest.mark.integration


def numbers(cluster: tfd.Cluster) -> list[int]:
    import tensorflow as tf

    numbers = tf.data.Dataset.range(100).apply(cluster.distribute("dynamic"))
    return sorted(int(x) for x in numbers)


@pytest.mark.timeout(600)  # all checks, each with clusters
def test_launcher_conforms(spark: Any, sc: Any) -> None:
    check_launcher(tfd.launchers.Spark(spark))


def test_tasks_run_next_to_executors_and_use_no_slot(spark: Any, sc: Any) -> None:
    launcher = tfd.launchers.Spark(spark)
    with tfd.Cluster(data_workers=2, name="tasks", launcher=launcher) as cluster:
        assert numbers(cluster) == list(range(100))
        assert len(bridges()) == 2
        with pytest.raises(errors.Unsupported, match="ends with its Spark application"):
            cluster.detach()
        assert sc.parallelize(range(2), 2).barrier().mapPartitions(list).count() == 2
        frame = cluster.to_frame()
        assert set(frame["state"]) == {"ready"}
        for pid in frame["pid"]:
            assert "tfd_notebook" in " ".join(psutil.Process(pid).cmdline())
    until(lambda: not bridges())


def test_messages_between_driver_and_agents_are_encrypted(
    spark: Any, sc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    relays = []

    class RecordedRendezvous(engine_workers.Rendezvous):
        def __init__(self, address: str) -> None:
            super().__init__(address)
            relays.append(Relay(self.port))
            self.port = relays[0].port

    monkeypatch.setattr(engine_workers, "Rendezvous", RecordedRendezvous)
    launcher = tfd.launchers.Spark(spark, secure=True)
    value = "value-of-an-environment-variable"
    env = {"PASSWORD": value}
    try:
        with tfd.Cluster(data_workers=1, name="sealed", launcher=launcher, env=env) as cluster:
            pid = int(cluster.to_frame()["pid"].iloc[-1])
            assert psutil.Process(pid).environ()["PASSWORD"] == value
            assert numbers(cluster) == list(range(100))
            keys = list(runtime_dir.runtime_dir().glob("agent-*/sealed/tunnels/key.pem"))
            assert keys
            assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
        until(lambda: not bridges())
    finally:
        for relay in relays:
            relay.close()
    recorded = relays[0].recorded
    assert len(recorded) > 10_000
    for text in (value, "PASSWORD", "data_worker", "BEGIN CERTIFICATE", "PRIVATE KEY"):
        assert text.encode() not in recorded


def test_the_launcher_by_name_uses_the_active_session(spark: Any, sc: Any) -> None:
    with tfd.Cluster(data_workers=1, name="named", launcher="spark") as cluster:
        assert numbers(cluster) == list(range(100))
    with pytest.raises(errors.LaunchError, match="has 2 executors, but executors=5"):
        tfd.Cluster(data_workers=1, launcher=tfd.launchers.Spark(spark, executors=5))
    until(lambda: not bridges())


def test_tasks_of_killed_executors_are_lost_at_once(spark: Any, sc: Any) -> None:
    cluster = tfd.Cluster(data_workers=2, name="doomed", launcher=tfd.launchers.Spark(spark))
    pids = set(cluster.to_frame()["pid"])
    for process in psutil.Process().children(recursive=True):
        if process.name() == "java" and "--executor-id" in process.cmdline():
            process.send_signal(signal.SIGKILL)
    until(lambda: cluster.ended, 60.0)
    assert cluster.state == "lost"
    notices = " ".join(notice.what for notice in cluster.snapshot().notices)
    assert "its executor has ended" in notices
    until(lambda: not bridges() and not any(map(psutil.pid_exists, pids)), 60.0)
    # Spark has replaced the executors.
    launcher = tfd.launchers.Spark(spark)
    until(lambda: spark.sparkContext.parallelize(range(2), 2).count() == 2, 60.0)
    with tfd.Cluster(data_workers=1, name="second", launcher=launcher) as second:
        assert numbers(second) == list(range(100))
    until(lambda: not bridges())


def test_workers_and_ps_start(spark: Any, sc: Any) -> None:
    with tfd.Cluster(
        workers=2, ps=1, name="servers", launcher=tfd.launchers.Spark(spark)
    ) as cluster:
        assert {row.role for row in cluster.snapshot().tasks} == {"worker", "ps"}
        assert cluster.state == "ready"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"spark": 3}, "expected a SparkSession"), ({"executors": 0}, "invalid executors 0")],
)
def test_invalid_options_of_the_launcher(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.UsageError, match=message):
        tfd.Cluster(data_workers=1, launcher=tfd.launchers.Spark(**options))
