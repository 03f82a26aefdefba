"""Conformance tests for launchers for other hosts. Each launcher's module has a subclass."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tests.hosts._hosts import Host, Hosts
from tfd_notebook import errors
from tfd_notebook.cluster import data_service
from tfd_notebook.launchers.base import Launcher
from tfd_notebook.launchers.client import orphans
from tfd_notebook.testing import check_launcher

#: Creates a launcher for ``north`` and ``east``, with additional options.
Make = Callable[..., Launcher]

#: A process with a cluster, for the expression of a launcher.
OWNER = """
import sys, tfd_notebook as tfd
cluster = tfd.Cluster(data_workers=2, name="orphan", launcher={launcher})
print("ready", flush=True)
sys.stdin.read()
"""


def numbers(cluster: tfd.Cluster, count: int = 100) -> list[int]:
    """Read `count` numbers through the cluster."""
    import tensorflow as tf

    return sorted(int(x) for x in tf.data.Dataset.range(count).apply(cluster.distribute("dynamic")))


def pids_on(host: Host, before: set[int]) -> set[int]:
    """Return the new processes on a host, except for sessions of ssh."""
    started = set()
    for pid in host.pids() - before:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not " ".join(psutil.Process(pid).cmdline()).startswith("sshd: "):
                started.add(pid)
    return started


def await_reconnection(hosts: Hosts, cluster: tfd.Cluster) -> None:
    """Heal the hosts, and wait until the cluster is connected to all of them.

    A new connection may replace the cluster's process on a host, which the next test would miss.
    """
    hosts.heal()
    until(lambda: not any(status.reason for status in cluster.snapshot().tasks), 60)


def close_connections(host: Host) -> None:
    """Close the connections from the agents on a host to ports of this process."""
    mine = psutil.Process().net_connections("tcp")
    listening = {item.laddr.port for item in mine if item.status == psutil.CONN_LISTEN}
    for item in mine:
        if item.raddr and item.raddr.ip == host.address and item.laddr.port in listening:
            with socket.socket(fileno=os.dup(item.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def row(cluster: tfd.Cluster, task: str) -> Any:
    status = cluster.snapshot().task(task)
    assert status is not None
    return status


class Conformance:
    """Tests that share one cluster of two hosts, and tests with separate clusters.

    The module of a subclass defines these fixtures for all of its tests:

    make
        Function of type `Make`.
    written
        The launcher as an expression with ``tfd`` and {grace}.
    cut
        Function that ends the channel to ``north``, so that it can reconnect.
    shared
        Cluster with two data workers.
    """

    def test_tasks_run_on_both_hosts_and_serve(self, shared: tfd.Cluster, hosts: Hosts) -> None:
        assert shared.state == "ready"
        frame = shared.to_frame()
        assert set(frame["state"]) == {"ready"}
        assert frame["host"].nunique() == 2
        for place, task in enumerate(("dispatcher:0", "data_worker:1")):
            host = (hosts.north, hosts.east)[place]
            assert row(shared, task).pid in host.pids()
        assert numbers(shared) == list(range(100))

    @pytest.mark.timeout(600)  # many checks, each with clusters
    def test_launcher_conforms(self, make: Make) -> None:
        check_launcher(make())

    def test_large_function_is_sent(self, shared: tfd.Cluster) -> None:
        """The function is larger than the limit of a websocket's message."""
        import numpy as np
        import tensorflow as tf

        table = np.random.default_rng(0).integers(0, 256, 12_000_000, np.uint8)

        def look_up(x: Any) -> Any:
            return x + table[x] - table[x]

        dataset = tf.data.Dataset.range(4).map(lambda x: tf.numpy_function(look_up, [x], tf.int64))
        read = dataset.apply(shared.distribute("dynamic"))
        assert sorted(int(x) for x in read) == [0, 1, 2, 3]

    def test_logs_are_read_from_the_host(self, shared: tfd.Cluster) -> None:
        import tensorflow as tf

        def shout(x: Any) -> Any:
            print("received", int(x), flush=True)
            return x

        noisy = tf.data.Dataset.range(4).map(lambda x: tf.numpy_function(shout, [x], tf.int64))
        list(noisy.apply(shared.distribute("off")))
        until(lambda: "received 3" in str(shared.logs("data_worker:1")))
        assert "received 3" in str(shared.logs())
        following = shared.logs("data_worker:0", follow=True)
        assert any("received" in line for line in following)

    def test_killed_task_is_restarted_on_its_port(self, shared: tfd.Cluster) -> None:
        before = row(shared, "data_worker:1")
        assert shared.kill("data_worker:1") == before.pid
        until(lambda: row(shared, "data_worker:1").restarts > before.restarts)
        until(lambda: shared.state == "ready")
        after = row(shared, "data_worker:1")
        assert (after.address, after.host) == (before.address, before.host)
        assert after.pid != before.pid
        assert numbers(shared) == list(range(100))

    def test_restarted_task_keeps_its_port(self, shared: tfd.Cluster) -> None:
        before = row(shared, "data_worker:0")
        shared.restart("data_worker:0")
        after = row(shared, "data_worker:0")
        assert (after.address, after.state) == (before.address, "ready")
        assert after.pid != before.pid

    def test_cluster_scales_up_and_down(self, shared: tfd.Cluster) -> None:
        shared.scale(data_workers=4)
        assert len(data_service.of(shared).data_workers()) == 4
        assert numbers(shared) == list(range(100))
        shared.scale(data_workers=2)
        assert len(data_service.of(shared).data_workers()) == 2
        assert numbers(shared) == list(range(100))

    def test_blocked_calls_can_be_interrupted(self, shared: tfd.Cluster) -> None:
        import tensorflow as tf

        endless = iter(tf.data.Dataset.range(10**9).apply(shared.distribute("off")))
        next(endless)
        timer = threading.Timer(0.3, shared.interrupt)
        timer.start()
        with pytest.raises(errors.Interrupted):
            deque(endless, maxlen=0)
        timer.join()

    def test_journal_is_read_from_the_host(self, shared: tfd.Cluster) -> None:
        import tensorflow as tf

        named = tf.data.Dataset.range(10).apply(shared.distribute("dynamic", job_name="once"))
        assert sorted(int(x) for x in named) == list(range(10))
        until(
            lambda: (
                data_service.of(shared).journal is not None
                and data_service.of(shared).journal.read().finished("once")
            )
        )
        with pytest.raises(errors.FinishedJob, match="once-2"):
            tf.data.Dataset.range(10).apply(shared.distribute("dynamic", job_name="once"))

    def test_excessive_output_is_truncated(self, shared: tfd.Cluster) -> None:
        import tensorflow as tf

        def flood(x: Any) -> Any:
            print("x" * 10_000_000, flush=True)
            print("the end", flush=True)
            return x

        loud = tf.data.Dataset.range(1).map(lambda x: tf.numpy_function(flood, [x], tf.int64))
        list(loud.apply(shared.distribute("off")))
        until(lambda: "earlier output dropped" in str(shared.logs("data_worker:0", lines=100_000)))
        assert "the end" in str(shared.logs("data_worker:0"))

    def test_two_clusters_run_concurrently(self, shared: tfd.Cluster, make: Make) -> None:
        with tfd.Cluster(data_workers=1, name="second", launcher=make()) as second:
            assert numbers(second) == list(range(100))
            assert numbers(shared) == list(range(100))
        assert shared.state == "ready"

    def test_reconnected_channel_loses_no_event(
        self, shared: tfd.Cluster, cut: Callable[[], None]
    ) -> None:
        pid = row(shared, "data_worker:0").pid
        restarts = row(shared, "data_worker:0").restarts
        # The next channel reports the events before and after the interruption.
        os.kill(pid, signal.SIGKILL)
        cut()
        until(lambda: row(shared, "data_worker:0").restarts == restarts + 1)
        until(lambda: shared.state == "ready")
        assert row(shared, "data_worker:0").pid != pid
        assert numbers(shared) == list(range(100))
        shared.restart("dispatcher:0")
        assert numbers(shared) == list(range(100))

    def test_function_runs_next_to_the_workers_of_both_hosts(self, make: Make) -> None:
        def total(ctx: Any) -> Any:
            import tensorflow as tf

            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            value = tf.constant(1.0 + ctx.worker_num)
            return strategy.run(
                lambda: tf.distribute.get_replica_context().all_reduce("sum", value)
            )

        with tfd.Cluster(workers=2, name="ranks", launcher=make()) as cluster:
            assert cluster.run(total, timeout=120) == [3.0, 3.0]
            assert len({row.host for row in cluster.snapshot().ranks}) == 2

    def test_time_limit_stops_the_cluster(self, hosts: Hosts, make: Make) -> None:
        before = hosts.east.pids()
        # An agent counts from its first task, and the others must start before its limit.
        policy = tfd.Policy(time_limit=20.0)
        cluster = tfd.Cluster(data_workers=2, name="short", launcher=make(), policy=policy)
        until(lambda: cluster.ended, 60)
        until(lambda: not pids_on(hosts.east, before))

    def test_cluster_stops_if_its_owner_does_not_return(
        self, hosts: Hosts, written: str, shared: tfd.Cluster
    ) -> None:
        before = {host: host.pids() for host in hosts}
        code = OWNER.format(launcher=written.format(grace=2))
        owner = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert owner.stdout
            assert owner.stdout.readline() == "ready\n"
            assert pids_on(hosts.east, before[hosts.east])
        finally:
            owner.kill()
            owner.communicate()
        until(lambda: not any(pids_on(host, before[host]) for host in hosts), 60)
        orphans.sweep()  # removes the files of the killed process
        assert shared.state == "ready"

    def test_long_partition_ends_both_sides(
        self, hosts: Hosts, make: Make, shared: tfd.Cluster
    ) -> None:
        before = hosts.east.pids()
        cluster = tfd.Cluster(data_workers=2, name="parted", launcher=make(grace=3))
        hosts.partition(hosts.home, hosts.east)
        until(lambda: cluster.ended, 90)
        assert cluster.state == "lost"
        answer = " ".join(notice.what for notice in cluster.snapshot().notices)
        assert "lost the connection" in answer
        assert "could not be reached for 3 s" in answer
        until(lambda: not pids_on(hosts.east, before), 60)
        await_reconnection(hosts, shared)

    def test_invalid_credentials_or_host_raise_one_error(
        self, make: Make, hosts: Hosts, shared: tfd.Cluster
    ) -> None:
        hosts.down(hosts.east)
        with pytest.raises(errors.LaunchError, match=r"connecting to .* failed|cannot be reached"):
            tfd.Cluster(data_workers=1, name="nowhere", launcher=make())
        with contextlib.suppress(KeyError):
            assert "nowhere" not in tfd.clusters()
        await_reconnection(hosts, shared)
