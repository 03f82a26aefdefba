"""Ports and sockets of this process (the filter itself: integration/test_closed_by_default)."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests._waiting import until
from tfd_notebook.errors import FilterFailed, PortInUse
from tfd_notebook.net import ports

SECONDS = 60.0


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def port_of(sock: socket.socket) -> int:
    return sock.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
@pytest.mark.parametrize("reuse_address", [0, 1])
def test_reserved_port_cannot_be_bound(host: str, reuse_address: int) -> None:
    with ports.reserve_port() as held:
        port = port_of(held)
        assert bind_error(host, port, reuse_address) == errno.EADDRINUSE
    with ports.reserve_port(port):  # the same port by number
        assert bind_error(host, port, reuse_address) == errno.EADDRINUSE
    assert bind_error(host, port, reuse_address) is None


def bind_error(host: str, port: int, reuse_address: int) -> int | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse_address)
        try:
            other.bind((host, port))
        except OSError as error:
            return error.errno
        return None


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_server_can_listen_on_a_reserved_port(host: str) -> None:
    with ports.reserve_port() as held:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind((host, port_of(held)))
            server.listen()
            for _ in range(20):  # no connection reaches the socket that reserves the port
                server.settimeout(SECONDS)
                with socket.create_connection(("localhost", port_of(held)), SECONDS) as client:
                    accepted, peer = server.accept()
                    accepted.close()
                    assert peer[1] == port_of(client)


def test_port_can_be_reserved_again_after_connections(server: socket.socket) -> None:
    port = port_of(server)
    with socket.create_connection(("127.0.0.1", port)):
        server.accept()[0].close()  # the server's side closes first: TIME_WAIT is here
    server.close()
    with ports.reserve_port(port) as held:
        assert port_of(held) == port


@pytest.mark.slow
def test_port_in_use_names_this_process(server: socket.socket) -> None:
    with pytest.raises(PortInUse, match=f"this process.*{os.getpid()}"):
        ports.reserve_port(port_of(server))


@pytest.mark.slow
def test_port_in_use_names_the_other_process() -> None:
    code = "import socket,sys; s = socket.create_server(('', 0)); "
    code += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdin
        assert owner.stdout
        port = int(owner.stdout.readline())
        with pytest.raises(PortInUse) as caught:
            ports.reserve_port(port)
        owner.stdin.close()
    assert f"pid {owner.pid}" in caught.value.what
    assert shlex.join(command)[:60] in caught.value.what


def test_port_in_use_without_a_listener() -> None:
    with ports.reserve_port() as held, pytest.raises(PortInUse, match="without listening"):
        ports.reserve_port(port_of(held))


def test_forbidden_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(sock: socket.socket, address: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(PortInUse, match="Permission denied"):
        ports.reserve_port(80)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_listening_addresses(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = port_of(server)
        assert ports.listening_addresses(port) == [host]
        with socket.create_connection((host, port)):
            assert ports.listening_addresses(port) == [host]
    assert ports.listening_addresses(port) == []


def test_listening_fds(server: socket.socket) -> None:
    assert ports.listening_fds(port_of(server)) == [server.fileno()]
    with socket.create_connection(("127.0.0.1", port_of(server))), server.accept()[0]:
        assert ports.listening_fds(port_of(server)) == [server.fileno()]
    with ports.reserve_port() as held:
        assert ports.listening_fds(port_of(held)) == []


def test_inspection_closes_no_descriptor(server: socket.socket) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    ports.listening_fds(port_of(server))
    ports.SentBytes(port_of(server)).read()
    assert sorted(os.listdir("/proc/self/fd")) == before


class Filters:
    """Results of SO_ATTACH_FILTER, which Linux allows to privileged users only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: int | None = None
        original = socket.socket.setsockopt

        def setsockopt(sock: socket.socket, level: int, option: int, value: Any) -> None:
            if (level, option) != (socket.SOL_SOCKET, 26):
                original(sock, level, option, value)
            elif self.error is not None:
                raise OSError(self.error, os.strerror(self.error))

        monkeypatch.setattr(socket.socket, "setsockopt", setsockopt)


@pytest.fixture
def filters(monkeypatch: pytest.MonkeyPatch) -> Filters:
    return Filters(monkeypatch)


@pytest.fixture
def unprivileged(filters: Filters) -> None:
    filters.error = errno.EPERM


@pytest.fixture
def server_on_all_addresses() -> Iterator[socket.socket]:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        listening.settimeout(SECONDS)
        yield listening


@pytest.mark.usefixtures("filters")
def test_allowed_networks_of_a_port() -> None:
    with socket.create_server(("", 0)) as server:
        port = port_of(server)
        assert ports.restrict_port(port) == "this host"
        for host in ("localhost", "127.0.0.1", "::1"):
            assert ports.restrict_port(port, host=host) == "loopback"
        assert ports.restrict_port(port, host="no.such.host.invalid") == "this host"
        allow = ["10.1.2.3/8", "fd00::/8"]
        assert ports.restrict_port(port, allow) == "this host, 10.0.0.0/8, fd00::/8"
        assert ports.restrict_port(port, allow[:1], "localhost") == "loopback, 10.0.0.0/8"
        for everyone in ("0.0.0.0/0", "::/0"):
            assert ports.restrict_port(port, ["10.0.0.0/8", everyone]) == "everyone"
        socket.create_connection(("127.0.0.1", port), SECONDS).close()


def test_networks_are_merged() -> None:
    def parsed(*networks: str) -> list[ports.Network]:
        return [ipaddress.ip_network(network) for network in networks]

    many = parsed(*(f"10.0.0.{n}/32" for n in range(256)), "fd00::/128", "fd00::1/128", "10.0.0.7")
    assert ports.merged(many) == parsed("10.0.0.0/24", "fd00::/127")


def test_port_without_a_listener_is_an_error() -> None:
    with ports.reserve_port() as held, pytest.raises(FilterFailed, match="does not listen"):
        ports.restrict_port(port_of(held))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", None])
@pytest.mark.usefixtures("unprivileged")
def test_without_the_capability_loopback_is_a_device(
    server_on_all_addresses: socket.socket, host: str | None
) -> None:
    server = server_on_all_addresses
    port = port_of(server)
    for _ in range(2):  # the second call needs no privilege, either
        assert ports.restrict_port(port, host=host) == "loopback"
        device = server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
        assert device == b"lo\0"
    # A node on Spark gets the addresses of its peers as allowed networks.
    assert ports.restrict_port(port, ["127.0.0.1"], "127.0.0.1") == "loopback, 127.0.0.1/32"
    for address in ("127.0.0.1", "127.0.0.2", "::1"):
        with socket.create_connection((address, port), SECONDS) as client:
            accepted, peer = server.accept()
            accepted.close()
            assert peer[1] == port_of(client)


@pytest.mark.usefixtures("unprivileged")
def test_device_refuses_other_addresses_of_this_host(
    server_on_all_addresses: socket.socket,
) -> None:
    port = port_of(server_on_all_addresses)
    ports.restrict_port(port, host="localhost")
    # Without a network, this host has no other address.
    for address in other_addresses():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), SECONDS)


def other_addresses() -> list[str]:
    """Return this host's addresses other than loopback and link-local ones."""
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    addresses = [
        ipaddress.ip_address(entry.address.partition("%")[0])
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [str(a) for a in addresses if not a.is_loopback and not a.is_link_local]


@pytest.mark.usefixtures("unprivileged")
def test_connection_from_before_the_device_stays_only_from_loopback(
    server_on_all_addresses: socket.socket,
) -> None:
    port = port_of(server_on_all_addresses)
    addresses = ["127.0.0.1", *other_addresses()]
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection((address, port), SECONDS))
            for address in addresses
        ]
        accepted = [stack.enter_context(server_on_all_addresses.accept()[0]) for _ in addresses]
        ports.restrict_port(port, host="localhost")
        accepted[0].sendall(b"data")
        received = [client.recv(4) for client in clients]
    assert received == [b"data", *(b"" for _ in other_addresses())]


@pytest.mark.usefixtures("unprivileged")
@pytest.mark.parametrize(
    ("allow", "host"),
    [((), "no.such.host.invalid"), (["10.0.0.0/8"], "localhost"), (["10.0.0.0/8"], None)],
)
def test_without_the_capability_other_scopes_are_errors(
    server: socket.socket, allow: list[str], host: str | None
) -> None:
    with pytest.raises(FilterFailed, match="requires CAP_NET_ADMIN") as caught:
        ports.restrict_port(port_of(server), allow, host)
    assert server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) == b""
    fix = str(caught.value.fix)
    for words in ("localhost", 'launcher="ssh"', "secure=True", "--cap-add NET_ADMIN"):
        assert words in fix
    assert "optmem_max" not in str(caught.value)
    assert ports.restrict_port(port_of(server), ["0.0.0.0/0"], host) == "everyone"


def test_device_that_cannot_be_bound_is_an_error(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(sock: socket.socket, *option: Any) -> None:  # before Linux 5.7
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(socket.socket, "setsockopt", refused)
    with pytest.raises(FilterFailed, match="requires CAP_NET_ADMIN"):
        ports.restrict_port(port_of(server), host="localhost")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert ports.restrict_port(port_of(server)).startswith("unknown: darwin")


@pytest.mark.usefixtures("unprivileged")
def test_handshake_of_another_host_is_an_error(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = port_of(server)

    def connecting(peer: str, at: int = port) -> Any:
        laddr, raddr = SimpleNamespace(port=at), SimpleNamespace(ip=peer)
        return SimpleNamespace(laddr=laddr, raddr=raddr, status=psutil.CONN_SYN_RECV)

    sockets = [connecting("127.0.0.1"), connecting("::ffff:127.0.0.1"), connecting("10.0.0.1", 1)]
    monkeypatch.setattr(psutil, "net_connections", lambda kind: sockets)
    assert ports.restrict_port(port, host="localhost") == "loopback"
    answers = [[connecting("10.0.0.1")], sockets]  # the handshake ends in the meantime
    monkeypatch.setattr(psutil, "net_connections", lambda kind: answers.pop(0))
    assert ports.restrict_port(port, host="localhost") == "loopback"
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [connecting("::ffff:10.0.0.1")])
    times = iter([0.0, 1.0, 3.0])
    monkeypatch.setattr(ports.time, "monotonic", lambda: next(times))
    with pytest.raises(FilterFailed, match=r"10\.0\.0\.1 is connecting"):
        ports.restrict_port(port, host="localhost")


@pytest.mark.parametrize("accepted", [True, False])
def test_port_that_stops_listening_has_no_connections(
    server_on_all_addresses: socket.socket, accepted: bool
) -> None:
    server = server_on_all_addresses
    port = port_of(server)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
        if accepted:
            stack.enter_context(server.accept()[0])
        assert ports.stop_listening(port)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert server.fileno() != -1  # the descriptor is the server's own
    for address in ("127.0.0.1", "::1", *other_addresses()):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), SECONDS)
    assert not ports.stop_listening(port)


@pytest.mark.parametrize(
    ("error", "optmem_max", "in_error", "in_fix"),
    [
        (errno.ENOMEM, "20480", "net.core.optmem_max is 20480", "sysctl"),
        (errno.ENOMEM, "131072", "net.core.optmem_max is 131072", None),
        (errno.ENOMEM, "", "net.core.optmem_max is unknown", "sysctl"),
        (errno.EINVAL, "20480", "2 networks)", None),
    ],
)
def test_next_step_follows_the_systems_reason(
    server: socket.socket,
    filters: Filters,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: int,
    optmem_max: str,
    in_error: str,
    in_fix: str | None,
) -> None:
    filters.error = error
    (tmp_path / "optmem_max").write_text(optmem_max)
    monkeypatch.setattr(ports, "_OPTMEM_MAX", tmp_path / "optmem_max")
    with pytest.raises(FilterFailed, match=os.strerror(error)) as caught:
        ports.restrict_port(port_of(server), host="localhost")
    assert in_error in caught.value.what
    assert "use fewer networks in allow=" in str(caught.value.fix)
    assert ("sysctl" in str(caught.value.fix)) == (in_fix is not None)


# 17,000 networks have more instructions than a program can have.
@pytest.mark.parametrize("count", [2000, pytest.param(17_000, marks=pytest.mark.slow)])
def test_too_many_networks_are_refused(server: socket.socket, count: int) -> None:
    # Every second network, so that they cannot be merged.
    many = [f"10.{i // 128}.{i % 128 * 2}.0/24" for i in range(count)]
    # Some kernels check the capability before the length.
    with pytest.raises(FilterFailed, match=r"networks|CAP_NET_ADMIN"):
        ports.restrict_port(port_of(server), many)


def test_sent_bytes_are_counted(server: socket.socket) -> None:
    port = port_of(server)
    counter = ports.SentBytes(port)
    assert counter.read() == 0
    for round_ in range(1, 3):
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as served:
            client.sendall(bytes(5000))  # data of the clients does not count
            served.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(client.recv(65536))
            until(lambda n=round_: counter.read() >= 100_000 * n)
            assert counter.read() == 100_000 * round_
            assert ports.SentBytes(port).read() == 100_000
        assert counter.read() == 100_000 * round_  # closed connections stay in the sum
    assert ports.SentBytes(port).read() == 0
