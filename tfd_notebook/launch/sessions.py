"""An agent's end of those who ask it things: one session each, over one connection or several.

A session over the agent's own pipes ends with them. One over the agent's socket may lose its
connection and come back with a new one within its grace time: what was sent meanwhile is sent
again, and a request that arrived before is not done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tfd_notebook.launch import protocol, unixsocket
from tfd_notebook.version import VERSION

SOCKET = "agent.sock"
_MOST_LINE = 2**28
#: Frames that a session may miss before it has to ask for everything anew.
_KEPT_FRAMES = 5_000
#: Bytes that may wait for a slow reader before measurements are left out.
_BACKLOG_BYTES = 1_000_000
_HELLO_SECONDS = 30.0

#: Takes a session and the body of a request that it made.
OnRequest = Callable[["Session", dict[str, Any]], Awaitable[None]]


class Session:
    """Somebody who makes requests and hears of clusters.

    Attributes
    ----------
    grace : float
        Seconds without a connection after which the session ends.
    hears : set of str
        The clusters whose events it gets.
    """

    def __init__(self, host: str, agent: str, grace: float) -> None:
        self.grace = grace
        self.hears: set[str] = set()
        self.away_since: float | None = None
        self._heard = time.monotonic()
        self._from = host, agent
        self._seq = 0
        self._last_request = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_KEPT_FRAMES)
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has been without a connection for its whole grace time."""
        away = self.away_since
        return away is not None and time.monotonic() - away >= self.grace

    def drop_silent(self, seconds: float) -> None:
        """Count a connection as lost over which nothing came for so long, not even a ping."""
        if self._writer is not None and self.grace and time.monotonic() - self._heard > seconds:
            self._writer.transport.abort()

    def send(self, body: dict[str, Any]) -> None:
        """Send a reply or an event; a measurement that nobody fetches is dropped."""
        measure = body.get("event") == "measure"
        writer = self._writer
        if measure and (
            writer is None or writer.transport.get_write_buffer_size() > _BACKLOG_BYTES
        ):
            return
        # What is never sent again has no number.
        self._seq += not measure
        seq = 0 if measure else self._seq
        frame = protocol.encode(protocol.Frame(*self._from, seq, body))
        if self.grace and not measure:
            self._kept.append((seq, frame))
        if writer is not None:
            writer.write(frame)

    async def serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_request: OnRequest,
        since: int = 0,
    ) -> None:
        """Serve a connection until it ends, or the session gets another one.

        Parameters
        ----------
        since : int
            Number of the last frame that arrived over the connection before.
        """
        if self._writer is not None:
            self._writer.close()
        self._writer, self.away_since = writer, None
        self._heard = time.monotonic()
        whole = since == self._seq or any(seq == since + 1 for seq, _ in self._kept)
        writer.write(_hello(*self._from, whole))
        for seq, frame in self._kept:
            if seq > since:
                writer.write(frame)
        pending: set[asyncio.Future[None]] = set()
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                self._heard = time.monotonic()
                frame_in = protocol.decode(line)
                if frame_in is not None and frame_in.body.get("do") == "bye":
                    # Whoever said so waits until this end is closed: then it has arrived.
                    self.grace = 0.0
                    break
                if frame_in is None or frame_in.body["id"] <= self._last_request:
                    continue
                self._last_request = frame_in.body["id"]
                answering = asyncio.ensure_future(on_request(self, frame_in.body))
                pending.add(answering)
                answering.add_done_callback(pending.discard)
        if self._writer is writer:
            self._writer, self.away_since = None, time.monotonic()


class Door:
    """Lets this user's processes open sessions over a socket in the agent's directory.

    Parameters
    ----------
    directory : Path
    host, agent : str
        Put into each frame.
    on_request : callable
    sessions : dict of str to Session
        Those that are open, by the id that they chose.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        agent: str,
        on_request: OnRequest,
        sessions: dict[str, Session],
    ) -> None:
        self._path = directory / SOCKET
        self._from = host, agent
        self._on_request = on_request
        self._sessions = sessions
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen; does nothing where it listens already."""
        if self._server is None:
            listener = unixsocket.listen(self._path, 16)
            self._server = await asyncio.start_unix_server(
                self._serve, sock=listener, limit=_MOST_LINE
            )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not unixsocket.is_this_user(writer.get_extra_info("socket")):
                return
            line = await asyncio.wait_for(reader.readline(), _HELLO_SECONDS)
            frame = protocol.decode(line)
            if frame is None or frame.body.get("do") != "hello":
                return
            asked = frame.body["arguments"]
            session = self._sessions.get(asked["session"])
            since = asked["since"]
            if session is None:
                session = Session(*self._from, float(asked["grace"]))
                self._sessions[asked["session"]] = session
            await session.serve(reader, writer, self._on_request, since)
        except (OSError, asyncio.TimeoutError, KeyError, TypeError, ValueError):
            pass  # who does not speak as agreed is not answered
        finally:
            writer.close()


def _hello(host: str, agent: str, whole: bool) -> bytes:
    body = {
        "event": "hello",
        "version": protocol.VERSION,
        "package": VERSION,
        "pid": os.getpid(),
        "whole": whole,
    }
    return protocol.encode(protocol.Frame(host, agent, 0, body))


async def own_pipes(
    loop: asyncio.AbstractEventLoop,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return reader and writer for the process's standard input and output.

    What is printed from then on goes to the standard error instead.
    """
    reader = asyncio.StreamReader(limit=_MOST_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    # A descriptor that closing really closes.
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    transport, flow = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sink)
    return reader, asyncio.StreamWriter(transport, flow, None, loop)
