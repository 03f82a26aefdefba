"""Calls to the processes of this user that have clusters, over their unix sockets.

The server is `tfd_notebook.cluster.control_socket`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook import errors
from tfd_notebook.net import runtime_dir, unix_socket, validation
from tfd_notebook.net.agent_protocol import unpack_error

_TEXTS = {name: validation.optional(validation.text) for name in ("code", "task", "fix")}
#: The checks of a reply by its kind, the first one that it has.
_REPLIES: dict[str, validation.Check] = {
    "busy": validation.integer(),
    "error": validation.record_with({**_TEXTS, "what": validation.long_text}),
    "value": lambda value, path: value,
}
#: The check of the answer to ``list``; see `tfd_notebook.views.brief`.
_SUMMARIES = validation.listing(
    validation.record_with(
        {
            **dict.fromkeys(("name", "state", "launcher"), validation.text),
            **dict.fromkeys(("planned", "observed", "reading"), validation.integer()),
            "lease": validation.optional(validation.timestamp),
        }
    )
)
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
            with contextlib.suppress(OSError):  # for example, it is a directory
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
    InvalidMessage
        Its reply is invalid.
    TfdError
        The error that the command raised.
    """
    deadline = time.monotonic() + timeout
    while "busy" in (reply := _checked(pid, _request(pid, request, timeout, deadline))):
        if deadline - time.monotonic() <= _BUSY_SECONDS:
            raise errors.TimeLimit(
                f"process {pid} is busy with {reply['busy']} other requests",
                fix="end other commands such as tfd watch, and try again",
            )
        time.sleep(_BUSY_SECONDS)
    if "error" in reply:
        raise unpack_error(reply["error"])
    return reply["value"]


def checked(pid: int, check: Callable[[Any, str], Any], value: Any) -> Any:
    """Return a value that the process `pid` has sent, as `check` of `validation` returns it.

    Raises
    ------
    InvalidMessage
        The value is invalid. Processes can have different versions of this package.
    """
    try:
        return check(value, f"reply of process {pid}")
    except errors.InvalidMessage as error:
        raise errors.InvalidMessage(
            error.what, fix="end the process, or start it with the same version of tfd-notebook"
        ) from None


def _checked(pid: int, reply: Any) -> dict[str, Any]:
    """Return a reply that has one of ``busy``, ``error`` and ``value``."""
    kind = next((kind for kind in _REPLIES if isinstance(reply, dict) and kind in reply), "value")
    return dict(checked(pid, validation.record({kind: _REPLIES[kind]}), reply))


def clusters(
    timeout: float = 10.0,
    but: int | None = None,
    unanswered: list[errors.TfdError] | None = None,
) -> list[dict[str, Any]]:
    """Return all clusters of this user as `tfd_notebook.views.brief` describes them, with ``pid``.

    Parameters
    ----------
    timeout : float
        Seconds for each process. Default 10.
    but : int, optional
        A process that is left out.
    unanswered : list, optional
        Extended by the error of each process that does not reply, is busy, or sends an invalid
        reply.
    """
    summaries: list[dict[str, Any]] = []
    for pid in processes():
        if pid == but:
            continue
        # A process that has just ended, or does not reply, must not hide the others.
        try:
            rows = checked(pid, _SUMMARIES, call(pid, {"command": "list"}, timeout))
            summaries += [dict(row, pid=pid) for row in rows]
        except errors.UnknownName:
            pass
        except errors.TfdError as error:
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
    if not line.endswith(b"\n"):
        raise errors.UnknownName(
            f"process {pid} closed the connection without a reply", fix="see tfd list"
        )
    checked(pid, lambda text, _: validation.check_values(text), line)
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return checked(pid, validation.record({}), "not JSON")
