"""Tests of the simulated hosts, on which the other tests depend."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._waiting import until
from tests.hosts._hosts import Host, Hosts
from tests.hosts._jupyter import Jupyter, Jupyters
from tests.hosts._network import Peer
from tests.hosts._sshd import Sshds

pytestmark = [pytest.mark.integration, pytest.mark.root]

PORT = 7000
ECHO = f"""
import socket, threading
listening = socket.create_server(("", {PORT}), backlog=512)
datagrams = socket.socket(type=socket.SOCK_DGRAM)
datagrams.bind(("", {PORT}))

def repeat():
    while True:
        datagrams.sendto(*datagrams.recvfrom(4096))

def serve(peer):
    while said := peer.recv(65536):
        peer.sendall(said)

threading.Thread(target=repeat, daemon=True).start()
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()
"""
CALL = f"""
import socket, sys
with socket.create_connection((sys.argv[1], {PORT}), 2) as peer:
    peer.sendall(b"hello")
    print(peer.recv(100).decode(), peer.getsockname()[0])
"""


@pytest.fixture
def echo(hosts: Hosts) -> Iterator[Host]:
    """Return a host with an echo server for TCP and UDP."""
    host = hosts.north
    with host.start([sys.executable, "-c", ECHO], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield host
        process.kill()


def connect(host: Peer, seconds: float = 5) -> socket.socket:
    return socket.create_connection((host.address, PORT), seconds)


def call(caller: Host, callee: str) -> str:
    return caller.run([sys.executable, "-c", CALL, callee]).stdout.strip()


def receives_echo(peer: socket.socket, seconds: float) -> bool:
    """Return True if the echo server of a host answers."""
    peer.settimeout(seconds)
    peer.sendall(b"hello")
    try:
        return peer.recv(100) == b"hello"
    except TimeoutError:
        return False


def test_hosts_have_separate_files_and_processes(hosts: Hosts) -> None:
    addresses = set()
    for host in hosts:
        show = "hostname; cat $TFD_RUNTIME_DIR/mine; echo $TMPDIR; cd ~; pwd"
        (host.runtime / "mine").write_text(f"of {host.name}\n")
        parts = host.run(["sh", "-c", show], check=True).stdout.split("\n")
        assert parts[:-1] == [host.name, f"of {host.name}", "/run/tmp", "/run/home"]
        (host.runtime / "mine").unlink()
        addresses.add(host.address)
    assert len(addresses | {hosts.home.address}) == 4


def test_hosts_reach_each_other_by_address_and_name(hosts: Hosts, echo: Host) -> None:
    for caller in hosts:
        for callee in (echo.address, "north"):
            assert call(caller, callee) in (
                f"hello {caller.address}",
                "hello 127.0.0.1",
            )
    with connect(echo) as peer:  # home is a member, too
        assert receives_echo(peer, 5)
        assert peer.getsockname()[0] == hosts.home.address


def test_unknown_name_fails_at_once(hosts: Hosts) -> None:
    begun = time.monotonic()
    assert hosts.north.run(["getent", "hosts", "missing.example"]).returncode == 2
    assert time.monotonic() - begun < 5


def test_partition_drops_packets_between_hosts(hosts: Hosts, echo: Host) -> None:
    with connect(echo) as peer:
        hosts.partition(hosts.home, echo)
        assert not receives_echo(peer, 0.3)
        with pytest.raises(TimeoutError):
            connect(echo, 0.3)
        assert call(hosts.east, "north") == f"hello {hosts.east.address}"
        hosts.heal()
        peer.settimeout(60)
        assert peer.recv(100) == b"hello"  # TCP has retransmitted it
    hosts.partition(hosts.east, echo)
    assert call(hosts.east, "north") == ""
    assert call(hosts.west, "north") == f"hello {hosts.west.address}"


def test_loss_drops_some_packets(hosts: Hosts, echo: Host) -> None:
    def repeated() -> int:
        received = 0
        with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
            datagrams.connect((echo.address, PORT))
            datagrams.settimeout(0.1)
            for _ in range(20):  # small groups, so that no queue overflows
                for _ in range(20):
                    datagrams.send(b"hello")
                with contextlib.suppress(TimeoutError):
                    for _ in range(20):
                        datagrams.recv(100)
                        received += 1
        return received

    assert repeated() == 400
    hosts.lose(hosts.home, echo, 30)
    assert 120 < repeated() < 270  # 49 % pass in both directions
    hosts.heal()
    assert repeated() == 400


def test_reset_ends_connections(hosts: Hosts, echo: Host) -> None:
    for a, b in ((hosts.home, echo), (echo, hosts.home)):
        with connect(echo) as peer:
            assert receives_echo(peer, 5)
            hosts.reset(a, b)
            with pytest.raises(ConnectionError):
                receives_echo(peer, 5)
        with pytest.raises(ConnectionRefusedError):
            connect(echo)
        assert call(hosts.east, "north") == f"hello {hosts.east.address}"
        hosts.heal()
    hosts.reset(hosts.east, hosts.north)
    assert "ConnectionRefusedError" in hosts.east.run([sys.executable, "-c", CALL, "north"]).stderr
    connect(echo).close()


def test_host_is_unreachable_while_down(hosts: Hosts, echo: Host) -> None:
    with connect(echo) as peer:
        hosts.down(echo)
        assert not receives_echo(peer, 0.3)
        hosts.up(echo)
        peer.settimeout(60)
        assert peer.recv(100) == b"hello"
    hosts.down(hosts.home)
    with pytest.raises(OSError, match=r"timed out|No route"):
        connect(echo, 0.3)
    hosts.heal()
    connect(echo).close()


def test_slow_limits_the_rate(hosts: Hosts, echo: Host) -> None:
    def echoed() -> float:
        with connect(echo, 20) as peer:
            begun = time.monotonic()
            peer.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(peer.recv(65536))
        return time.monotonic() - begun

    assert echoed() < 0.5
    hosts.slow(echo, 400)
    assert echoed() > 0.5  # 66 KB pass at once, and 50 KB take 1 s
    hosts.heal()
    assert echoed() < 0.5


def test_sleeping_host_does_not_answer(hosts: Hosts, echo: Host) -> None:
    with connect(echo) as peer:
        echo.sleep()
        assert not receives_echo(peer, 0.3)  # its network stack still accepts the data
        connect(echo).close()
        echo.wake()
        peer.settimeout(60)
        assert peer.recv(100) == b"hello"


def test_kill_ends_all_processes(hosts: Hosts) -> None:
    shell = ["sh", "-c", "setsid sleep 20 & sleep 20"]
    with hosts.north.start(shell) as process, hosts.east.start(["sleep", "20"]) as unrelated:
        until(lambda: len(hosts.north.pids()) == 3)
        hosts.north.kill()
        assert hosts.north.pids() == set()
        assert process.wait(60) == -signal.SIGKILL
        assert hosts.east.pids() == {unrelated.pid}
        unrelated.kill()
    (hosts.north.runtime / "left").touch()


def test_killed_host_has_no_processes(hosts: Hosts) -> None:
    assert not hosts.north.died
    assert list(hosts.north.runtime.iterdir()) == []


def test_hosts_are_removed_at_the_end(hosts: Hosts) -> None:
    def there(hosts: Hosts) -> list[str]:
        mark = hosts.namespace("")
        listed = [*os.listdir("/sys/class/net"), *os.listdir("/run/netns")]
        directory = hosts.north.directory.parent
        return [n for n in listed if n.startswith(mark[:-1])] + [
            directory.name
        ] * directory.exists()

    more = Hosts()
    assert more.addresses["home"] != hosts.addresses["home"]
    assert len(there(more)) == 6  # a link, four namespaces and a directory
    more.down(more.east)
    with more.north.start(["sleep", "20"]) as process:
        more.close()
        assert process.wait(60) == -signal.SIGKILL
    assert there(more) == []
    assert len(there(hosts)) == 6


ABANDON = """
import os
from tests.hosts._hosts import Hosts
hosts = Hosts()
hosts.north.start(["sleep", "20"])
print(hosts.namespace("north"), flush=True)
os._exit(0)
"""


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ABANDON]
    run = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=dict(os.environ, TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
    )
    left = Path("/run/netns", run.stdout.strip())
    assert left.exists()
    with Hosts():
        assert not left.exists()


@pytest.mark.parametrize("name", ["north", "east", "west"])
def test_ssh_runs_a_command(hosts: Hosts, sshd: Sshds, name: str) -> None:
    show = "echo $SSH_CONNECTION $TFD_RUNTIME_DIR $HOME; hostname; touch $TFD_RUNTIME_DIR/was-here"
    completed = ssh(sshd, name, show)
    assert completed.returncode == 0, completed.stderr
    client, _, server, port, *directories, hostname = completed.stdout.split()
    assert (client, server, hostname) == (hosts.home.address, hosts[name].address, name)
    assert (port, directories) == ("22", ["/run/tfd", "/run/home"])
    (hosts[name].runtime / "was-here").unlink()


def test_ssh_works_between_hosts_and_with_the_config(hosts: Hosts, sshd: Sshds) -> None:
    completed = hosts.east.run(sshd.command("west", "echo $SSH_CONNECTION; hostname"))
    assert completed.stdout.split()[0] == hosts.east.address
    assert completed.stdout.split()[-1] == "west"
    by_file = subprocess.run(
        ["ssh", "-F", str(sshd.config), "north", "hostname"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert by_file.stdout == "north\n"


def test_ssh_refuses_a_wrong_key(sshd: Sshds) -> None:
    completed = ssh(sshd, "north", "true", key=sshd.stranger_key)
    assert completed.returncode == 255
    assert "Permission denied (publickey)" in completed.stderr


def test_ssh_refuses_another_host_key(sshd: Sshds) -> None:
    with sshd["north"].changed_key():
        completed = ssh(sshd, "north", "true")
        assert completed.returncode == 255
        assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in completed.stderr
    assert ssh(sshd, "north", "true").returncode == 0


def test_ssh_forwards_ports_and_unix_sockets(
    hosts: Hosts, sshd: Sshds, echo: Host, tmp_path: Path
) -> None:
    near, far = tmp_path / "near", "/run/tfd/far"
    forward = sshd.command(
        "north",
        *("sh -c 'echo ready; read line; rm -f /run/tfd/far'",),
    )
    flags = ["-L", f"{near}:{echo.address}:{PORT}", "-R", f"{far}:{echo.address}:{PORT}"]
    with subprocess.Popen(
        [*forward[:1], *flags, *forward[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as tunnel:
        assert tunnel.stdout
        assert tunnel.stdin
        assert tunnel.stdout.readline() == "ready\n"
        for path in (near, hosts.north.runtime / "far"):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(path))
                assert receives_echo(peer, 5)
        tunnel.stdin.close()
        assert tunnel.wait(60) == 0


def test_ssh_ends_with_the_host(hosts: Hosts, sshd: Sshds) -> None:
    command = sshd.command("north", "echo ready; sleep 20")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout
        assert session.stdout.readline() == "ready\n"
        hosts.north.kill()
        assert session.wait(60) == 255
    assert not sshd["north"].alive()


def test_ssh_is_restarted_after_a_kill(sshd: Sshds) -> None:
    assert ssh(sshd, "north", "hostname").stdout == "north\n"


def ssh(
    sshd: Sshds, name: str, command: str, key: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        sshd.command(name, command, key=key), capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize("name", ["north", "east"])
def test_jupyter_server_answers(jupyter: Jupyters, name: str) -> None:
    server = jupyter[name]
    assert server.get("/api")["version"]
    for token in ("", "wrong"):
        assert refusal(server, "/api/kernels", token) == 403
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        server.open("/api", context=ssl.create_default_context())


def test_jupyter_starts_a_kernel_on_its_host(hosts: Hosts, jupyter: Jupyters) -> None:
    before = hosts.north.pids()
    with jupyter["north"].open("/api/kernels", method="POST") as reply:
        assert reply.status == 201
    (kernel,) = jupyter["north"].get("/api/kernels")
    assert jupyter["east"].get("/api/kernels") == []
    (pid,) = hosts.north.pids() - before
    environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
    assert "TFD_RUNTIME_DIR=/run/tfd" in environ
    jupyter["north"].open(f"/api/kernels/{kernel['id']}", method="DELETE").close()


def test_jupyter_can_have_an_expired_certificate(hosts: Hosts, jupyter: Jupyters) -> None:
    with (
        jupyter.started(hosts.west, expired=True) as server,
        pytest.raises(urllib.error.URLError, match="certificate has expired"),
    ):
        server.get("/api")


def test_jupyter_ends_with_the_host(hosts: Hosts, jupyter: Jupyters) -> None:
    hosts.north.kill()
    with pytest.raises(urllib.error.URLError, match="refused"):
        jupyter["north"].get("/api")
    assert jupyter["east"].get("/api")


def test_jupyter_is_restarted_after_a_kill(jupyter: Jupyters) -> None:
    assert jupyter["north"].get("/api")


def refusal(server: Jupyter, path: str, token: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.open(path, token=token)
    with refused.value as reply:
        return reply.code
