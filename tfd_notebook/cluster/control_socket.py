"""A unix socket by which this user's other processes reach the clusters of this one.

One line of JSON asks, one line answers. The socket lies in the user's runtime directory (0700), has
mode 0600, and asks the system who is there. It is served by threads of its own, also while a cell
runs.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfd_notebook import errors
from tfd_notebook.cluster import commands
from tfd_notebook.net import unix_socket

__all__ = ["ControlServer", "call", "clusters", "ensure_started", "processes", "stop"]

_MOST_REQUEST = 65_536
_MOST_REPLY = 64_000_000
_PEER_SECONDS = 5.0
_CLIENTS = 8
_PEER_THREAD = "tfd-control-peer"
#: Seconds that the end of this process waits for answers: to have its cluster stopped may end it.
_FAREWELL_SECONDS = 2.0

#: Seconds until a connection is accepted again after an error, such as of descriptors.
_RETRY_SECONDS = 0.2

log = logging.getLogger("tfd_notebook")

_server: ControlServer | None = None
_server_lock = threading.Lock()


def ensure_started() -> Path:
    """Have this process listen, and return the path of its socket."""
    global _server
    with _server_lock:
        if _server is None:
            _server = ControlServer()
        return _server.path


def stop() -> None:
    """Listen no longer; does nothing where nobody listens."""
    global _server
    with _server_lock:
        server, _server = _server, None
    if server is not None:
        server.close()


def _after_fork() -> None:
    # A socket held by a child would look alive after its process ended.
    global _server, _server_lock
    server, _server, _server_lock = _server, None, threading.Lock()
    if server is not None:
        server.abandon()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _await_replies() -> None:
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for thread in threading.enumerate():
        if thread.name == _PEER_THREAD:
            thread.join(max(0.0, deadline - time.monotonic()))


class ControlServer:
    """Answers requests about the clusters of this process.

    Parameters
    ----------
    path : Path, optional
        Of the socket. Default: `tfd_notebook.net.runtime_dir.control_socket`.
    """

    def __init__(self, path: Path | None = None) -> None:
        from tfd_notebook.net.runtime_dir import control_socket

        self.path = path or control_socket(os.getpid())
        #: Why the last connection was not served; empty if it was.
        self._failure = ""
        self._slots = threading.BoundedSemaphore(_CLIENTS)
        self._listener = unix_socket.listen(self.path, _CLIENTS)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="tfd-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no longer; requests that are being served are still answered."""
        self._wake_sender.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(_PEER_SECONDS)

    def abandon(self) -> None:
        """In a forked child: let go of the sockets, which belong to the parent."""
        for held in (self._listener, self._wake_receiver, self._wake_sender):
            held.close()

    def _accept(self) -> None:
        try:
            # select() would fail with descriptors above 1023.
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                selector.register(self._wake_receiver, selectors.EVENT_READ)
                while self._wake_receiver not in [key.fileobj for key, _ in selector.select()]:
                    self._accept_one()
        except BaseException:
            log.exception(
                "the control socket %s failed: `tfd` cannot reach this process", self.path
            )
            raise
        finally:
            self.path.unlink(missing_ok=True)
            for held in (self._listener, self._wake_receiver, self._wake_sender):
                held.close()

    def _accept_one(self) -> None:
        """Accept a connection and serve it; report what prevents that, and go on."""
        try:
            peer, _ = self._listener.accept()
            try:
                self._start_serving(peer)
            except BaseException:
                peer.close()
                raise
        except Exception as error:
            if str(error) != self._failure:
                log.warning("a connection to %s was not served: %s", self.path, error)
            self._failure = str(error)
            time.sleep(_RETRY_SECONDS)
        else:
            self._failure = ""

    def _start_serving(self, peer: socket.socket) -> None:
        if not unix_socket.is_this_user(peer) or not self._slots.acquire(blocking=False):
            peer.close()
            return
        try:
            threading.Thread(
                target=self._serve, args=(peer,), name=_PEER_THREAD, daemon=True
            ).start()
        except BaseException:
            self._slots.release()
            raise

    def _serve(self, peer: socket.socket) -> None:
        try:
            # A peer that went away needs no answer.
            with contextlib.suppress(OSError), peer:
                peer.settimeout(_PEER_SECONDS)
                peer.sendall(_answer(_read_line(peer, _MOST_REQUEST)))
        finally:
            self._slots.release()


def processes() -> tuple[int, ...]:
    """Return the pids of this user's processes that listen; dead sockets are removed."""
    from tfd_notebook.net.runtime_dir import own_files

    found = []
    for pid, path in own_files("sock"):
        try:
            with unix_socket.connect(path, _PEER_SECONDS):
                found.append(pid)
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
        except OSError:
            # Busy or stuck, but in use.
            found.append(pid)
    return tuple(found)


def call(pid: int, request: Mapping[str, Any], timeout: float = 10.0) -> Any:
    """Ask the process `pid` and return its answer.

    Parameters
    ----------
    pid : int
        One of `processes`.
    request : mapping
        One of those that `tfd_notebook.cluster.commands.perform` knows.
    timeout : float
        Seconds for the whole of it. Default 10.

    Raises
    ------
    TimeLimit
        It did not answer in time.
    UnknownName
        No such process listens.
    TfdError
        What the process answered.
    """
    from tfd_notebook.net.runtime_dir import control_socket

    try:
        with unix_socket.connect(control_socket(pid), timeout) as peer:
            peer.sendall(json.dumps(dict(request)).encode() + b"\n")
            line = _read_line(peer, _MOST_REPLY, timeout)
    except TimeoutError:
        raise errors.TimeLimit(
            f"process {pid} did not answer within {timeout:g} s",
            fix="it may be stopped or swapped out; try again",
        ) from None
    except OSError as error:
        raise errors.UnknownName(
            f"process {pid} cannot be reached: {error.strerror or error}", fix="see tfd list"
        ) from None
    try:
        reply = json.loads(line)
    except ValueError:
        raise errors.UnknownName(
            f"process {pid} went away without an answer", fix="see tfd list"
        ) from None
    if "error" in reply:
        raise commands.error_from(reply["error"])
    return reply["value"]


def clusters(timeout: float = 10.0, but: int | None = None) -> list[dict[str, Any]]:
    """Return all clusters of this user, as `tfd_notebook.views.brief` gives them, with ``pid``.

    The process `but` is not asked.
    """
    found: list[dict[str, Any]] = []
    for pid in processes():
        if pid == but:
            continue
        # One that has just ended, or does not answer, must not hide the others.
        with contextlib.suppress(errors.UnknownName, errors.TimeLimit):
            found += [dict(one, pid=pid) for one in call(pid, {"command": "list"}, timeout)]
    return found


# How it travels


def _answer(line: bytes) -> bytes:
    def work() -> Any:
        try:
            request = json.loads(line)
        except ValueError:
            raise errors.UsageError("the request is not one line of JSON") from None
        return commands.perform(request)

    return json.dumps(commands.answer(work)).encode() + b"\n"


def _read_line(peer: socket.socket, most: int, timeout: float = _PEER_SECONDS) -> bytes:
    """Read up to a newline, or what came when the peer closed or `most` bytes were there."""
    deadline = time.monotonic() + timeout
    got = bytearray()
    while not got.endswith(b"\n") and len(got) < most:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        peer.settimeout(left)
        more = peer.recv(65_536)
        if not more:
            break
        got += more
    return bytes(got)
