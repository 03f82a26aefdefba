"""Unauthenticated clients for the sockets of all processes of this run, and their messages."""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
from pathlib import Path

import psutil

from tfd_notebook.net import unix_socket

_REACH_SECONDS = 5.0
#: Seconds that a client waits for an answer.
_STAY_SECONDS = 0.3
#: Flag of a listening socket in ``/proc/net/unix``: `__SO_ACCEPTCON`.
_LISTENS = 0x10000


class Bomb:
    """An object that creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def junk(bomb: Path) -> list[bytes]:
    """Return invalid messages: a pickle that creates `bomb`, requests and random bytes."""
    header = json.dumps({"method": "end", "close": True, "agent": "x", "mode": "start"}).encode()
    return [
        pickle.dumps(Bomb(bomb)) * 3,
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(4096),
        len(header).to_bytes(4, "big") + header,
        len(header).to_bytes(8, "big") + b"[" * len(header),
        (3).to_bytes(8, "big") + b"[1]",
        b"TFDSEAL1" + bytes(64) + header,
        b'TFD1 1 18 {"action": "stop"}\n',
        os.urandom(2_000),
    ]


def members() -> list[psutil.Process]:
    """Return all processes of this run except the test process."""
    processes = []
    for process in psutil.process_iter():
        try:
            is_member = process.environ().get("TFD_TEST_RUN") == os.environ["TFD_TEST_RUN"]
        except psutil.Error:
            continue
        if is_member and process.pid != os.getpid():
            processes.append(process)
    return processes


def listening() -> dict[int, str]:
    """Return the ports at which a process of this run listens, with the names of the processes."""
    names = {process.pid: process.name() for process in members()}
    return {
        connection.laddr.port: names[connection.pid]
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid in names
    }


def unix_sockets() -> set[str]:
    """Return the listening Unix sockets of this run. ``@`` begins a name without a file."""
    pids = {process.pid for process in members()}
    addresses = {c.laddr for c in psutil.net_connections("unix") if c.pid in pids and c.laddr}
    listeners = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[3], 16) & _LISTENS and fields[7] in addresses:
            listeners.add(fields[7])
    return listeners


def knock(address: int | str, message: bytes) -> None:
    """Send a message to a port or Unix socket of this host, and read the answer for a moment."""
    try:
        with _connected(address) as peer:
            peer.settimeout(_STAY_SECONDS)
            peer.sendall(message)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(4096):
                pass
    except OSError:
        pass


def _connected(address: int | str) -> socket.socket:
    if isinstance(address, int):
        return socket.create_connection(("127.0.0.1", address), _REACH_SECONDS)
    if not address.startswith("@"):
        return unix_socket.connect(Path(address), _REACH_SECONDS)
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect("\0" + address[1:])
    except OSError:
        peer.close()
        raise
    return peer


def forms(secret: bytes) -> list[bytes]:
    """Return all encodings in which a secret could be written."""
    return [
        secret,
        *(line for line in secret.splitlines() if not line.startswith(b"-----")),
        secret.hex().encode(),
        base64.b64encode(secret),
        base64.urlsafe_b64encode(secret),
        repr(secret)[2:-1].encode(),
    ]
