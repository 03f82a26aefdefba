"""Unix sockets for communication between processes of one user."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from tfd_notebook.errors import WorkDirError


def listen(path: Path, backlog: int) -> socket.socket:
    """Return a socket that listens at `path`, which only this user can reach (0600).

    Raises
    ------
    WorkDirError
        The path is too long for a socket.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Renamed when it listens: processes that connect earlier would treat the owner as dead.
        temporary = path.with_suffix(".new")
        temporary.unlink(missing_ok=True)
        with _short_path(temporary) as address:
            listener.bind(address)
        temporary.chmod(0o600)
        listener.listen(backlog)
        temporary.replace(path)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(path: Path, timeout: float) -> socket.socket:
    """Return a socket connected to `path`, whose operations take at most `timeout` seconds.

    Raises
    ------
    OSError
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(timeout)
        with _short_path(path) as address:
            peer.connect(address)
    except BaseException:
        peer.close()
        raise
    return peer


def is_this_user(peer: socket.socket) -> bool:
    """Return True if the peer belongs to this user; always without SO_PEERCRED (macOS).

    The mode of the directory then protects the socket.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", packed)
    return bool(uid == os.getuid())


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Yield a name for `path` that fits into a socket address of about 100 bytes."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    if not os.path.isdir("/proc/self/fd"):
        raise WorkDirError(
            f"the path {path} is too long for a socket", fix="set TFD_RUNTIME_DIR to a shorter one"
        )
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
