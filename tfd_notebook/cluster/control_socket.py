"""Unix socket through which other processes of this user control the clusters of this process.

Request and reply are one line of JSON each. The socket is in the user's runtime directory (mode
0700) and has mode 0600. The server checks the peer's user id with `SO_PEERCRED`. Separate threads
serve it, so it responds while a cell runs.
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
from pathlib import Path
from typing import Any

from tfd_notebook import errors
from tfd_notebook.cluster import commands, registry
from tfd_notebook.net import control_calls, runtime_dir, unix_socket
from tfd_notebook.resolvers import providers

__all__ = ["ControlServer", "ensure_started", "stop", "stop_if_unused"]

_MAX_REQUEST_BYTES = 65_536
_PEER_SECONDS = 5.0
_MAX_CLIENTS = 8
#: Answer to a client that exceeds `_MAX_CLIENTS`.
_BUSY = json.dumps({"busy": _MAX_CLIENTS}).encode() + b"\n"
_PEER_THREAD = "tfd-control-peer"
#: Seconds that process exit waits for replies: a request to stop the cluster may cause the exit.
_EXIT_SECONDS = 2.0

#: Seconds until the next accept after an error, such as running out of file descriptors.
_RETRY_SECONDS = 0.2

log = logging.getLogger("tfd_notebook")

_server: ControlServer | None = None
_server_lock = threading.Lock()


def ensure_started() -> Path:
    """Start the control server of this process if needed, and return the path of its socket."""
    global _server
    with _server_lock:
        if _server is None:
            _server = ControlServer()
        return _server.path


def stop() -> None:
    """Stop the control server of this process, if it runs."""
    with _server_lock:
        _stop()


def stop_if_unused() -> None:
    """Stop the control server unless a cluster of this process runs or a remote kernel is open.

    A cluster that has not started does not count: its start calls `ensure_started`, which waits for
    the check. A kernel is registered before it does.
    """
    with _server_lock:
        running = any(cluster.state != "new" for cluster in registry.running_clusters().values())
        if not running and not providers.remote_kernels():
            _stop()


def _stop() -> None:
    # With the lock: the end of the old server removes the path, which a new one would also use.
    global _server
    server, _server = _server, None
    if server is not None:
        server.close()


def _after_fork() -> None:
    # A listening socket inherited by a child would still accept after its process has ended.
    global _server, _server_lock
    server, _server, _server_lock = _server, None, threading.Lock()
    if server is not None:
        server.close_in_child()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _await_replies() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in threading.enumerate():
        if thread.name == _PEER_THREAD:
            thread.join(max(0.0, deadline - time.monotonic()))


class ControlServer:
    """Server for requests about the clusters of this process.

    Parameters
    ----------
    path : Path, optional
        Path of the socket. Default: `tfd_notebook.net.runtime_dir.control_socket`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or runtime_dir.control_socket(os.getpid())
        #: The error of the last connection; empty if it was served.
        self._failure = ""
        self._slots = threading.BoundedSemaphore(_MAX_CLIENTS)
        self._listener = unix_socket.listen(self.path, _MAX_CLIENTS)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="tfd-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Requests in progress are still answered."""
        self._wake_sender.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(_PEER_SECONDS)

    def close_in_child(self) -> None:
        """Close the sockets in a forked child, where they belong to the parent."""
        for sock in (self._listener, self._wake_receiver, self._wake_sender):
            sock.close()

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
            for sock in (self._listener, self._wake_receiver, self._wake_sender):
                sock.close()

    def _accept_one(self) -> None:
        """Accept and serve a connection. Log errors instead of raising them."""
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
        if not unix_socket.is_this_user(peer):
            peer.close()
            return
        if not self._slots.acquire(blocking=False):
            with contextlib.suppress(OSError), peer:
                peer.setblocking(False)
                peer.sendall(_BUSY)
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
            # The peer may have disconnected: then it needs no reply.
            with contextlib.suppress(OSError), peer:
                peer.sendall(
                    _answer(control_calls.read_line(peer, _MAX_REQUEST_BYTES, _PEER_SECONDS))
                )
        finally:
            self._slots.release()


# Messages


def _answer(line: bytes) -> bytes:
    def work() -> Any:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            raise errors.UsageError("invalid request: expected one line of JSON") from None
        return commands.perform(request)

    return json.dumps(commands.answer(work)).encode() + b"\n"
