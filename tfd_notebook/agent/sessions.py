"""Sessions of an agent's clients, each over one connection or several.

A session over the agent's own pipes ends with them. A session over the agent's socket may lose its
connection and reconnect within its grace time. The agent then sends the missed frames again, and
does not execute a request twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from tfd_notebook._compat import asyncio_pipes
from tfd_notebook._version import VERSION
from tfd_notebook.errors import LaunchError
from tfd_notebook.model.spec import check_seconds
from tfd_notebook.net import agent_protocol, unix_socket

SOCKET = "agent.sock"
#: Bytes of frames that a session keeps until its client acknowledges them. A client that missed
#: more requests the whole state.
KEPT_BYTES = 16_000_000
#: Bytes of overhead of a kept frame.
_FRAME_BYTES = 200
#: Bytes of an oversized line that are read to find out which request it is.
_HEAD_BYTES = 512
#: Bytes in the buffer of a slow reader above which measurements are dropped.
_BACKLOG_BYTES = 1_000_000
_HELLO_SECONDS = 30.0

#: Takes a session and the body of its request.
OnRequest = Callable[["Session", dict[str, Any]], Awaitable[None]]


class _Kept(NamedTuple):
    """A frame that may have to be sent again."""

    seq: int
    #: None for a reply that is obtained by executing the request again.
    line: bytes | None
    #: Id of the request to which it is the reply.
    request: int | None

    @property
    def size(self) -> int:
        return _FRAME_BYTES + len(self.line or b"")


class Session:
    """A client's requests and the events it receives.

    Parameters
    ----------
    grace : float
    clock : callable
        Returns the time in seconds. Default `time.monotonic`.
    last_request : int
        Number of the client's last request to an earlier session, which may have executed it.
        Default 0.

    Attributes
    ----------
    grace : float
        Seconds without a connection after which the session ends.
    subscriptions : set of str
        The clusters whose events the client receives.
    """

    def __init__(
        self,
        grace: float,
        clock: Callable[[], float] = time.monotonic,
        last_request: int = 0,
    ) -> None:
        self.grace = grace
        self._clock = clock
        self.subscriptions: set[str] = set()
        self.disconnected_since: float | None = None
        self._last_received = clock()
        self._seq = 0
        self._last_request = last_request
        self._executing: set[int] = set()
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._writer: asyncio.StreamWriter | None = None

    @property
    def has_expired(self) -> bool:
        """True if the session had no connection during its whole grace time."""
        since = self.disconnected_since
        return since is not None and self._clock() - since >= self.grace

    def drop_silent(self, seconds: float) -> None:
        """Abort a connection without data, including pings, for this number of seconds."""
        if (
            self._writer is not None
            and self.grace
            and self._clock() - self._last_received > seconds
        ):
            self._writer.transport.abort()

    def send(self, body: dict[str, Any], repeatable: bool = False) -> None:
        """Send a reply or an event; drop a measurement that no client fetches.

        Parameters
        ----------
        body : dict
        repeatable : bool
            Whether the request can be executed again if this reply is lost. Default false.
        """
        measure = body.get("event") == "measure"
        writer = self._writer
        if measure and (
            writer is None or writer.transport.get_write_buffer_size() > _BACKLOG_BYTES
        ):
            return
        # Only frames that may be sent again have a number.
        seq = 0 if measure else self._seq + 1
        line = agent_protocol.encode(body, seq)
        self._seq = seq or self._seq
        request = body.get("reply_to")
        if request is not None:
            self._executing.discard(request)
        if self.grace and not measure:
            self._keep(_Kept(seq, None if repeatable else line, request))
        if writer is not None:
            writer.write(line)

    def _keep(self, frame: _Kept) -> None:
        self._kept.append(frame)
        self._kept_bytes += frame.size
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= self._kept.popleft().size

    def _acknowledge(self, seq: int) -> None:
        """Drop the frames that the client has received, up to number `seq`."""
        while self._kept and self._kept[0].seq <= seq:
            self._kept_bytes -= self._kept.popleft().size

    async def serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_request: OnRequest,
        last_seq: int = 0,
    ) -> None:
        """Serve a connection until it ends or is replaced; never raises.

        Parameters
        ----------
        last_seq : int
            Number of the last frame received over the previous connection.
        """
        if self._writer is not None:
            self._writer.close()
        self._writer, self.disconnected_since = writer, None
        self._last_received = self._clock()
        try:
            self._resume(writer, last_seq)
            await self._read_requests(reader, on_request)
        except OSError:
            pass
        except Exception as error:
            # The client may reconnect, and clusters outlive this connection.
            traceback.print_exc()
            with contextlib.suppress(Exception):
                reason = f"{type(error).__name__}: {error}"
                writer.write(agent_protocol.encode({"event": "failed", "reason": reason}))
        if self._writer is writer:
            self._writer, self.disconnected_since = None, self._clock()

    def _resume(self, writer: asyncio.StreamWriter, last_seq: int) -> None:
        """Send the event ``hello`` and the frames that the client has missed."""
        self._acknowledge(last_seq)
        full = last_seq == self._seq or bool(self._kept and self._kept[0].seq == last_seq + 1)
        writer.write(_hello(full))
        for frame in self._kept:
            if frame.line is not None:
                writer.write(frame.line)

    async def _read_requests(self, reader: asyncio.StreamReader, on_request: OnRequest) -> None:
        pending: set[asyncio.Future[None]] = set()
        while (read := await _read_line(reader))[0]:
            self._last_received = self._clock()
            line, is_complete = read
            if not is_complete:
                self._refuse(line)
            frame = agent_protocol.decode(line)
            if frame is None:
                continue
            number, method = frame.body.get("id"), frame.body.get("method")
            if method == "close_session":
                # The client waits until this end closes the connection, which confirms the request.
                self.grace = 0.0
                return
            if method == "ping":
                self._acknowledge(int(frame.body["arguments"].get("seq", 0)))
            elif isinstance(number, int) and number > 0 and self._must_execute(number):
                self._last_request = max(number, self._last_request)
                self._executing.add(number)
                handling = asyncio.ensure_future(on_request(self, frame.body))
                pending.add(handling)
                handling.add_done_callback(pending.discard)

    def _must_execute(self, number: int) -> bool:
        """Return False if a repeated request has been executed or is being executed."""
        if number > self._last_request:
            return True
        if number in self._executing:
            return False
        for frame in self._kept:
            if frame.request == number:
                return frame.line is None
        error = LaunchError(
            "the request may have been executed while the connection was lost, and its reply is no "
            "longer available",
            fix="check the cluster's state, then decide whether to repeat it",
        )
        self.send(agent_protocol.failure(number, error))
        return False

    def _refuse(self, line: bytes) -> None:
        """Reply to a request of which only the start was read."""
        start = agent_protocol.decode_head(line)
        if start is not None and start[0] > self._last_request:
            self._last_request, size = start
            error = agent_protocol.too_large(size)
            self.send(agent_protocol.failure(self._last_request, error))


async def _read_line(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """Return the next line and True, or the start of a line that is too long and False.

    The line is empty at the end of the input.
    """
    try:
        return await reader.readuntil(b"\n"), True
    except asyncio.IncompleteReadError as error:
        return error.partial, True
    except asyncio.LimitOverrunError as error:
        start = await reader.readexactly(min(_HEAD_BYTES, error.consumed))
    while True:
        try:
            await reader.readuntil(b"\n")
            return start, False
        except asyncio.LimitOverrunError as error:
            await reader.readexactly(error.consumed)
        except asyncio.IncompleteReadError:
            return start, False


class AgentListener:
    """Accepts sessions of this user's processes over a socket in the agent's directory.

    Parameters
    ----------
    directory : Path
    on_request : callable
    sessions : dict of str to Session
        The open sessions, by the id that their client chose.
    clock : callable
        The clock of new sessions. Default `time.monotonic`.
    """

    def __init__(
        self,
        directory: Path,
        on_request: OnRequest,
        sessions: dict[str, Session],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = directory / SOCKET
        self._on_request = on_request
        self._sessions = sessions
        self._clock = clock
        self.server: asyncio.Server | None = None

    async def open(self) -> None:
        """Start listening, unless it listens already."""
        if self.server is None:
            listener = unix_socket.listen(self._path, 16)
            self.server = await asyncio.start_unix_server(
                self._serve, sock=listener, limit=agent_protocol.LARGEST
            )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not unix_socket.is_this_user(writer.get_extra_info("socket")):
                return
            line = await asyncio.wait_for(reader.readline(), _HELLO_SECONDS)
            frame = agent_protocol.decode(line)
            if frame is None or frame.body.get("method") != "open_session":
                return
            arguments = frame.body["arguments"]
            session = self._sessions.get(arguments["session"])
            last_seq = arguments["last_seq"]
            if session is None:
                last_request = int(arguments.get("last_request", 0))
                grace = check_seconds("grace", arguments["grace"], 0)
                session = Session(grace, self._clock, last_request)
                self._sessions[arguments["session"]] = session
            await session.serve(reader, writer, self._on_request, last_seq)
        except (OSError, asyncio.TimeoutError, LookupError, TypeError, ValueError, OverflowError):
            pass  # drop connections that violate the protocol
        finally:
            writer.close()


def _hello(full: bool) -> bytes:
    body = {
        "event": "hello",
        "version": agent_protocol.VERSION,
        "package": VERSION,
        "pid": os.getpid(),
        "full": full,
    }
    return agent_protocol.encode(body)


async def own_pipes(
    loop: asyncio.AbstractEventLoop,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return reader and writer for the process's standard input and output.

    Later output of ``print`` goes to the standard error instead.
    """
    reader = asyncio.StreamReader(limit=agent_protocol.LARGEST)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    # A duplicate, because closing a writer on `sys.stdout` would not close descriptor 1.
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    transport, flow = await loop.connect_write_pipe(asyncio_pipes.flow_control, sink)
    return reader, asyncio.StreamWriter(transport, flow, None, loop)
