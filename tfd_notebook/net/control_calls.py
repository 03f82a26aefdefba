"""Calls to the processes of this user that have clusters, over their unix sockets.

The server is `tfd_notebook.cluster.control_socket`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from tfd_notebook import errors
from tfd_notebook.net import runtime_dir, unix_socket
from tfd_notebook.net.agent_protocol import unpack_error

_MAX_REPLY_BYTES = 64_000_000
_CONNECT_SECONDS = 5.0
#: Seconds until a request to a busy process is repeated.
_BUSY_SECONDS = 0.2


def processes() -> tuple[int, ...]:
    """Return the pids of this user's processes that listen. Remove sockets of dead processes."""
    pids = []
    for pid, path in runtime_dir.own_files("sock"):
        try:
            with unix_socket.connect(path, _CONNECT_SECONDS):
                pids.append(pid)
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
        except OSError:
            # The process is busy or hung, but exists.
            pids.append(pid)
    return tuple(pids)


def call(pid: int, request: Mapping[str, Any], timeout: float = 10.0) -> Any:
    """Send a request to the process `pid` and return its reply.

    Parameters
    ----------
    pid : int
        One of `processes`.
    request : mapping
        A request for `tfd_notebook.cluster.commands.perform`.
    timeout : float
        Seconds for the whole call. Default 10. While the process is busy with requests of other
        clients, the request is repeated.

    Raises
    ------
    TimeLimit
        The process did not reply in time, or is busy.
    UnknownName
        The process does not listen.
    TfdError
        The error that the command raised.
    """
    deadline = time.monotonic() + timeout
    while "busy" in (reply := _request(pid, request, timeout, deadline)):
        if deadline - time.monotonic() <= _BUSY_SECONDS:
            raise errors.TimeLimit(
                f"process {pid} is busy with {reply['busy']} other requests",
                fix="end other commands such as tfd watch, and try again",
            )
        time.sleep(_BUSY_SECONDS)
    if "error" in reply:
        raise unpack_error(reply["error"])
    return reply["value"]


def clusters(
    timeout: float = 10.0,
    but: int | None = None,
    unanswered: list[errors.TimeLimit] | None = None,
) -> list[dict[str, Any]]:
    """Return all clusters of this user as `tfd_notebook.views.brief` describes them, with ``pid``.

    Parameters
    ----------
    timeout : float
        Seconds for each process. Default 10.
    but : int, optional
        A process that is left out.
    unanswered : list, optional
        Extended by the error of each process that does not reply, or is busy.
    """
    summaries: list[dict[str, Any]] = []
    for pid in processes():
        if pid == but:
            continue
        # A process that has just ended, or does not reply, must not hide the others.
        try:
            summaries += [dict(row, pid=pid) for row in call(pid, {"command": "list"}, timeout)]
        except errors.UnknownName:
            pass
        except errors.TimeLimit as error:
            if unanswered is not None:
                unanswered.append(error)
    return summaries


def read_line(peer: socket.socket, most: int, timeout: float) -> bytes:
    """Read up to a newline, up to the end of the stream, or about `most` bytes."""
    deadline = time.monotonic() + timeout
    received = bytearray()
    while not received.endswith(b"\n") and len(received) < most:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        peer.settimeout(left)
        chunk = peer.recv(65_536)
        if not chunk:
            break
        received += chunk
    return bytes(received)


def _request(pid: int, request: Mapping[str, Any], timeout: float, deadline: float) -> Any:
    """Send a request and return the complete reply, as `call` describes it."""
    try:
        left = max(0.001, deadline - time.monotonic())
        with unix_socket.connect(runtime_dir.control_socket(pid), left) as peer:
            # A busy process replies and closes the connection before it reads.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.sendall(json.dumps(dict(request)).encode() + b"\n")
            line = read_line(peer, _MAX_REPLY_BYTES, deadline - time.monotonic())
    except TimeoutError:
        raise errors.TimeLimit(
            f"process {pid} did not reply within {timeout:g} s",
            fix="it may be stopped or swapped out; try again",
        ) from None
    except OSError as error:
        raise errors.UnknownName(
            f"connecting to process {pid} failed: {error.strerror or error}", fix="see tfd list"
        ) from None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise errors.UnknownName(
            f"process {pid} closed the connection without a reply", fix="see tfd list"
        ) from None
