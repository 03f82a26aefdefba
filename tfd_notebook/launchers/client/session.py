"""Session with an agent over a channel that is replaced when it breaks."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from tfd_notebook.errors import InvalidMessage, LaunchError, TfdError
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.model.events import HostDisconnected, HostReconnected
from tfd_notebook.model.handle import Handle
from tfd_notebook.net import agent_protocol, ports, reconnect, unix_socket, validation
from tfd_notebook.net.bounded_write import write_all

CONNECT_SECONDS = 10.0
#: Seconds to wait for the agent's answer to "close_session" on a network that may be broken.
_CLOSE_TIMEOUT_SECONDS = 2.0


class Channel(Protocol):
    """A connection to an agent that receives lines and sends bytes."""

    def send(self, data: bytes) -> None:
        """Send all of `data`, from any thread, or raise OSError. It blocks for a limited time."""

    def lines(self) -> Iterator[bytes]:
        """Yield received lines until the channel ends."""

    def close(self) -> None:
        """Close the channel; `lines` ends."""


class SocketChannel(Handle):
    """A channel over a socket of this host.

    Parameters
    ----------
    connected : socket.socket
        The channel takes ownership of it.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(None)
        self._file = connected.makefile("rb")
        self._reading = threading.Lock()
        self._sending = threading.Lock()

    @classmethod
    def to(cls, path: Path) -> SocketChannel:
        """Return a channel to the socket of an agent on this host, or raise OSError."""
        return cls(unix_socket.connect(path, CONNECT_SECONDS))

    def send(self, data: bytes) -> None:
        with self._sending:
            write_all(self._socket.fileno(), self._write, data)

    def _write(self, rest: memoryview) -> int:
        # The socket itself stays blocking, as `makefile` requires.
        return self._socket.send(rest, socket.MSG_DONTWAIT)

    def lines(self) -> Iterator[bytes]:
        while True:
            with self._reading:
                try:
                    line = self._file.readline(validation.MAX_MESSAGE_BYTES + 1)
                except (OSError, ValueError):  # closed
                    return
            if not line:
                return
            validation.check_size(len(line))
            yield line

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # The shutdown has ended a `readline` in another thread.
        with self._reading:
            self._file.close()
        self._socket.close()


class AgentSession:
    """A session with an agent that outlasts its channels.

    Parameters
    ----------
    agent : str
        Id of the agent.
    host : str
        Name or address of its host, as its peers use it.
    connect : callable
        Returns a new channel. Raises OSError if the host cannot be reached now, and a TfdError if
        it can never be reached.
    grace : float
        Seconds that the agent waits for this session to reconnect. Default 600.
    clock : callable
        Returns the time in seconds. Default `time.monotonic`.

    Attributes
    ----------
    client : AgentClient
    """

    def __init__(
        self,
        agent: str,
        host: str,
        connect: Callable[[], Channel],
        grace: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._connect = connect
        self._grace = grace
        self._clock = clock
        self._session = uuid.uuid4().hex
        self._channel: Channel | None = None
        self._closed = threading.Event()
        self._pid = os.getpid()
        self.client = AgentClient(agent, host, self._not_connected, reconnects=True)
        # The first attempt runs in the caller's thread, which gets the error.
        channel = self._open_channel()
        self._thread = threading.Thread(
            target=self._serve, args=(channel,), name=f"tfd-session-{agent}", daemon=True
        )
        self._thread.start()
        reconnect.send_heartbeats(self._ping, self._closed)
        if not self.client.ready.wait(CONNECT_SECONDS):
            self.close()
            # Not AgentLost: the agent may be slow or suspended, and its tasks still exist.
            raise LaunchError(
                f"the agent on {host} did not answer within {CONNECT_SECONDS:g} s",
                fix="the host may be overloaded or suspended: try again",
            )
        if self.client.why_lost:
            self.close()
            raise LaunchError(self.client.why_lost)

    def close(self) -> None:
        """End the session, so that the agent does not wait for it."""
        if os.getpid() != self._pid:
            return  # in a forked child the session belongs to the parent
        self._closed.set()
        other_thread = self._thread is not threading.current_thread()
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(self._line("close_session"))
                if other_thread:
                    self._thread.join(_CLOSE_TIMEOUT_SECONDS)
            self._channel.close()
        if other_thread:
            self._thread.join(5.0)
        self.client.lost("this process closed the session")

    def _ping(self) -> None:
        """Send a heartbeat, so that the agent detects a broken network."""
        if self._channel is not None:
            # Acknowledge, so that the agent drops the frames that have arrived.
            self._send_over(self._channel, self._line("ping", {"seq": self.client.seq}))

    def _line(self, method: str, arguments: dict[str, Any] | None = None) -> bytes:
        """Return a message about the session itself, which has no reply."""
        return agent_protocol.encode({"id": 0, "method": method, "arguments": arguments or {}})

    def _not_connected(self, data: bytes) -> None:
        raise OSError("not connected")

    @staticmethod
    def _send_over(channel: Channel, data: bytes) -> None:
        """Send; close a channel with an incomplete frame, e.g. after Ctrl-C, so it is replaced."""
        try:
            channel.send(data)
        except BaseException:
            channel.close()
            raise

    def _open_channel(self) -> Channel:
        channel = self._connect()
        arguments = {
            "session": self._session,
            "last_seq": self.client.seq,
            "last_request": self.client.last_request,
            "grace": self._grace,
        }
        try:
            channel.send(self._line("open_session", arguments))
            self._channel = channel
            self.client.resume(functools.partial(self._send_over, channel))
        except BaseException:
            channel.close()
            raise
        return channel

    def _serve(self, channel: Channel) -> None:
        try:
            self._receive(channel)
        except BaseException as error:  # without this thread no message would be received
            self.client.lost(f"{self._host}: {type(error).__name__}: {error}")
            raise
        finally:
            self._closed.set()

    def _receive(self, channel: Channel | None) -> None:
        while channel is not None:
            try:
                for line in channel.lines():
                    self.client.handle_line(line)
                    if not self.client.alive:
                        break
            except InvalidMessage as error:
                self.client.refuse(error)
            if not self.client.alive:
                self._end(channel)
            channel.close()
            ended = self._closed.is_set() or not self.client.alive
            channel = None if ended else self._reconnect()

    def _end(self, channel: Channel) -> None:
        with contextlib.suppress(OSError):
            channel.send(self._line("close_session"))
        channel.close()

    def _reconnect(self) -> Channel | None:
        """Return the next channel; None if the agent is lost."""
        since = self._clock()
        self.client.notify_all(HostDisconnected(self._host, self._grace))
        try:
            channel = reconnect.reconnect(
                self._open_channel,
                self._closed,
                lambda: self._clock() - since <= self._grace,
            )
        except TfdError as error:
            self.client.lost(error.what)
        except OSError as error:
            self.client.lost(
                f"{self._host} could not be reached for {self._grace:g} s ({error}): its "
                "tasks have ended or are going to end"
            )
        else:
            if channel is not None and not self._closed.is_set():
                ports.detect_lost_peers()
                self.client.notify_all(HostReconnected(self._host, self._clock() - since))
                return channel
            if channel is not None:
                self._end(channel)  # `close` sent "close_session" over the previous channel
        return None
