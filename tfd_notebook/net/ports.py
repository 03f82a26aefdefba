"""Ports and listening sockets of this process: reserve, identify, restrict to hosts, count bytes.

TensorFlow's servers listen on all interfaces and report errors poorly. They share a port with any
server of the same user that requests it. This module works on the file descriptors of the process.
The functions document their behavior on systems other than Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import shlex
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tfd_notebook.errors import FilterFailed, PortInUse

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_LOOPBACK = ("127.0.0.0/8", "::1/128")
_SO_ATTACH_FILTER = 26  # the socket module has no name for it
_LOOPBACK_DEVICE = b"lo\0"
_OPTMEM_MAX = Path("/proc/sys/net/core/optmem_max")
_SUFFICIENT_OPTMEM = 131072  # for a filter with the kernel's maximum of 4096 instructions
_EVERYTHING = 0xFFFFFFFF
_SYS_PIDFD_GETFD = 438
_TCP_INFO_BYTES_ACKED = 120  # offset in struct tcp_info; u64, Linux 4.1
#: Seconds without data after which TCP probes a peer, and between its probes.
_KEEPALIVE_SECONDS = 10
_KEEPALIVE_PROBES = 3
#: accept() takes a connection off the queue before its descriptor appears.
_ACCEPT_SECONDS = 0.001
_TCP_INFO_UNACKED = 24  # of a listening socket: the number of connections before accept()

# Classic BPF, linux/filter.h
_LD_WORD, _LD_HALF, _AND, _JEQ, _RET = 0x20, 0x28, 0x54, 0x15, 0x06
_ETHERTYPE = 0xFFFFF000  # SKF_AD_OFF + SKF_AD_PROTOCOL
_IP_HEADER = 0xFFF00000  # SKF_NET_OFF
_SOURCE = {4: _IP_HEADER + 12, 6: _IP_HEADER + 8}
_ETHERTYPES = {4: 0x0800, 6: 0x86DD}


def reserve_port(port: int = 0) -> socket.socket:
    """Bind `port` on all addresses, without listening, until the socket is closed.

    In the meantime, a server of the same user that sets ``SO_REUSEPORT`` can listen on it. The
    servers of the tf.data service do. All others get EADDRINUSE, even a ``tf.distribute.Server``.

    Parameters
    ----------
    port : int
        The port, or 0 (default) for a free one: ``reserve_port().getsockname()[1]``.

    Raises
    ------
    PortInUse
        Another socket uses the port. The error names its process.
    """
    try:
        return _reserve(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise PortInUse(
                f"reserving port {port} failed: {error.strerror}",
                fix="choose another port, or 0 for a free one",
            ) from None
    raise PortInUse(
        f"port {port} is in use by {port_owner(port)}",
        fix="stop that process, or choose another port (0 for a free one)",
    )


def port_owner(port: int) -> str:
    """Return a description of the owner of `port`: server type, process and command line."""
    # Import time: it imports gRPC, which clients of agents do not need.
    from tfd_notebook.net.probe import probe

    result = probe(f"localhost:{port}", timeout=0.5)
    what = {"dispatcher": "a tf.data dispatcher", "data_worker": "a tf.data worker"}.get(
        result.kind or "", "a TensorFlow server" if result.alive else ""
    )
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        connections = []
    listening = [c for c in connections if _listens_at(c, port)]
    pid = next((c.pid for c in listening if c.pid), None)
    if pid == os.getpid():
        return f"{what or 'another socket'} in this process (pid {pid})"
    if pid:
        return f"{what + ', ' if what else ''}pid {pid}{_command(pid)}"
    if listening or result.state != "refused":
        return what or "a process that this user cannot inspect"
    return "a process that has reserved it without listening"


def listening_addresses(port: int) -> list[str]:
    """Return the addresses on which any process of this host listens at TCP `port` (Linux)."""
    listening = psutil.net_connections("tcp")
    return sorted({c.laddr.ip for c in listening if _listens_at(c, port)})


def _listens_at(connection: Any, port: int) -> bool:
    return bool(connection.status == psutil.CONN_LISTEN and connection.laddr.port == port)


def listening_fds(port: int) -> list[int]:
    """Return the file descriptors of this process that listen at TCP `port` (Linux)."""
    return [fd for fd, _ in _listeners(port)]


def listening_inodes(port: int) -> set[int]:
    """Return the inodes of the sockets of this process that listen at TCP `port` (Linux)."""
    return {os.fstat(sock.fileno()).st_ino for _, sock in _listeners(port)}


def restrict_port(port: int, allow: Iterable[str] = (), host: str | None = None) -> str:
    """Accept only peers on this host and in the networks of `allow` at `port` of this process.

    A packet filter is attached to every listening socket of this process at `port`. Existing
    connections of other peers are shut down. Other peers time out. The addresses of this host are
    those at the time of the call. Call it again after a change of the network.

    Since 2026, Linux requires CAP_NET_ADMIN for such a filter. Without it, a port that is open to
    loopback only is bound to the loopback device instead. Other peers are refused.

    Parameters
    ----------
    port : int
    allow : iterable of str
        Networks in CIDR form. ``0.0.0.0/0`` or ``::/0`` open the port to all.
    host : str, optional
        The name or address that peers use. For ``localhost`` only loopback is allowed. Default:
        all addresses of this host are allowed, except link-local ones.

    Returns
    -------
    str
        Peers that can connect, for the column ``open_to``: ``"loopback"``, ``"this host"``,
        ``"this host, 10.0.0.0/8"``, ``"everyone"``, or ``"unknown: why"`` on a system without
        socket filters.

    Raises
    ------
    FilterFailed
        The port is open to other hosts. Attaching the filter failed, and loopback is not enough.
    """
    allowed = [ipaddress.ip_network(network, strict=False) for network in allow]
    if any(network.prefixlen == 0 for network in allowed):
        return "everyone"
    if not sys.platform.startswith("linux"):
        return f"unknown: {sys.platform} has no socket filters, so other hosts can connect"
    for scope, own in _own_networks(host):
        allowed_networks = merged([*own, *allowed])
        try:
            _filter(port, allowed_networks)
        except OSError as failure:
            error = failure
            continue
        _restrict(port, allowed_networks)
        return ", ".join([scope, *map(str, allowed)])
    raise _filter_failed(port, error, len(allowed_networks))


def stop_listening(port: int) -> bool:
    """End all listening at `port` in this process, and its connections (Linux).

    The descriptors stay open, because they belong to servers that TensorFlow cannot stop. A server
    cannot listen with them again.

    Returns
    -------
    bool
        True if this process listened at `port`.
    """
    listened = False
    for _, sock in _listeners(port):
        sock.shutdown(socket.SHUT_RDWR)  # also resets connections before their accept()
        listened = True
    if listened:
        time.sleep(_ACCEPT_SECONDS)
        _restrict(port, ())
    return listened


def is_open(port: int) -> bool:
    """Return True if a listener of this process at `port` has neither filter nor device (Linux)."""
    return any(not _is_restricted(sock) for _, sock in _listeners(port))


def _filter_failed(port: int, error: OSError, count: int) -> FilterFailed:
    """Return the error for a filter with `count` networks."""
    reason, fix = f"{count} networks", "use fewer networks in allow="
    if error.errno == errno.EPERM:
        reason = "this kernel requires CAP_NET_ADMIN for filters of TCP sockets"
        fix = (
            'use tasks on localhost without allow=, or tunnels: launcher="ssh", or secure=True at '
            "the launchers for other hosts. Or run as root with the capability, as in docker run "
            '--cap-add NET_ADMIN. allow="0.0.0.0/0" opens the port to all hosts: use it in a '
            "trusted network only"
        )
    elif error.errno == errno.ENOMEM:
        optmem_max = _optmem_max()
        reason += f", net.core.optmem_max is {optmem_max or 'unknown'}"
        if optmem_max is None or optmem_max < _SUFFICIENT_OPTMEM:
            fix = f"as root, run sysctl -w net.core.optmem_max={_SUFFICIENT_OPTMEM}, or {fix}"
    return FilterFailed(
        f"restricting port {port} failed: the packet filter could not be attached "
        f"({error.strerror or error}; {reason})",
        fix=fix,
    )


def merged(networks: Iterable[Network]) -> list[Network]:
    """Return the same addresses as the smallest list of networks."""
    every = list(networks)
    result: list[Network] = []
    result += ipaddress.collapse_addresses(n for n in every if isinstance(n, ipaddress.IPv4Network))
    result += ipaddress.collapse_addresses(n for n in every if isinstance(n, ipaddress.IPv6Network))
    return result


def _own_networks(host: str | None) -> Iterator[tuple[str, list[Network]]]:
    """Yield a description and the networks of this host to allow, from the widest to the least."""
    loopback: list[Network] = [ipaddress.ip_network(network) for network in _LOOPBACK]
    if host is not None and (addresses := _addresses_of(host)) <= set(loopback):
        yield "loopback", loopback
        return
    own = _this_host()
    yield "this host", own
    # A connection to an address of this host has the same address as its source.
    selected = [] if host is None else [network for network in own if network in addresses]
    # Peers do not reach a host with a translated address through loopback.
    if host is None or selected:
        yield ", ".join(["loopback", *map(str, selected)]), [*loopback, *selected]


def _addresses_of(host: str) -> set[Network]:
    """Return a network for each address of a name; a loopback address stands for its network."""
    networks: set[Network] = set()
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return {ipaddress.ip_network("0.0.0.0/32")}  # not an address of this host
    for entry in entries:
        address = ipaddress.ip_address(str(entry[4][0]).partition("%")[0])
        own = _LOOPBACK[address.version == 6] if address.is_loopback else str(address)
        networks.add(ipaddress.ip_network(own))
    return networks


def is_this_host(host: str) -> bool:
    """Return True if a name or an address belongs to this host."""
    return not _addresses_of(host).isdisjoint(_this_host())


def _filter(port: int, allowed_networks: Iterable[Network]) -> None:
    """Close the listening sockets at `port` to other networks; raise OSError or FilterFailed."""
    networks = list(allowed_networks)
    program = _program(networks)
    closed = 0
    for _, sock in _listeners(port):
        try:
            _attach(sock, program)
        except PermissionError as error:
            if set(map(str, networks)) != set(_LOOPBACK) or not _bind_to_loopback(sock):
                raise error
            _await_handshakes(port, networks)
        _await_accepts(sock)
        closed += 1
    if not closed:
        raise FilterFailed(
            f"restricting port {port} failed: this process does not listen on it",
            fix="cluster.logs(task) may show why the server stopped",
        )


def _optmem_max() -> int | None:
    try:
        return int(_OPTMEM_MAX.read_text())
    except (OSError, ValueError):
        return None


def shutdown_connections_to(addresses: Iterable[str]) -> int:
    """Shut down this process's connections to addresses of lost hosts.

    TCP waits a quarter of an hour for a host that vanished. Closures, and the destructors of
    functions in any thread, would wait with it.

    Parameters
    ----------
    addresses : iterable of str
        ``"host:port"``.

    Returns
    -------
    int
        The number of connections that were shut down.
    """
    lost = set()
    for address in addresses:
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError):
            for info in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
                lost.add(info[4][:2])
    ended = 0
    for _, sock in _own_sockets():
        with contextlib.suppress(OSError):  # not connected, or no longer
            host, port = sock.getpeername()[:2]
            if (host.removeprefix("::ffff:"), port) in lost:  # IPv4 over an IPv6 socket
                sock.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


def detect_lost_peers() -> None:
    """Enable TCP's keepalive, which ends connections that the peer no longer has.

    If a network fails for long enough, gRPC's servers close their connections. Their clients do not
    receive that, and would wait for the replies without end. On systems other than Linux, this does
    nothing.
    """
    for _, sock in _own_sockets():
        with contextlib.suppress(OSError):  # not connected, or no longer
            sock.getpeername()
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class SentBytes:
    """Counts the bytes that this process has sent over connections accepted at a port.

    Bytes count when the peer's TCP has acknowledged them. Bytes that a connection sent between the
    last `read` and its end are not counted. The count stays 0 on systems other than Linux.

    Parameters
    ----------
    port : int
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._closed = 0
        self._open: dict[int, int] = {}
        self.descriptors: dict[int, int] = {}

    def read(self) -> int:
        """Return the bytes sent so far; the number never decreases."""
        now: dict[int, int] = {}
        fds: dict[int, int] = {}
        for fd, sock in _own_sockets():
            with contextlib.suppress(OSError):
                if _local_port(sock) == self._port and not _listens(sock):
                    inode = os.fstat(fd).st_ino
                    now[inode] = _tcp_info(sock, _TCP_INFO_BYTES_ACKED, "Q")
                    fds[inode] = fd
        self._closed += sum(sent for inode, sent in self._open.items() if inode not in now)
        self._open, self.descriptors = now, fds
        return self._closed + sum(now.values())


class PinnedConnections:
    """Connections of another process that stay open when that process dies.

    A peer whose server dies reconnects at once and is refused. It then backs off with increasing
    delays (gRPC: one second at first). If its connection stays open, the peer waits instead. Call
    `release` when the server is ready again, and the peer reconnects successfully.
    """

    def __init__(self) -> None:
        self._duplicates: dict[int, int] = {}

    def keep(self, pid: int, descriptors: Mapping[int, int]) -> None:
        """Keep exactly these connections of the process: its descriptors, by inode."""
        for inode in self._duplicates.keys() - descriptors.keys():
            os.close(self._duplicates.pop(inode))
        missing = descriptors.keys() - self._duplicates.keys()
        if not missing or sys.platform != "linux":
            return
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                for inode in missing:
                    duplicate = _duplicate_of(handle, descriptors[inode])
                    if os.fstat(duplicate).st_ino == inode:
                        self._duplicates[inode] = duplicate
                    else:  # the descriptor was closed and reused in the meantime
                        os.close(duplicate)
            finally:
                os.close(handle)

    def release(self) -> None:
        """Close all kept connections."""
        while self._duplicates:
            os.close(self._duplicates.popitem()[1])


def _duplicate_of(handle: int, descriptor: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    duplicate: int = libc.syscall(_SYS_PIDFD_GETFD, handle, descriptor, 0)
    if duplicate < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.set_inheritable(duplicate, False)
    return duplicate


def _reserve(port: int) -> socket.socket:
    family, any_address = socket.AF_INET6, "::"
    if not socket.has_dualstack_ipv6():
        family, any_address = socket.AF_INET, "0.0.0.0"
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Bind without SO_REUSEPORT, so that the port of another server is refused, not shared. Bind
        # with SO_REUSEADDR, so that closed connections of a predecessor (TIME_WAIT) do not matter.
        # Then invert both options, for the server that is going to listen on the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1 if port else 0)
        sock.bind((any_address, port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _command(pid: int) -> str:
    try:
        command = shlex.join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""
    return f" ({command if len(command) <= 120 else command[:119] + '…'})"


def _own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the TCP sockets of this process, each as a duplicate that is closed after its use."""
    try:
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
    except FileNotFoundError:
        return
    for fd in fds:
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:  # closed in the meantime
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield fd, sock


def _listeners(port: int) -> Iterator[tuple[int, socket.socket]]:
    for fd, sock in _own_sockets():
        if _listens(sock) and _local_port(sock) == port:
            yield fd, sock


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _local_port(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


def _tcp_info(sock: socket.socket, offset: int, form: str) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < offset + struct.calcsize(form):
        return 0
    value: int = struct.unpack_from(form, info, offset)[0]
    return value


def _this_host() -> list[Network]:
    networks = [ipaddress.ip_network(network) for network in _LOOPBACK]
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                network = ipaddress.ip_network(address.address.partition("%")[0])
                # A container bridge has a link-local address, which no task uses.
                if not network.is_link_local:
                    networks.append(network)
    return networks


def _program(allowed_networks: Iterable[Network]) -> bytes:
    """Compile a classic BPF program that passes packets from `allowed_networks` only."""
    networks = set(allowed_networks)
    halves: dict[int, list[bytes]] = {4: [], 6: []}
    for version, code in halves.items():
        for network in sorted((n for n in networks if n.version == version), key=str):
            code.extend(_match(network))
        code.append(_instruction(_RET, 0))
    # The jump over the IPv4 part may be long, so a second check follows it for IPv6.
    load = _instruction(_LD_HALF, _ETHERTYPE)
    return b"".join(
        [
            load,
            _instruction(_JEQ, _ETHERTYPES[4], 1, 0),
            _instruction(0x05, len(halves[4])),  # BPF_JA: its distance has 32 bits
            *halves[4],
            load,
            _instruction(_JEQ, _ETHERTYPES[6], 1, 0),
            _instruction(_RET, 0),
            *halves[6],
        ]
    )


def _match(network: Network) -> list[bytes]:
    """Return instructions that accept a packet from `network` and otherwise fall through."""
    address, mask = network.network_address.packed, network.netmask.packed
    count = len(mask) // 4
    words = zip(
        struct.unpack(f"!{count}I", address), struct.unpack(f"!{count}I", mask), strict=True
    )
    code: list[bytes] = []
    for index, (expected, bits) in reversed(list(enumerate(words))):
        if not bits:
            continue
        # Built backwards: a mismatch jumps behind all later instructions.
        test = [_instruction(_JEQ, expected, 0, max(len(code), 1))]
        if bits != _EVERYTHING:
            test.insert(0, _instruction(_AND, bits))
        test.insert(0, _instruction(_LD_WORD, _SOURCE[network.version] + 4 * index))
        code = test + (code or [_instruction(_RET, _EVERYTHING)])
    return code


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _attach(sock: socket.socket, program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    # The kernel refuses more than 4096 instructions. The field has 16 bits.
    length = min(len(program) // 8, 0xFFFF)
    pointer = struct.pack("HP", length, ctypes.addressof(code))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)


def _bind_to_loopback(sock: socket.socket) -> bool:
    """Bind a listening socket to the loopback device; return False if the kernel refuses."""
    with contextlib.suppress(OSError):  # before Linux 5.7, only root can bind
        # A second SO_BINDTODEVICE requires CAP_NET_RAW.
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) != _LOOPBACK_DEVICE:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK_DEVICE)
        return True
    return False


def _is_restricted(sock: socket.socket) -> bool:
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) == _LOOPBACK_DEVICE:
        return True
    try:
        # SO_GET_FILTER has the same number. Its length counts instructions, not bytes. A larger
        # one would let the kernel write beyond the buffer.
        return bool(sock.getsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, 1))
    except OSError:  # the filter has more than one instruction
        return True


def _await_handshakes(port: int, networks: Iterable[Network], limit: float = 2.0) -> None:
    """Wait until TCP has no unfinished handshake of other peers at `port`.

    A handshake that began before a socket was bound to a device still succeeds after that.

    Raises
    ------
    FilterFailed
        A handshake takes longer than `limit` seconds.
    """
    end = time.monotonic() + limit
    while pending := [
        connection.raddr.ip
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_SYN_RECV
        and connection.laddr.port == port
        and not _in_networks(connection.raddr.ip, networks)
    ]:
        if time.monotonic() > end:
            raise FilterFailed(
                f"restricting port {port} failed: {pending[0]} is connecting to it",
                fix="start the task again",
            )
        time.sleep(0.01)


def _await_accepts(sock: socket.socket, limit: float = 0.1) -> None:
    """Wait until connections made before the filter are accepted and have a descriptor."""
    end = time.monotonic() + limit
    while _tcp_info(sock, _TCP_INFO_UNACKED, "I") and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(_ACCEPT_SECONDS)


def _restrict(port: int, allowed_networks: Iterable[Network]) -> None:
    for _, sock in _own_sockets():
        with contextlib.suppress(OSError):
            if _local_port(sock) != port or _listens(sock):
                continue
            if not _in_networks(sock.getpeername()[0], allowed_networks):
                sock.shutdown(socket.SHUT_RDWR)


def _in_networks(address: str, networks: Iterable[Network]) -> bool:
    peer = ipaddress.ip_address(address.partition("%")[0])
    peer = getattr(peer, "ipv4_mapped", None) or peer
    return any(peer in network for network in networks)
