"""``launcher="spark"`` between hosts, with executors of a standalone master."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests._squares import squares_function
from tests._waiting import until
from tests.hosts._conformance import Conformance, Make, close_connections
from tests.hosts._hosts import Hosts
from tests.hosts._spark import Standalone
from tfd_notebook import errors
from tfd_notebook._compat import pyspark as private
from tfd_notebook.net.runtime_dir import variables
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.local_session import session as local_session_session

# A test may start Spark, or wait until it has replaced an executor, next to other tests.
pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(330)]


@pytest.fixture(scope="module")
def standalone(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    directory = tmp_path_factory.mktemp("spark")
    with Standalone(hosts, directory) as cluster, variables(cluster.environment):
        yield cluster


@pytest.fixture(scope="module")
def session(standalone: Standalone) -> Iterator[Any]:
    spark = eval(standalone.session())
    context = spark.sparkContext
    try:
        until(lambda: len(private.executors(context)) == 2, 120.0)
        # From now on, the daemon that forks Python workers keeps running.
        context.parallelize(range(2), 2).barrier().mapPartitions(list).collect()
        yield spark
    finally:
        local_session_session.end()


@pytest.fixture(scope="module")
def make(session: Any) -> Make:
    def make(**options: object) -> tfd.launchers.Spark:
        until(lambda: len(private.executors(session.sparkContext)) == 2, 60.0)
        return tfd.launchers.Spark(session, **options)

    return make


@pytest.fixture(scope="module")
def written(standalone: Standalone) -> str:
    return f"tfd.launchers.Spark({standalone.session()}, grace={{grace}})"


@pytest.fixture(scope="module")
def cut(hosts: Hosts) -> Callable[[], None]:
    return lambda: close_connections(hosts.north)


@pytest.fixture(scope="module")
def shared(make: Make) -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, name="shared", launcher=make()) as cluster:
        yield cluster


# Each test has its own, because a test may lose an executor. With this scope, the fixture precedes
# `_test_leaves_nothing`, which permits only processes that were started before it.
@pytest.fixture(scope="class")
def ready(session: Any) -> Any:
    """Return the session after each executor has started its process for TensorFlow."""

    def nothing(args: Any, ctx: Any) -> None:
        pass

    def runs() -> bool:
        # Spark lists an executor that a test has lost until its next check for such executors.
        try:
            TFCluster.run(session.sparkContext, nothing, None, 2, 0).shutdown(timeout=60)
        except errors.SparkError:
            return False
        return True

    until(lambda: len(private.executors(session.sparkContext)) == 2 and runs(), 120.0)
    return session


def test_host_without_a_worker_is_reported(ready: Any) -> None:
    """A host with a free slot and no worker is reported. A parameter server fills a slot.

    It precedes the tests that lose executors, because Spark may replace them on the other host.
    """
    sc = ready.sparkContext
    rows = sc.parallelize(range(100), 8)
    squares, spark_feeds = squares_function(), TFCluster.InputMode.SPARK
    with pytest.raises(errors.SparkError, match="no node that receives rows is on") as caught:
        TFCluster.run(sc, squares, None, 1, 0, input_mode=spark_feeds)
    assert "1 free slot:" in str(caught.value)
    for nodes, ps in ((2, 0), (2, 1)):
        cluster = TFCluster.run(sc, squares, None, nodes, ps, input_mode=spark_feeds)
        try:
            result = cluster.inference(rows).collect()
            assert result == [number * number for number in range(100)]
            cluster.shutdown(timeout=60)
        finally:
            cluster.fail(errors.SparkError("over"))


class TestSpark(Conformance):
    def test_logs_contain_no_secret(
        self, hosts: Hosts, standalone: Standalone, shared: tfd.Cluster
    ) -> None:
        for path in standalone.directory.rglob("*"):
            if path.is_file() and path.name != "spark-defaults.conf":
                assert standalone.secret.encode() not in path.read_bytes(), path
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                assert standalone.secret not in " ".join(process.cmdline())


def test_cluster_survives_a_silent_network_fault(hosts: Hosts, ready: Any) -> None:
    """TCP alone would retransmit 51 s after the cut, which is after the timeout."""

    sc = ready.sparkContext
    spark_feeds = TFCluster.InputMode.SPARK
    cluster = TFCluster.run(
        sc, squares_function(), None, 2, 0, input_mode=spark_feeds, heartbeat_limit=40
    )
    try:
        # Spark may restart an executor on either host.
        there = cluster.nodes[0]
        host = next(item for item in (hosts.east, hosts.north) if item.address in there.address)
        hosts.partition(hosts.home, host)
        try:
            until(lambda: time.monotonic() - there.last_message_at > 30, 90.0)
        finally:
            hosts.heal()
        cut = there.last_message_at
        until(lambda: all(node.last_message_at > cut for node in cluster.nodes))
        assert cluster.phase == "running"
        result = cluster.inference(sc.parallelize(range(100), 8)).collect()
        assert sorted(result) == [number * number for number in range(100)]
        cluster.shutdown(timeout=60)
    finally:
        cluster.fail(errors.SparkError("over"))
