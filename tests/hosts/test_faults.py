"""Blocked cells during faults between the hosts: notices, errors and recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tests.hosts._conformance import numbers, pids_on, row
from tests.hosts._faulty import Reading
from tests.hosts._hosts import Hosts
from tests.hosts._sshd import Sshds
from tfd_notebook import errors

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]

#: Creates a launcher with the dispatcher on ``north`` and the data workers on ``east``.
Make = Callable[..., tfd.launchers.SSH]
POLICY = tfd.Policy(hang_seconds=3)


@pytest.fixture(scope="module")
def make(sshd: Sshds) -> Make:
    def make(**options: Any) -> tfd.launchers.SSH:
        place = {"dispatcher": sshd.label("north"), "data_worker": sshd.label("east")}
        return sshd.launcher("north", "east", place=place, **options)

    return make


@pytest.fixture(scope="module")
def secure(make: Make) -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=1, name="secure", launcher=make(), policy=POLICY) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def plain(make: Make) -> Iterator[tfd.Cluster]:
    launcher = make(secure=False)
    with tfd.Cluster(data_workers=1, name="plain", launcher=launcher, policy=POLICY) as cluster:
        yield cluster


@pytest.fixture(scope="module", autouse=True)
def _both(secure: tfd.Cluster, plain: tfd.Cluster) -> None:
    """Start both before the first test inspects the processes on the hosts."""


@pytest.fixture(params=["secure", "plain"])
def cluster(request: pytest.FixtureRequest) -> tfd.Cluster:
    shared: tfd.Cluster = request.getfixturevalue(request.param)
    return shared


def endless(cluster: tfd.Cluster) -> Any:
    return tf.data.Dataset.range(10**9).apply(cluster.distribute("off"))


def is_whole(cluster: tfd.Cluster) -> None:
    """Check that a fault has left no process or notice."""
    until(lambda: cluster.state == "ready", 60)
    assert numbers(cluster) == list(range(100))
    until(lambda: not any(row.reason for row in cluster.snapshot().tasks), 60)


def test_silent_host_is_reported_and_recovers(cluster: tfd.Cluster, hosts: Hosts) -> None:
    def story(reading: Reading) -> None:
        hosts.down(hosts.east)
        reading.halts()
        reading.wait_for_notice("this kernel cannot reach", hosts.east.address, "data_worker:0")
        reading.wait_for_notice("lost the connection to", hosts.east.address, "data_worker:0")
        assert row(cluster, "data_worker:0").reason == "the connection to its host is lost"
        hosts.up(hosts.east)
        reading.moves()
        reading.wait_for_notice("reconnected to")

    Reading(cluster).loop(endless(cluster), story)
    is_whole(cluster)


def test_reader_of_a_silent_host_can_be_interrupted(cluster: tfd.Cluster, hosts: Hosts) -> None:
    def story(reading: Reading) -> None:
        hosts.partition(hosts.home, hosts.east)
        reading.halts()

    Reading(cluster).loop(endless(cluster), story)
    hosts.heal()
    is_whole(cluster)


def test_reset_connection_is_restored(cluster: tfd.Cluster, hosts: Hosts) -> None:
    def story(reading: Reading) -> None:
        hosts.reset(hosts.home, hosts.east)
        reading.wait_for_notice("lost the connection to", hosts.east.address, "data_worker:0")
        reading.halts()
        hosts.heal()
        reading.moves()
        reading.wait_for_notice("reconnected to")

    Reading(cluster).loop(endless(cluster), story)
    is_whole(cluster)


def test_reading_tolerates_33_percent_packet_loss(cluster: tfd.Cluster, hosts: Hosts) -> None:
    def story(reading: Reading) -> None:
        hosts.lose(hosts.home, hosts.east, 30)
        for _ in range(3):
            reading.moves()

    Reading(cluster).loop(endless(cluster), story)
    hosts.heal()
    is_whole(cluster)


def test_reading_tolerates_a_slow_network(cluster: tfd.Cluster, hosts: Hosts) -> None:
    def story(reading: Reading) -> None:
        hosts.slow(hosts.east, 400)
        for _ in range(3):
            reading.moves()

    Reading(cluster).loop(endless(cluster), story)
    hosts.heal()
    is_whole(cluster)


def test_sleeping_host_is_reported_and_recovers(cluster: tfd.Cluster, hosts: Hosts) -> None:
    def story(reading: Reading) -> None:
        hosts.east.sleep()
        reading.halts()
        reading.wait_for_notice("this kernel cannot reach", hosts.east.address, "data_worker:0")
        hosts.east.wake()
        reading.moves()

    Reading(cluster).loop(endless(cluster), story)
    is_whole(cluster)


def test_partitioned_hosts_are_named(plain: tfd.Cluster, hosts: Hosts) -> None:
    def story(reading: Reading) -> None:
        # Running iterations continue. The workers cannot receive new ones.
        hosts.partition(hosts.north, hosts.east)
        reading.moves()

    Reading(plain).loop(endless(plain), story)
    new_reading = Reading(plain)

    def begins(reading: Reading) -> None:
        reading.wait_for_notice(
            f"{hosts.east.address} cannot reach", hosts.north.address, "dispatcher:0"
        )
        hosts.heal()
        reading.moves()

    new_reading.loop(endless(plain), begins, waits=True)
    is_whole(plain)


def test_stream_recovers_from_a_fault(secure: tfd.Cluster, hosts: Hosts) -> None:
    def story(reading: Reading) -> None:
        hosts.partition(hosts.home, hosts.east)
        reading.halts()
        reading.wait_for_notice("this kernel cannot reach", hosts.east.address, "data_worker:0")
        hosts.heal()
        reading.moves()

    stream = secure.stream(endless(secure), name="streamed").start()
    Reading(secure).loop(stream, story)
    stream.stop()
    is_whole(secure)


def test_reading_tolerates_a_disconnected_dispatcher_host(
    secure: tfd.Cluster, hosts: Hosts
) -> None:
    def story(reading: Reading) -> None:
        hosts.reset(hosts.home, hosts.north)
        reading.wait_for_notice("lost the connection to", hosts.north.address, "dispatcher:0")
        hosts.heal()
        reading.wait_for_notice("reconnected to")
        reading.moves()

    Reading(secure).loop(endless(secure), story)
    is_whole(secure)


@pytest.mark.parametrize("is_secure", [True, False])
def test_reboot_of_a_host_ends_the_cluster(make: Make, hosts: Hosts, is_secure: bool) -> None:
    before = hosts.north.pids()
    launcher = make(secure=is_secure)
    cluster = tfd.Cluster(data_workers=1, name="died", launcher=launcher, policy=POLICY)
    reading = Reading(cluster)

    def story(reading: Reading) -> None:
        hosts.east.kill()
        reading.wait_for_notice("lost the connection to", hosts.east.address, "data_worker:0")
        hosts.mend()
        until(lambda: reading.over, 60)

    with pytest.raises(errors.AgentLost) as caught:
        reading.loop(endless(cluster), story)
    assert hosts.east.address in str(caught.value)
    assert "has ended" in str(caught.value)
    assert cluster.state == "lost"
    until(lambda: not pids_on(hosts.north, before))
    hosts.east.kill()  # the next test boots it again with its services
