"""``launcher="spark"`` between hosts of their own, with executors of a standalone master."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tests.hosts._conformance import Conformance, Make
from tests.hosts._hosts import Hosts
from tests.hosts._spark import Standalone
from tests.spark._sources import SQUARES
from tfd_notebook._compat import spark as private
from tfd_notebook.launch.variables import variables
from tfd_notebook.spark import TFCluster, sessions

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def standalone(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    directory = tmp_path_factory.mktemp("spark")
    with Standalone(hosts, directory) as made, variables(made.environment):
        yield made


@pytest.fixture(scope="module")
def session(standalone: Standalone) -> Iterator[Any]:
    spark = eval(standalone.session())
    context = spark.sparkContext
    try:
        until(lambda: len(private.executors(context)) == 2, 120.0)
        # What forks Python's workers stays from now on.
        context.parallelize(range(2), 2).barrier().mapPartitions(list).collect()
        yield spark
    finally:
        sessions.end()


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
    def cut() -> None:
        """End the connections that the executor's end at ``north`` has made to this process."""
        mine = psutil.Process().net_connections("tcp")
        listening = {one.laddr.port for one in mine if one.status == psutil.CONN_LISTEN}
        for one in mine:
            if one.raddr and one.raddr.ip == hosts.north.address and one.laddr.port in listening:
                with socket.socket(fileno=os.dup(one.fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    return cut


@pytest.fixture(scope="module")
def shared(make: Make) -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, name="shared", launcher=make()) as cluster:
        yield cluster


class TestSpark(Conformance):
    def test_no_secret_is_in_any_log(
        self, hosts: Hosts, standalone: Standalone, shared: tfd.Cluster
    ) -> None:
        for path in standalone.directory.rglob("*"):
            if path.is_file() and path.name != "spark-defaults.conf":
                assert standalone.secret.encode() not in path.read_bytes(), path
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                assert standalone.secret not in " ".join(process.cmdline())


FED = (
    SQUARES
    + """
import json
import tfd_notebook as tfd
from tfd_notebook._compat import spark as private
from tfd_notebook.spark import TFCluster
from tests._waiting import until

spark = {session}
sc = spark.sparkContext
until(lambda: len(private.executors(sc)) == 2, 120.0)
rows = sc.parallelize(range(100), 8)
said = []
for nodes, ps in ((1, 0), (2, 0), (2, 1)):
    try:
        cluster = TFCluster.run(sc, squares, None, nodes, ps, input_mode=TFCluster.InputMode.SPARK)
    except tfd.errors.SparkError as error:
        said.append(str(error))
        continue
    try:
        said.append(cluster.inference(rows).collect())
        cluster.shutdown(timeout=60)
    finally:
        cluster.fail(tfd.errors.SparkError("over"))
spark.stop()
print(json.dumps(said), flush=True)
"""
)


def test_a_host_to_which_rows_would_come_in_vain(standalone: Standalone) -> None:
    """One that has a free slot and no worker is told at the start; a parameter server fills one."""
    done = subprocess.run(
        [sys.executable, "-c", FED.replace("{session}", standalone.session())],
        capture_output=True,
        text=True,
        timeout=160,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    alone, *results = json.loads(done.stdout.splitlines()[-1])
    assert "no node that takes rows is on" in alone
    assert "1 free slot:" in alone
    assert results == [[number * number for number in range(100)]] * 2


@pytest.fixture(scope="module")
def ready(session: Any) -> Any:
    """The session, when each executor has the process that it keeps for TensorFlow."""

    def nothing(args: Any, ctx: Any) -> None:
        pass

    until(lambda: len(private.executors(session.sparkContext)) == 2, 60.0)
    TFCluster.run(session.sparkContext, nothing, None, 2, 0).shutdown(timeout=60)
    return session


def test_a_cluster_outlives_a_network_that_was_cut_without_a_word(hosts: Hosts, ready: Any) -> None:
    """TCP alone would try again 51 s after the cut, when the limit has passed."""

    def squares(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed(train_mode=False)
        while not feed.should_stop():
            if rows := feed.next_batch(16):
                feed.batch_results([row * row for row in rows])

    sc = ready.sparkContext
    spark_feeds = TFCluster.InputMode.SPARK
    cluster = TFCluster.run(sc, squares, None, 2, 0, input_mode=spark_feeds, heartbeat_limit=40)
    try:
        # An executor that Spark started again may be on either host, next to the other one.
        there = cluster.nodes[0]
        host = next(one for one in (hosts.east, hosts.north) if one.address in there.address)
        hosts.partition(hosts.home, host)
        try:
            until(lambda: time.monotonic() - there.heard > 30, 45.0)
        finally:
            hosts.heal()
        cut = there.heard
        until(lambda: all(node.heard > cut for node in cluster.nodes), 20.0)
        assert cluster.phase == "running"
        found = cluster.inference(sc.parallelize(range(100), 8)).collect()
        assert sorted(found) == [number * number for number in range(100)]
        cluster.shutdown(timeout=60)
    finally:
        cluster.fail(tfd.errors.SparkError("over"))
