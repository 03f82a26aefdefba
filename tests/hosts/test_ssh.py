"""``launcher="ssh"`` between hosts, each with a real sshd."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import tfd_notebook as tfd
from tests import _nvml
from tests._waiting import until
from tests.hosts._conformance import Conformance, Make, numbers, row
from tests.hosts._hosts import Hosts
from tests.hosts._sshd import Sshds
from tfd_notebook import errors
from tfd_notebook.model.events import Notice

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
            with contextlib.suppress(psutil.Error):  # a session may end with another one
                if " ".join(psutil.Process(pid).cmdline()).startswith("sshd: root"):
                    os.kill(pid, signal.SIGKILL)

    return cut


#: The environment of tasks, with a secret.
ENV = {"MY_TOKEN": "S3CRET-that-is-never-shown"}


@pytest.fixture(scope="module")
def shared(make: Make) -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, name="shared", launcher=make(), env=ENV) as cluster:
        # The cluster keeps the ports of removed tasks.
        cluster.scale(data_workers=4)
        cluster.scale(data_workers=2)
        yield cluster


@pytest.fixture(scope="module")
def plain(make: Make) -> Iterator[tfd.Cluster]:
    """Yield a cluster without tunnels."""
    launcher = make(secure=False)
    with tfd.Cluster(data_workers=2, name="plain", launcher=launcher, env=ENV) as cluster:
        yield cluster


def connection_processes() -> set[psutil.Process]:
    mine = psutil.Process().children()
    return {child for child in mine if "ssh_connections" in " ".join(child.cmdline())}


TELL = """
import os
with open("/run/seen", "a") as file:
    print(os.environ["CUDA_VISIBLE_DEVICES"], file=file)
"""
KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


class TestSSH(Conformance):
    def test_no_listener_is_open_to_other_hosts(self, shared: tfd.Cluster, hosts: Hosts) -> None:
        port = shared.snapshot().task("data_worker:1").address.rpartition(":")[2]  # type: ignore[union-attr]
        there = [sys.executable, "-c", KNOCK, hosts.east.address, port]
        assert hosts.west.run(there).returncode
        assert set(shared.to_frame()["open_to"]) == {"loopback"}

    def test_only_the_clusters_hosts_can_connect_without_tunnels(
        self, hosts: Hosts, plain: tfd.Cluster
    ) -> None:
        assert numbers(plain) == list(range(100))
        where, _, port = plain.snapshot().task("data_worker:1").address.rpartition(":")  # type: ignore[union-attr]
        assert where == hosts.east.address
        there = [sys.executable, "-c", KNOCK, where, port]
        assert hosts.north.run(there).returncode == 0
        assert hosts.west.run(there).returncode

    def test_unreachable_hosts_are_named(self, hosts: Hosts, make: Make) -> None:
        hosts.partition(hosts.north, hosts.east)
        with pytest.raises(errors.LaunchError) as caught:
            tfd.Cluster(data_workers=2, name="parted", launcher=make(secure=False))
        text = str(caught.value)
        assert f"root@{hosts.east.address} cannot reach root@{hosts.north.address}" in text
        assert "the network between them" in text

    def test_changed_host_key_is_refused(
        self, sshd: Sshds, make: Make, shared: tfd.Cluster
    ) -> None:
        with (
            sshd["east"].changed_key(),
            pytest.raises(errors.LaunchError, match="host key is not in known_hosts"),
        ):
            tfd.Cluster(data_workers=1, name="changed", launcher=make())
        assert shared.state == "ready"

    def test_key_with_a_passphrase_is_reported(
        self, make: Make, labels: list[str], tmp_path: Path
    ) -> None:
        locked = str(tmp_path / "locked")
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "word", "-f", locked], check=True
        )
        with pytest.raises(errors.LaunchError, match="Passphrase") as caught:
            tfd.Cluster(data_workers=1, name="locked", launcher=make(key=locked))
        assert labels[0] in caught.value.what

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"key": "stranger_key"}, "rejected the login"),
            ({"python": "/nowhere/python"}, "starting an agent on"),
            ({"python": "/usr/bin/python3"}, "has no tfd-notebook"),
        ],
    )
    def test_errors_at_the_start_are_reported(
        self, sshd: Sshds, make: Make, options: dict[str, str], message: str
    ) -> None:
        if "key" in options:
            options = {"key": str(getattr(sshd, options["key"]))}
        with pytest.raises(errors.LaunchError, match=message):
            tfd.Cluster(data_workers=1, name="wrong", launcher=make(**options))
        assert "wrong" not in tfd.clusters()

    def test_workers_get_gpus_of_their_own_host(
        self, hosts: Hosts, make: Make, labels: list[str], tmp_path: Path
    ) -> None:
        _nvml.write_module(tmp_path)
        (tmp_path / "tell.py").write_text(TELL)
        _nvml.write_gpus(hosts.north.directory / "gpus", (10, 10**9), (20, 0))
        _nvml.write_gpus(hosts.east.directory / "gpus", *[(30, 3 * 10**9)] * 4)
        there = {"PYTHONPATH": str(tmp_path), _nvml.VARIABLE: "/run/gpus"}
        launcher = make(variables=there)
        with pytest.raises(errors.UsageError, match=f"needs 3, and there are 2 on {labels[0]}"):
            tfd.Cluster(workers=2, name="gpus", launcher=launcher, gpus={"worker": 3})
        with tfd.Cluster(workers=2, name="gpus", launcher=launcher, preload=["tell"]) as cluster:
            for host in (hosts.north, hosts.east):
                assert (host.directory / "seen").read_text() == "0,1\n"
            assert [notice.what for notice in cluster.snapshot().notices] == [
                f"each worker gets 2 of the 4 GPUs on {labels[1]}, "
                "the same for all: 2, 3 stay unused"
            ]
            until(lambda: cluster.gpus().to_frame().use_percent.notna().all())
            held = ["worker:0", "worker:0", "worker:1", "worker:1", "", ""]
            until(lambda: list(cluster.gpus().to_frame().task) == held)
            frame = cluster.gpus().to_frame()
            assert list(frame.host) == [labels[0]] * 2 + [labels[1]] * 4
            assert list(frame["index"]) == [0, 1, 0, 1, 2, 3]
            assert list(frame.use_percent) == [10, 20, 30, 30, 30, 30]
            assert list(frame.used_mb) == [1000, 0, 3000, 3000, 3000, 3000]
            used = "0: 30 %, 3.0 of 80 GB; 1: 30 %, 3.0 of 80 GB"
            until(lambda: row(cluster, "worker:1").gpu == used)
            with pytest.raises(errors.UsageError, match=f"2 workers on {labels[0]} need 4 GPUs"):
                cluster.scale(workers=3)
            _nvml.write_gpus(hosts.north.directory / "gpus", (99, 10**9), (20, 0))
            until(lambda: cluster.gpus().to_frame().use_percent[0] == 99)
            cluster.scale(workers=1)
            until(lambda: list(cluster.gpus().to_frame().task) == ["worker:0"] * 2 + [""] * 4)

    def test_logs_contain_no_secret(
        self, hosts: Hosts, sshd: Sshds, shared: tfd.Cluster, plain: tfd.Cluster
    ) -> None:
        secret = ENV["MY_TOKEN"]
        files = [*Path(hosts.north.directory).rglob("*"), *(server.log for server in sshd)]
        texts = [path.read_bytes() for path in files if path.is_file()]
        assert not any(secret.encode() in text for text in texts)
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in hosts.north.pids()]
        assert not any(secret.encode() in command for command in commands)
        assert not any(secret in str(cluster.logs()) for cluster in (shared, plain))


def test_tunnel_open_to_other_hosts_is_refused(make: Make, sshd: Sshds) -> None:
    with (
        sshd["east"].gateway_ports(),
        pytest.raises(errors.LaunchError, match="GatewayPorts") as caught,
    ):
        tfd.Cluster(data_workers=2, name="gateway", launcher=make())
    assert sshd.label("east") in str(caught.value)
    assert "gateway" not in tfd.clusters()


def test_reconnect_restores_tunnels_and_closes_exposed_ones(
    make: Make, sshd: Sshds, hosts: Hosts
) -> None:
    """The name of the refused cluster is free again."""
    others = connection_processes()
    with tfd.Cluster(data_workers=2, name="gateway", launcher=make()) as cluster:
        (process,) = connection_processes() - others
        process.kill()
        text = "reconnected to"
        until(lambda: len([n for n in cluster.snapshot().notices if text in n.what]) == 2)
        assert numbers(cluster) == list(range(100))
        port = int(row(cluster, "dispatcher:0").address.rpartition(":")[2])
        with sshd["east"].gateway_ports():
            for pid in hosts.east.pids():
                with contextlib.suppress(psutil.Error):  # a session may end with another one
                    if " ".join(psutil.Process(pid).cmdline()).startswith("sshd: root"):
                        os.kill(pid, signal.SIGKILL)

            def closed() -> list[Notice]:
                notices = cluster.snapshot().notices
                return [item for item in notices if f"port {port} was closed" in item.what]

            until(closed)
        (notice,) = closed()
        assert notice.severity == "error"
        assert "GatewayPorts" in notice.what
        assert sshd.label("east") in notice.what
    until(lambda: connection_processes() == others)
