"""The kernel's end of an agent that it reaches over a channel which may break and come back."""

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
from tfd_notebook.net import agent_protocol, unix_socket, validation
from tfd_notebook.net.bounded_write import write_all

_CONNECT_SECONDS = 10.0
_PING_SECONDS = 5.0
#: For how long a farewell may be on its way, over a network that may be broken.
_BYE_SECONDS = 2.0
_PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0)


class Channel(Protocol):
    """A way to an agent: lines come, bytes go."""

    def send(self, data: bytes) -> None:
        """Send all of `data`, from any thread, or raise OSError. It blocks for a limited time."""

    def lines(self) -> Iterator[bytes]:
        """Yield what arrives, until the channel ends."""

    def close(self) -> None:
        """End it; whoever waits for lines gets no more."""


class SocketChannel:
    """A channel over a socket of this host.

    Parameters
    ----------
    connected : socket.socket
        It becomes the channel's.
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
        return cls(unix_socket.connect(path, _CONNECT_SECONDS))

    def send(self, data: bytes) -> None:
        with self._sending:
            write_all(self._socket.fileno(), self._write, data)

    def _write(self, rest: memoryview) -> int:
        # The socket itself stays blocking, as its reader needs it.
        return self._socket.send(rest, socket.MSG_DONTWAIT)

    def lines(self) -> Iterator[bytes]:
        while True:
            with self._reading:
                try:
                    line = self._file.readline(validation.MAX_MESSAGE_BYTES + 1)
                except (OSError, ValueError):  # it is closed
                    return
            if not line:
                return
            validation.check_size(len(line))
            yield line

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # Whoever waits for a line has got the end now.
        with self._reading:
            self._file.close()
        self._socket.close()


class AgentSession:
    """A session with an agent that lasts longer than its channels.

    Parameters
    ----------
    agent : str
        Id of the agent.
    host : str
        Name or address of its host, as its peers use it.
    connect : callable
        Returns a fresh channel; raises OSError where the host cannot be reached now, and a TfdError
        where it never will be.
    grace : float
        Seconds for which the agent waits for this session to come back. Default 600.

    Attributes
    ----------
    client : AgentClient
    """

    def __init__(
        self, agent: str, host: str, connect: Callable[[], Channel], grace: float = 600.0
    ) -> None:
        self._host = host
        self._connect = connect
        self._grace = grace
        self._session = uuid.uuid4().hex
        self._channel: Channel | None = None
        self._closed = threading.Event()
        self._pid = os.getpid()
        self.client = AgentClient(agent, host, self._not_yet, comes_back=True)
        # The first one in the caller's thread, whose error it is.
        channel = self._greeted()
        self._thread = threading.Thread(
            target=self._serve, args=(channel,), name=f"tfd-link-{agent}", daemon=True
        )
        self._thread.start()
        threading.Thread(target=self._ping, name=f"tfd-ping-{agent}", daemon=True).start()
        if not self.client.ready.wait(_CONNECT_SECONDS):
            self.close()
            # Not an AgentLost: it may be slow, or asleep, and all that it looks after is there.
            raise LaunchError(
                f"the agent on {host} did not answer within {_CONNECT_SECONDS:g} s",
                fix="the host may be overloaded or asleep: try again",
            )
        if self.client.why_lost:
            self.close()
            raise LaunchError(self.client.why_lost)

    def close(self) -> None:
        """End the session: the agent need not wait for it."""
        if os.getpid() != self._pid:
            return  # in a forked child: the session belongs to the parent
        self._closed.set()
        elsewhere = self._thread is not threading.current_thread()
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(self._line("bye"))
                if elsewhere:
                    self._thread.join(_BYE_SECONDS)
            self._channel.close()
        if elsewhere:
            self._thread.join(5.0)
        self.client.lost("this process has left it")

    def _ping(self) -> None:
        """Show the agent that this process lives, which a broken network might hide."""
        while not self._closed.wait(_PING_SECONDS) and self.client.alive:
            with contextlib.suppress(OSError):
                if self._channel is not None:
                    # Acknowledge, so that the agent drops the frames that have arrived.
                    self._send_over(self._channel, self._line("ping", {"seq": self.client.seq}))

    def _line(self, do: str, arguments: dict[str, Any] | None = None) -> bytes:
        """Return a word of the session itself, which is never answered."""
        body = {"id": 0, "do": do, "arguments": arguments or {}}
        return agent_protocol.encode(agent_protocol.Frame(self._host, self.client.id, 0, body))

    def _not_yet(self, data: bytes) -> None:
        raise OSError("not connected")

    @staticmethod
    def _send_over(channel: Channel, data: bytes) -> None:
        """Send; close a channel on which a frame was cut short, also by Ctrl-C: it is replaced."""
        try:
            channel.send(data)
        except BaseException:
            channel.close()
            raise

    def _greeted(self) -> Channel:
        channel = self._connect()
        asked = {"session": self._session, "since": self.client.seq, "grace": self._grace}
        try:
            channel.send(self._line("hello", asked))
            self._channel = channel
            self.client.resume(functools.partial(self._send_over, channel))
        except BaseException:
            channel.close()
            raise
        return channel

    def _serve(self, channel: Channel) -> None:
        try:
            self._carry(channel)
        except BaseException as error:  # nobody would hear of anything any more
            self.client.lost(f"{self._host}: {type(error).__name__}: {error}")
            raise

    def _carry(self, channel: Channel) -> None:
        while True:
            try:
                for line in channel.lines():
                    self.client.handle_line(line)
                    if not self.client.alive:
                        break
            except InvalidMessage as error:
                self.client.refuse(error)
            if not self.client.alive:
                with contextlib.suppress(OSError):
                    channel.send(self._line("bye"))
            channel.close()
            if self._closed.is_set() or not self.client.alive:
                return
            again = self._come_back()
            if again is None:
                return
            channel = again

    def _come_back(self) -> Channel | None:
        """Return the next channel; None when the agent is lost for good."""
        since = time.monotonic()
        self.client.tell_all({"event": "away", "host": self._host, "grace": self._grace})
        for attempt in range(10**9):
            if self._closed.wait(_PAUSES[min(attempt, len(_PAUSES) - 1)]):
                return None
            try:
                channel = self._greeted()
            except TfdError as error:
                self.client.lost(error.what)
                return None
            except OSError as error:
                away = time.monotonic() - since
                if away > self._grace:
                    self.client.lost(
                        f"{self._host} could not be reached for {self._grace:g} s ({error}): its "
                        "tasks have ended, or end by themselves"
                    )
                    return None
            else:
                if self._closed.is_set():  # meanwhile, and over the channel before
                    with contextlib.suppress(OSError):
                        channel.send(self._line("bye"))
                    channel.close()
                    return None
                seconds = time.monotonic() - since
                self.client.tell_all({"event": "back", "host": self._host, "seconds": seconds})
                return channel
        return None
