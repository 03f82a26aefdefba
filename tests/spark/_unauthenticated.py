"""Strangers at the sockets of all processes of this run, and what they say there."""

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
#: Seconds that a stranger stays to hear an answer.
_STAY_SECONDS = 0.3
#: What the kernel says of a socket that listens: `__SO_ACCEPTCON`.
_LISTENS = 0x10000


class Bomb:
    """Makes a directory where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def junk(bomb: Path) -> list[bytes]:
    """Return what strangers say: a pickle that makes `bomb`, requests, nonsense."""
    header = json.dumps({"do": "end", "end": True, "agent": "x", "how": "start"}).encode()
    return [
        pickle.dumps(Bomb(bomb)) * 3,
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(4096),
        len(header).to_bytes(4, "big") + header,
        len(header).to_bytes(8, "big") + b"[" * len(header),
        (3).to_bytes(8, "big") + b"[1]",
        b"TFDSEAL1" + bytes(64) + header,
        b'TFD1 host agent 1 13 {"do": "stop"}\n',
        os.urandom(2_000),
    ]


def members() -> list[psutil.Process]:
    """Return all processes of this run but the tests' own."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("TFD_TEST_RUN") == os.environ["TFD_TEST_RUN"]
        except psutil.Error:
            continue
        if ours and process.pid != os.getpid():
            found.append(process)
    return found


def listening() -> dict[int, str]:
    """Return the ports at which any of them listens, and what its command is."""
    names = {process.pid: process.name() for process in members()}
    return {
        one.laddr.port: names[one.pid]
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.pid in names
    }


def unix_sockets() -> set[str]:
    """Return the unix sockets at which any of them listens; ``@`` begins a name without a file."""
    pids = {process.pid for process in members()}
    ours = {one.laddr for one in psutil.net_connections("unix") if one.pid in pids and one.laddr}
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split(maxsplit=7)
        if len(words) == 8 and int(words[3], 16) & _LISTENS and words[7] in ours:
            found.add(words[7])
    return found


def knock(address: int | str, words: bytes) -> None:
    """Say something at a port of this host or a unix socket; hear for a moment what it answers."""
    try:
        with _connected(address) as peer:
            peer.settimeout(_STAY_SECONDS)
            peer.sendall(words)
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
    """Return how a secret could be written."""
    return [
        secret,
        secret.hex().encode(),
        base64.b64encode(secret),
        base64.urlsafe_b64encode(secret),
        repr(secret)[2:-1].encode(),
    ]
