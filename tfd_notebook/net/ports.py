"""Ports and listening sockets of this process: held, named, closed to other hosts, counted.

TensorFlow opens its servers on every interface, shares a port with any server of the same user
that asks for it, and says little when it cannot. What is here works from outside of it, on the
process's own file descriptors, and only on Linux; elsewhere each function says so.
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

import psutil

from tfd_notebook.errors import FilterFailed, PortInUse
from tfd_notebook.net.probe import probe

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_LOOPBACK = ("127.0.0.0/8", "::1/128")
_SO_ATTACH_FILTER = 26  # the socket module has no name for it
_LISTEN = "0A"  # state of a socket in /proc/net/tcp
_EVERYTHING = 0xFFFFFFFF
_SYS_PIDFD_GETFD = 438
_TCP_INFO_BYTES_ACKED = 120  # offset in struct tcp_info; u64, Linux 4.1
_TCP_INFO_UNACKED = 24  # on a listening socket: connections that wait for accept()

# Classic BPF, linux/filter.h
_LD_WORD, _LD_HALF, _AND, _JEQ, _RET = 0x20, 0x28, 0x54, 0x15, 0x06
_ETHERTYPE = 0xFFFFF000  # SKF_AD_OFF + SKF_AD_PROTOCOL
_IP_HEADER = 0xFFF00000  # SKF_NET_OFF
_SOURCE = {4: _IP_HEADER + 12, 6: _IP_HEADER + 8}
_ETHERTYPES = {4: 0x0800, 6: 0x86DD}


def reserve_port(port: int = 0) -> socket.socket:
    """Take `port` on all addresses, without listening, until the socket is closed.

    A server of the same user that sets ``SO_REUSEPORT``, as those of the tf.data service do, can
    listen there meanwhile; everybody else gets EADDRINUSE, a ``tf.distribute.Server`` too.

    Parameters
    ----------
    port : int
        The port, 0 (default) for a free one: ``hold_port().getsockname()[1]``.

    Raises
    ------
    PortInUse
        Somebody has it; the error names who.
    """
    try:
        return _reserve(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} cannot be taken: {error.strerror}",
                fix="choose another port, or 0 for a free one",
            ) from None
    raise PortInUse(
        f"port {port} is taken by {port_owner(port)}",
        fix="stop that, or choose another port (0 takes a free one)",
    )


def port_owner(port: int) -> str:
    """Say who has `port`: its process, command line, and what a probe finds there."""
    found = probe(f"localhost:{port}", timeout=0.5)
    what = {"dispatcher": "a tf.data dispatcher", "data_worker": "a tf.data worker"}.get(
        found.kind or "", "a TensorFlow server" if found.alive else ""
    )
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        connections = []
    listening = [c for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
    pid = next((c.pid for c in listening if c.pid), None)
    if pid == os.getpid():
        return f"{what or 'another socket'} in this process (pid {pid})"
    if pid:
        return f"{what + ', ' if what else ''}pid {pid}{_command(pid)}"
    if listening or found.state != "refused":
        return what or "a process that this user may not see"
    return "a process that holds it without listening"


def listening_addresses(port: int) -> list[str]:
    """Return the addresses at which any process of this host listens at TCP `port` (Linux)."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                address, _, number = local.partition(":")
                if state == _LISTEN and int(number, 16) == port:
                    # Words of 4 bytes, each in the order of this host.
                    words = struct.unpack(f"!{len(address) // 8}I", bytes.fromhex(address))
                    packed = struct.pack(f"={len(words)}I", *words)
                    found.add(str(ipaddress.ip_address(packed)))
    return sorted(found)


def listening_fds(port: int) -> list[int]:
    """Return the file descriptors of this process that listen at TCP `port` (Linux)."""
    return [fd for fd, _ in _listeners(port)]


def listening_inodes(port: int) -> set[int]:
    """Return the inodes of the sockets of this process that listen at TCP `port` (Linux)."""
    return {os.fstat(sock.fileno()).st_ino for _, sock in _listeners(port)}


def restrict_port(port: int, allow: Iterable[str] = (), host: str | None = None) -> str:
    """Accept only peers of this host and of the networks in `allow` at `port` of this process.

    A packet filter is put on every listening socket of this process at `port`, and connections
    that others made before are shut down. Peers that are not let in time out. The addresses of
    this host are those of the moment: after a change of network call it again.

    Parameters
    ----------
    port : int
    allow : iterable of str
        Networks in CIDR form; ``0.0.0.0/0`` or ``::/0`` open the port to everyone.
    host : str, optional
        The name or address that peers use. For ``localhost`` only loopback is let in. Default:
        all addresses of this host are let in, except for link-local ones.

    Returns
    -------
    str
        Peers that can connect, for the column ``open_to``: ``"loopback"``, ``"this host"``,
        ``"this host, 10.0.0.0/8"``, ``"everyone"``, or ``"unknown: why"`` on a system that has no
        socket filters.

    Raises
    ------
    FilterFailed
        The filter cannot be attached: the port is open to other hosts.
    """
    allowed = [ipaddress.ip_network(network, strict=False) for network in allow]
    if any(network.prefixlen == 0 for network in allowed):
        return "everyone"
    if not sys.platform.startswith("linux"):
        return f"unknown: {sys.platform} has no socket filters, other hosts may connect"
    error: OSError | None = None
    for words, own in _own_networks(host):
        let_in = merged([*own, *allowed])
        try:
            _filter(port, let_in)
        except OSError as failure:
            error = failure
            continue
        _restrict(port, let_in)
        return ", ".join([words, *map(str, allowed)])
    assert error is not None
    raise FilterFailed(
        f"port {port} cannot be closed to other hosts: the packet filter was not attached "
        f"({error.strerror or error}; {len(let_in)} networks, net.core.optmem_max is "
        f"{_optmem_max()})",
        fix="raise it as root: sysctl -w net.core.optmem_max=131072, or use fewer networks in "
        "allow=",
    )


def merged(networks: Iterable[Network]) -> list[Network]:
    """Return the same addresses in as few networks as possible."""
    found = list(networks)
    made: list[Network] = []
    made += ipaddress.collapse_addresses(n for n in found if isinstance(n, ipaddress.IPv4Network))
    made += ipaddress.collapse_addresses(n for n in found if isinstance(n, ipaddress.IPv6Network))
    return made


def _own_networks(host: str | None) -> Iterator[tuple[str, list[Network]]]:
    """Yield what to let in of this host and its name, the widest first."""
    loopback: list[Network] = [ipaddress.ip_network(network) for network in _LOOPBACK]
    if host is not None and (found := _addresses_of(host)) <= set(loopback):
        yield "loopback", loopback
        return
    own = _this_host()
    yield "this host", own
    # Peers of this host that connect to an address have the same one as their source.
    named = [] if host is None else [network for network in own if network in found]
    yield ", ".join(["loopback", *map(str, named)]), [*loopback, *named]


def _addresses_of(host: str) -> set[Network]:
    """Return the networks of one address each that a name stands for; loopback's as a whole."""
    found: set[Network] = set()
    try:
        listed = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return {ipaddress.ip_network("0.0.0.0/32")}  # none of this host
    for entry in listed:
        address = ipaddress.ip_address(str(entry[4][0]).partition("%")[0])
        own = _LOOPBACK[address.version == 6] if address.is_loopback else str(address)
        found.add(ipaddress.ip_network(own))
    return found


def _filter(port: int, let_in: Iterable[Network]) -> None:
    """Put a filter on the listening sockets at `port`, or raise OSError or FilterFailed."""
    program = _program(let_in)
    closed = 0
    for _, sock in _listeners(port):
        _attach(sock, program)
        _await_accepts(sock)
        closed += 1
    if not closed:
        raise FilterFailed(
            f"port {port} cannot be closed to other hosts: this process does not listen there",
            fix="cluster.logs(task) may show why the server has stopped",
        )


def _optmem_max() -> str:
    try:
        return Path("/proc/sys/net/core/optmem_max").read_text().strip()
    except OSError:
        return "unknown"


def shutdown_connections_to(addresses: Iterable[str]) -> int:
    """End this process's connections to addresses where nobody will answer any more.

    Where a host vanished, TCP waits for it for a quarter of an hour, and with it closures, and the
    destructors of functions, in whatever thread they run.

    Parameters
    ----------
    addresses : iterable of str
        ``"host:port"``.

    Returns
    -------
    int
        How many were ended.
    """
    gone = set()
    for address in addresses:
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError):
            for found in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
                gone.add(found[4][:2])
    ended = 0
    for _, sock in _own_sockets():
        with contextlib.suppress(OSError):  # it is not connected, or not any more
            host, port = sock.getpeername()[:2]
            if (host.removeprefix("::ffff:"), port) in gone:  # IPv4 through a socket of IPv6
                sock.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


class SentBytes:
    """Counts the bytes that this process has sent over the connections accepted at a port.

    Bytes count when the peer's TCP has acknowledged them; what a connection sent after the last
    `read` before it was closed is not seen. On systems other than Linux the count stays 0.

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
        """Return the bytes sent so far; never less than the time before."""
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
    """Connections of another process, kept from ending when that process dies.

    A peer whose server dies tries at once to connect again, is refused, and then pauses, longer
    each time (gRPC: a second at first). With its connection kept open it waits instead, and
    `release`, called when the server is back, lets it connect to a server that is there.
    """

    def __init__(self) -> None:
        self._duplicates: dict[int, int] = {}

    def keep(self, pid: int, descriptors: Mapping[int, int]) -> None:
        """Keep exactly these connections of the process: descriptors there, by inode."""
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
                    else:  # the descriptor was closed and used again meanwhile
                        os.close(duplicate)
            finally:
                os.close(handle)

    def release(self) -> None:
        """Let go of all of them."""
        while self._duplicates:
            os.close(self._duplicates.popitem()[1])


def _duplicate_of(handle: int, descriptor: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    duplicate: int = libc.syscall(_SYS_PIDFD_GETFD, handle, descriptor, 0)
    if duplicate < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.set_inheritable(duplicate, False)
    return duplicate


def bytes_sent(port: int) -> int:
    """Return the bytes sent over this process's open connections accepted at `port`."""
    return SentBytes(port).read()


def _reserve(port: int) -> socket.socket:
    family, everywhere = socket.AF_INET6, "::"
    if not socket.has_dualstack_ipv6():
        family, everywhere = socket.AF_INET, "0.0.0.0"
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Bound without SO_REUSEPORT, so that another server's port is refused, not shared; with
        # SO_REUSEADDR, so that a predecessor's closed connections (TIME_WAIT) do no harm. Both
        # are turned round afterwards, for the server that shall listen here.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1 if port else 0)
        sock.bind((everywhere, port))
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
    """Yield the TCP sockets of this process, each as a duplicate that lives until the next."""
    try:
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
    except FileNotFoundError:
        return
    for fd in fds:
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:  # closed meanwhile
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
                # A bridge to each container has one, and no task is reached by it.
                if not network.is_link_local:
                    networks.append(network)
    return networks


def _program(let_in: Iterable[Network]) -> bytes:
    """Compile a classic BPF program that passes packets whose source is in one of `let_in`."""
    networks = set(let_in)
    halves: dict[int, list[bytes]] = {4: [], 6: []}
    for version, code in halves.items():
        for network in sorted((n for n in networks if n.version == version), key=str):
            code.extend(_match(network))
        code.append(_instruction(_RET, 0))
    # The jump over the first half may be long, hence a chain of two: IPv4, or else IPv6.
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
    """Return instructions that accept a packet from `network` and else fall through."""
    address, mask = network.network_address.packed, network.netmask.packed
    count = len(mask) // 4
    words = zip(
        struct.unpack(f"!{count}I", address), struct.unpack(f"!{count}I", mask), strict=True
    )
    code: list[bytes] = []
    for index, (wanted, bits) in reversed(list(enumerate(words))):
        if not bits:
            continue
        # Built from the end: a word that differs jumps behind all that follows.
        test = [_instruction(_JEQ, wanted, 0, max(len(code), 1))]
        if bits != _EVERYTHING:
            test.insert(0, _instruction(_AND, bits))
        test.insert(0, _instruction(_LD_WORD, _SOURCE[network.version] + 4 * index))
        code = test + (code or [_instruction(_RET, _EVERYTHING)])
    return code


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _attach(sock: socket.socket, program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HP", len(program) // 8, ctypes.addressof(code))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)


def _await_accepts(sock: socket.socket, limit: float = 0.1) -> None:
    """Wait until the connections made before the filter have been accepted, and so have an fd."""
    end = time.monotonic() + limit
    while _tcp_info(sock, _TCP_INFO_UNACKED, "I") and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.001)  # accept() takes a connection off the queue before its fd appears


def _restrict(port: int, let_in: Iterable[Network]) -> None:
    for _, sock in _own_sockets():
        with contextlib.suppress(OSError):
            if _local_port(sock) != port or _listens(sock):
                continue
            peer = ipaddress.ip_address(sock.getpeername()[0].partition("%")[0])
            peer = getattr(peer, "ipv4_mapped", None) or peer
            if not any(peer in network for network in let_in):
                sock.shutdown(socket.SHUT_RDWR)
