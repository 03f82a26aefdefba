"""``launcher="ssh"`` between hosts of their own, each with a real sshd."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import tfd_notebook as tfd
from tests.hosts._conformance import Conformance, Make, numbers
from tests.hosts._hosts import Hosts
from tests.hosts._sshd import Sshds
from tfd_notebook import errors

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def labels(sshd: Sshds) -> list[str]:
    return [f"root@{sshd[name].address}" for name in ("north", "east")]


@pytest.fixture(scope="module")
def make(sshd: Sshds, labels: list[str]) -> Make:
    def make(hosts: list[str] = labels, **options: object) -> tfd.launchers.SSH:
        return tfd.launchers.SSH(
            hosts,
            **{
                "python": sys.executable,
                "key": str(sshd.client_key),
                "known_hosts": str(sshd.known_hosts),
                **options,
            },
        )

    return make


@pytest.fixture(scope="module")
def written(sshd: Sshds, labels: list[str]) -> str:
    return (
        f"tfd.launchers.SSH({labels!r}, python={sys.executable!r}, "
        f"key={str(sshd.client_key)!r}, known_hosts={str(sshd.known_hosts)!r}, grace={{grace}})"
    )


@pytest.fixture(scope="module")
def cut(hosts: Hosts) -> Callable[[], None]:
    def cut() -> None:
        for pid in hosts.north.pids():
            name = " ".join(psutil.Process(pid).cmdline())
            if name.startswith("sshd: root"):
                os.kill(pid, signal.SIGKILL)

    return cut


@pytest.fixture(scope="module")
def shared(make: Make) -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, name="shared", launcher=make()) as cluster:
        # The ports of tasks that have left stay the cluster's.
        cluster.scale(data_workers=4)
        cluster.scale(data_workers=2)
        yield cluster


KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


class TestSSH(Conformance):
    def test_nothing_listens_for_other_hosts(self, shared: tfd.Cluster, hosts: Hosts) -> None:
        port = shared.snapshot().task("data_worker:1").address.rpartition(":")[2]  # type: ignore[union-attr]
        there = [sys.executable, "-c", KNOCK, hosts.east.address, port]
        assert hosts.west.run(there).returncode
        assert set(shared.to_frame()["open_to"]) == {"this host"}

    def test_without_tunnels_exactly_the_clusters_hosts_come_in(
        self, hosts: Hosts, make: Make
    ) -> None:
        with tfd.Cluster(data_workers=2, name="plain", launcher=make(secure=False)) as cluster:
            assert numbers(cluster) == list(range(100))
            where, _, port = cluster.snapshot().task("data_worker:1").address.rpartition(":")  # type: ignore[union-attr]
            assert where == hosts.east.address
            there = [sys.executable, "-c", KNOCK, where, port]
            assert hosts.north.run(there).returncode == 0
            assert hosts.west.run(there).returncode

    def test_hosts_that_cannot_talk_are_named(self, hosts: Hosts, make: Make) -> None:
        hosts.partition(hosts.north, hosts.east)
        with pytest.raises(errors.LaunchError) as told:
            tfd.Cluster(data_workers=2, name="parted", launcher=make(secure=False))
        said = str(told.value)
        assert f"root@{hosts.east.address} cannot reach root@{hosts.north.address}" in said
        assert "the network between them" in said

    def test_a_host_key_that_changed_is_refused(
        self, sshd: Sshds, make: Make, shared: tfd.Cluster
    ) -> None:
        with (
            sshd["east"].changed_key(),
            pytest.raises(errors.LaunchError, match="host key is not the one in known_hosts"),
        ):
            tfd.Cluster(data_workers=1, name="changed", launcher=make())
        assert shared.state == "ready"

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"key": "stranger_key"}, "refuses the login"),
            ({"python": "/nowhere/python"}, "no agent could be started"),
            ({"python": "/usr/bin/python3"}, "has no tfd-notebook"),
        ],
    )
    def test_what_is_wrong_there_is_said(
        self, sshd: Sshds, make: Make, options: dict[str, str], said: str
    ) -> None:
        if "key" in options:
            options = {"key": str(getattr(sshd, options["key"]))}
        with pytest.raises(errors.LaunchError, match=said):
            tfd.Cluster(data_workers=1, name="wrong", launcher=make(**options))
        assert "wrong" not in tfd.clusters()

    def test_no_secret_is_in_any_log(self, hosts: Hosts, sshd: Sshds, make: Make) -> None:
        secret = "S3CRET-that-nobody-shall-see"
        env = {"MY_TOKEN": secret}
        with tfd.Cluster(data_workers=1, name="quiet", launcher=make(), env=env) as cluster:
            files = [*Path(hosts.north.directory).rglob("*"), *(server.log for server in sshd)]
            texts = [path.read_bytes() for path in files if path.is_file()]
            assert not any(secret.encode() in text for text in texts)
            commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in hosts.north.pids()]
            assert not any(secret.encode() in command for command in commands)
            assert secret not in str(cluster.logs())
