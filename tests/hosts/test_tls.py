"""Encrypted tunnels without ssh, between hosts with a real stunnel."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tests.hosts._authority import Authority
from tests.hosts._conformance import Make, numbers, pids_on, row
from tests.hosts._hosts import Host, Hosts
from tests.hosts._jupyter import Jupyters
from tests.hosts._network import Peer
from tests.hosts._sshd import Sshds
from tfd_notebook import errors
from tfd_notebook.cluster import data_service

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def make(sshd: Sshds) -> Make:
    def make(*names: str, **options: object) -> tfd.launchers.SSH:
        return tfd.launchers.SSH(
            [f"root@{sshd[name].address}" for name in names or ("north", "east")],
            **{
                "python": sys.executable,
                "key": str(sshd.client_key),
                "known_hosts": str(sshd.known_hosts),
                "secure": "tls",
                **options,
            },
        )

    return make


@pytest.fixture(scope="module")
def shared(make: Make) -> Iterator[tfd.Cluster]:
    launcher = make("north", "east", "west")
    with tfd.Cluster(data_workers=2, name="shared", launcher=launcher) as cluster:
        yield cluster


#: Prints the ports of TCP sockets that listen on other addresses than loopback, except sshd's.
LISTENING = """
import psutil
for c in psutil.net_connections("tcp"):
    if c.status == "LISTEN" and not c.laddr.ip.startswith("127.") and c.laddr.ip != "::1":
        print(c.laddr.port)
"""


def open_ports(host: Host) -> set[int]:
    """Return the non-local listeners of a host, except for sshd and filtered TensorFlow servers."""
    completed = host.run([sys.executable, "-c", LISTENING])
    return {int(line) for line in completed.stdout.split()} - {22}


def knock(host: Host, address: str, port: int) -> bool:
    """Return True if a host can connect to a port."""
    code = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"
    return host.run([sys.executable, "-c", code, address, str(port)]).returncode == 0


def stunnels(host: Host) -> dict[str, int]:
    """Return the pids of a host's tunnels by the names of their configurations."""
    listeners = {}
    for pid in host.pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except FileNotFoundError:  # the process has ended
            continue
        if words[0].endswith("stunnel"):
            listeners[Path(words[1]).stem] = pid
    return listeners


def server_port(host: Host) -> int:
    """Return the port for the tunnels of other hosts."""
    (config,) = host.runtime.glob("agent-*/shared/tunnels/server.conf")
    (line,) = (line for line in config.read_text().splitlines() if line.startswith("accept"))
    return int(line.rpartition(" ")[2])


def test_training_data_flows_between_all_hosts(shared: tfd.Cluster, hosts: Hosts) -> None:
    assert shared.state == "ready"
    assert numbers(shared) == list(range(100))
    where = [row(shared, name).pid for name in ("dispatcher:0", "data_worker:1")]
    assert where[0] in hosts.north.pids()
    assert where[1] in hosts.east.pids()
    assert all(task.address.startswith("localhost:") for task in shared.tasks)
    assert len({task.address for task in shared.tasks}) == len(shared.tasks)


#: A training with a launcher's expression. It runs in a separate process, because TensorFlow cannot
#: undo a connection to a cluster.
TRAINING = """
import tensorflow as tf, tfd_notebook as tfd
with tfd.Cluster(workers=1, ps=1, name="training", launcher={launcher}) as cluster:
    coordinator = cluster.coordinator()
    with coordinator.strategy.scope():
        v = tf.Variable(1.0)
    @tf.function
    def step():
        v.assign_add(2.0)
        return v.read_value()
    value = coordinator.schedule(step)
    coordinator.join(timeout=60)
    print("got", float(value.fetch()), v.device)
"""


def test_workers_and_parameter_servers_use_the_tunnels(make: Make, hosts: Hosts) -> None:
    place = {"ps": f"root@{hosts.north.address}", "worker": f"root@{hosts.east.address}"}
    launcher = make(place=place)
    code = TRAINING.format(launcher=f"tfd.launchers.SSH(**{launcher.options!r})")
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150
    )
    assert "got 3.0 /job:ps" in completed.stdout, completed.stderr[-2000:]


def test_no_other_listener_is_open_to_other_hosts(shared: tfd.Cluster, hosts: Hosts) -> None:
    assert set(shared.to_frame()["open_to"]) == {"loopback"}
    for host in (hosts.north, hosts.east):
        others = [hosts.west, hosts.north if host is hosts.east else hosts.east]
        for port in open_ports(host) - {server_port(host)}:
            # TensorFlow's servers listen on all addresses, behind the package's packet filter.
            assert not any(knock(client, host.address, port) for client in others)
        assert knock(hosts.west, host.address, server_port(host))


def test_unauthenticated_clients_are_refused(
    shared: tfd.Cluster, hosts: Hosts, tmp_path: Path
) -> None:
    """Connect without a certificate, with one of another authority, and without TLS."""
    port, task = server_port(hosts.east), row(shared, "data_worker:1").address.rpartition(":")[2]
    other_authority = Authority(tmp_path / "other")
    certificate, key = other_authority.issue(Peer(f"p{task}.tfd", "127.0.0.1"))
    preface = "PRI * HTTP/2.0"
    code = f"""
import socket, ssl, sys
plain = socket.create_connection(({hosts.east.address!r}, {port}), 5)
plain.settimeout(60)
if sys.argv[1] == "plain":
    talk = plain
else:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if sys.argv[1] != "none":
        context.load_cert_chain(*sys.argv[2:])
    talk = context.wrap_socket(plain, server_hostname="p{task}.tfd")
talk.sendall(b"{preface}\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
answer = talk.recv(100)
print("answered" if answer[3:4] == bytes([4]) else "refused")
"""

    def answers(*words: str) -> str:
        completed = hosts.west.run([sys.executable, "-c", code, *words])
        return (
            completed.stdout.strip() or completed.stderr.strip().splitlines()[-1].partition(":")[0]
        )

    # With a certificate of the cluster, TensorFlow's server answers.
    own = next(hosts.west.runtime.glob("agent-*/shared/tunnels"))
    (mounted,) = (Path("/run/tfd") / own.relative_to(hosts.west.runtime),)
    assert answers("own", str(mounted / "certificate.pem"), str(mounted / "key.pem")) == "answered"
    refused = {"refused", "ssl.SSLError", "ssl.SSLEOFError", "ConnectionResetError"}
    assert answers("plain") in refused
    assert answers("none") in refused
    assert answers("other", str(certificate), str(key)) in refused
    assert shared.state == "ready"


def test_keys_are_readable_by_this_user_only(shared: tfd.Cluster, hosts: Hosts) -> None:
    for host in hosts:
        (directory,) = host.runtime.glob("agent-*/shared/tunnels")
        assert directory.stat().st_mode & 0o777 == 0o700
        clients = [path.name for path in directory.glob("client-*.pem")]
        assert clients
        for name in ("key.pem", "certificate.pem", "accepted.pem", *clients):
            assert (directory / name).stat().st_mode & 0o777 == 0o600
        # The authority's private key is not stored, so that no host can sign certificates.
        texts = "".join(path.read_text() for path in directory.iterdir() if path.is_file())
        assert texts.count("PRIVATE KEY") == 2


def test_killed_tunnel_is_restarted(shared: tfd.Cluster, hosts: Hosts) -> None:
    for host in (hosts.north, hosts.east):
        before = stunnels(host)
        assert "server" in before
        assert len(before) > 1
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)

        def are_back(host: Host = host, before: dict[str, int] = before) -> bool:
            now = stunnels(host)
            return set(now) == set(before) and not set(now.values()) & set(before.values())

        until(are_back)
    assert numbers(shared) == list(range(100))
    assert any("tunnel server" in notice.what for notice in shared.snapshot().notices)


def test_cluster_scales_with_tunnels(shared: tfd.Cluster, hosts: Hosts) -> None:
    shared.scale(data_workers=4)
    assert len(data_service.of(shared).data_workers()) == 4
    assert numbers(shared) == list(range(100))
    shared.scale(data_workers=2)
    assert numbers(shared) == list(range(100))


def test_lost_channel_does_not_affect_tunnels(shared: tfd.Cluster, hosts: Hosts) -> None:
    before = stunnels(hosts.north)
    for pid in hosts.north.pids():
        with contextlib.suppress(psutil.Error):  # a session may end with another one
            if " ".join(psutil.Process(pid).cmdline()).startswith("sshd: root"):
                os.kill(pid, signal.SIGKILL)
    assert numbers(shared) == list(range(100))
    assert stunnels(hosts.north) == before
    until(lambda: "reconnected to" in " ".join(n.what for n in shared.snapshot().notices))


def test_stop_removes_all_files_and_processes(hosts: Hosts, make: Make) -> None:
    before = {host: host.pids() for host in hosts}
    mine = {child.pid for child in psutil.Process().children(recursive=True)}
    with tfd.Cluster(data_workers=2, name="brief", launcher=make()) as cluster:
        assert numbers(cluster) == list(range(100))
        assert any("brief" in str(path) for path in hosts.east.runtime.rglob("key.pem"))
    until(lambda: not any(pids_on(host, before[host]) for host in hosts))
    assert not any("brief" in str(path) for host in hosts for path in host.runtime.rglob("*"))

    def own_tunnels() -> list[int]:
        children = psutil.Process().children(recursive=True)
        return [c.pid for c in children if c.name() == "stunnel" and c.pid not in mine]

    until(lambda: not own_tunnels())


def test_killed_agent_ends_its_tunnels(hosts: Hosts, make: Make) -> None:
    before = set(stunnels(hosts.east).values())
    cluster = tfd.Cluster(data_workers=2, name="headless", launcher=make())
    try:
        (directory,) = (path.parent for path in hosts.east.runtime.glob("agent-*/headless"))
        agent = next(
            pid
            for pid in hosts.east.pids()
            if f"TFD_AGENT={directory.name.removeprefix('agent-')}".encode()
            in Path(f"/proc/{pid}/environ").read_bytes()
            and b"agent.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        assert set(stunnels(hosts.east).values()) - before
        os.kill(agent, signal.SIGKILL)
        until(lambda: set(stunnels(hosts.east).values()) == before)
    finally:
        cluster.stop()
        for path in hosts.east.runtime.glob("agent-*/headless"):
            subprocess.run(["rm", "-r", path.parent], check=True)


def test_host_without_stunnel_is_reported(make: Make, hosts: Hosts) -> None:
    nowhere = {"PATH": "/nowhere"}
    with pytest.raises(errors.LaunchError, match="no stunnel") as caught:
        tfd.Cluster(data_workers=1, name="bare", launcher=make(variables=nowhere))
    assert f"root@{hosts.north.address}" in str(caught.value)
    assert "apt-get install stunnel4" in str(caught.value)
    assert "bare" not in tfd.clusters()


def test_jupyter_hosts_use_tunnels(hosts: Hosts, jupyter: Jupyters) -> None:
    launcher = tfd.launchers.Jupyter(
        [server.url for server in jupyter],
        token={server.url: server.token for server in jupyter},
        ca=str(jupyter.authority.path),
        secure=True,
    )
    with tfd.Cluster(data_workers=2, name="kernels", launcher=launcher) as cluster:
        assert numbers(cluster) == list(range(100))
        assert all(task.address.startswith("localhost:") for task in cluster.tasks)
        assert set(cluster.to_frame()["open_to"]) == {"loopback"}
        assert "server" in stunnels(hosts.east)


def test_secure_tls_is_a_launcher_option() -> None:
    ssh = tfd.launchers.SSH("one", secure="tls")
    assert tfd.launchers.SSH(**ssh.options).options == ssh.options
    assert ssh.options["secure"] == "tls"
    with pytest.raises(errors.UsageError, match="invalid secure 'ssl'"):
        tfd.launchers.SSH("one", secure="ssl")
