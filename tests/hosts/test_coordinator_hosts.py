"""A coordinator in this process, whose workers and parameter servers are on other hosts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tests.hosts._conformance import row
from tests.hosts._hosts import Hosts
from tests.hosts._sshd import Sshds
from tfd_notebook.coordinator.coordinator import Coordinator
from tfd_notebook.errors import TimeLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.root,
    pytest.mark.timeout(170),
    # When TensorFlow's executors are collected, they log the expected errors.
    pytest.mark.filterwarnings("ignore:Exception ignored in. .*Executor.__del__"),
]


@pytest.fixture(scope="session", autouse=True)
def _ports_stay(leftovers: Any) -> None:
    """TensorFlow keeps a port for each connection until the process ends."""
    leftovers.own_ports = False


@pytest.fixture(scope="module", params=[True, False], ids=["secure", "plain"])
def cluster(request: pytest.FixtureRequest, hosts: Hosts, sshd: Sshds) -> Iterator[tfd.Cluster]:
    north, east = sshd.label("north"), sshd.label("east")
    place = {"ps": north, "worker": [north, east]}
    launcher = sshd.launcher("north", "east", secure=request.param, place=place)
    policy = tfd.Policy(hang_seconds=3)
    with tfd.Cluster(ps=1, workers=2, name="trained", launcher=launcher, policy=policy) as cluster:
        cluster.coordinator()
        yield cluster


@pytest.fixture
def coordinator(cluster: tfd.Cluster) -> Coordinator:
    return cluster.coordinator()


def counting(coordinator: Coordinator) -> Any:
    with coordinator.strategy.scope():
        total = tf.Variable(0.0)

    @tf.function
    def step(number: Any) -> Any:
        total.assign_add(1.0)
        return 2 * number

    return step, total


def test_lost_host_does_not_block_the_coordinator(hosts: Hosts, sshd: Sshds) -> None:
    north, east = sshd.label("north"), sshd.label("east")
    place = {"ps": north, "worker": [north, east]}
    launcher = sshd.launcher("north", "east", secure=False, place=place)
    with tfd.Cluster(ps=1, workers=2, name="vanishing", launcher=launcher) as cluster:
        coordinator = cluster.coordinator()
        step, _ = counting(coordinator)
        assert coordinator.schedule(step, args=(tf.constant(1),)).fetch() == 2
        coordinator.pause_worker(0)
        hosts.down(hosts.east)  # first, so that its death is not reported
        hosts.east.kill()
        coordinator.schedule(step, args=(tf.constant(5),))
        with pytest.raises(TimeLimit):
            coordinator.join(timeout=2)
    # TCP alone would wait 15 min for the host, and so would this process's closures and
    # destructors.
    until(lambda: not any("WorkerClosure" in t.name for t in threading.enumerate()))


def test_closures_run_on_both_hosts(coordinator: Coordinator, cluster: tfd.Cluster) -> None:
    step, total = counting(coordinator)
    values = [coordinator.schedule(step, args=(tf.constant(n),)) for n in range(40)]
    coordinator.join(timeout=60)
    assert coordinator.fetch(values) == [2 * n for n in range(40)]
    assert total.numpy() == 40
    assert cluster.to_frame()["host"].nunique() == 2
    for index in (0, 1):
        coordinator.pause_worker(1 - index)
        assert coordinator.schedule(step, args=(tf.constant(3),)).fetch() == 6
        coordinator.resume_worker(1 - index)


def test_each_worker_has_a_separate_dataset(coordinator: Coordinator) -> None:
    @tf.function
    def per_worker() -> Any:
        return tf.data.Dataset.range(10).repeat()

    @tf.function
    def step(iterator: Any) -> Any:
        return next(iterator)

    iterator = iter(coordinator.create_per_worker_dataset(per_worker))
    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(6)]
    coordinator.join(timeout=60)
    assert all(0 <= value < 6 for value in coordinator.fetch(values))


def test_killed_worker_is_restarted(coordinator: Coordinator, cluster: tfd.Cluster) -> None:
    step, _ = counting(coordinator)
    assert coordinator.schedule(step, args=(tf.constant(1),)).fetch() == 2
    before = row(cluster, "worker:1")
    os.kill(before.pid, signal.SIGKILL)
    values = [coordinator.schedule(step, args=(tf.constant(n),)) for n in range(40)]
    coordinator.join(timeout=90)
    assert coordinator.fetch(values) == [2 * n for n in range(40)]
    # The other worker may have run all closures before the agent reports the end of this one.
    until(lambda: row(cluster, "worker:1").restarts > before.restarts, 60)
    until(lambda: cluster.state == "ready", 60)
    assert row(cluster, "worker:1").pid != before.pid
    coordinator.pause_worker(0)
    value = coordinator.schedule(step, args=(tf.constant(4),))
    assert value.fetch() == 8
    coordinator.resume_worker(0)


def test_host_reconnects_after_a_partition(
    coordinator: Coordinator, cluster: tfd.Cluster, hosts: Hosts
) -> None:
    step, _ = counting(coordinator)
    assert coordinator.schedule(step, args=(tf.constant(1),)).fetch() == 2
    known = len(cluster.snapshot().notices)
    coordinator.pause_worker(0)
    hosts.down(hosts.east)
    try:
        value = coordinator.schedule(step, args=(tf.constant(5),))
        with pytest.raises(TimeLimit):
            coordinator.join(timeout=5)
        ctrl_c = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        ctrl_c.start()
        with pytest.raises(KeyboardInterrupt):
            coordinator.join()
        ctrl_c.join()

        def loss_notices() -> list[str]:
            notices = [notice.what for notice in cluster.snapshot().notices[known:]]
            return [what for what in notices if hosts.east.address in what and "worker:1" in what]

        until(loss_notices, 60)
    finally:
        # A running closure blocks TensorFlow's destructors until its host answers.
        hosts.heal()
    assert value.fetch() == 10
    coordinator.resume_worker(0)
    values = [coordinator.schedule(step, args=(tf.constant(n),)) for n in range(20)]
    coordinator.join(timeout=60)
    assert coordinator.fetch(values) == [2 * n for n in range(20)]
