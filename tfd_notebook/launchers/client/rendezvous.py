"""Rendezvous with agents on hosts that connect to this process, as workers of engines do."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import AgentLost, LaunchError
from tfd_notebook.launchers.client.handshake import read_handshake
from tfd_notebook.launchers.client.lines import LineBuffer
from tfd_notebook.launchers.client.session import Channel
from tfd_notebook.launchers.remote import RemoteHost
from tfd_notebook.model.spec import Endpoint
from tfd_notebook.net import reconnect, secure_channel, validation

log = logging.getLogger("tfd_notebook")

_ANSWER_SECONDS = 30.0
_START_SECONDS = 45.0
_CONNECT_SECONDS = 10.0
_POLL_SECONDS = 0.5
#: Bytes of a message to an agent, which must arrive within `reconnect.SILENT_SECONDS`.
_CHUNK_BYTES = 1 << 16


class Rendezvous:
    """Listener for the processes on other hosts, which assigns their connections to hosts.

    Parameters
    ----------
    address : str
        Address to listen on.

    Raises
    ------
    LaunchError
    """

    def __init__(self, address: str) -> None:
        self.secret = secure_channel.Secret.new()
        self._bound = address
        self._changed = threading.Condition()
        self._hosts: dict[tuple[str, int], RendezvousHost] | None = None
        self._open = 0
        self.closed = False
        #: Called when the rendezvous is closed.
        self.on_close: Callable[[], None] = lambda: None
        try:
            self._server = secure_channel.serve(self.secret, self._accept, host=address.strip("[]"))
        except OSError as error:
            raise LaunchError(
                f"listening on {address} for the hosts failed: {error}",
                fix="pass address= with an address of this host that they reach",
            ) from None
        self.port = int(self._server.address.rpartition(":")[2])
        #: The address (``"host:port"``) that the processes on other hosts must reach.
        self.address = f"{address}:{self.port}"

    def arguments(self, grace: float, advertised: str = "") -> dict[str, Any]:
        """Return the arguments of a bridge, which connects to `advertised` if it is set."""
        address = Endpoint((advertised or self._bound).strip("[]"), self.port)
        return {"address": str(address), "secret": self.secret.hex(), "grace": grace}

    def expect(self, hosts: Mapping[tuple[str, int], RendezvousHost]) -> None:
        """Accept connections for these hosts, by the key of the process; end all others."""
        with self._changed:
            self._hosts, self._open = dict(hosts), len(hosts)
            self._changed.notify_all()

    def expect_more(self, hosts: Mapping[tuple[str, int], RendezvousHost]) -> None:
        """Accept connections for further hosts, while others are open."""
        with self._changed:
            self._hosts = {**(self._hosts or {}), **hosts}
            self._open += len(hosts)

    def release(self) -> None:
        """Release a host that needs no more connections; the last one closes the listener."""
        with self._changed:
            self._open -= 1
            last = self._open == 0
        if last:
            self.close()

    def close(self) -> None:
        """Close the listener; waiting connections end."""
        with self._changed:
            closed, self.closed = self.closed, True
            self._hosts = self._hosts or {}
            self._changed.notify_all()
        if not closed:
            self._server.close()
            self.on_close()

    def _accept(self, channel: secure_channel.AuthenticatedChannel) -> None:
        header, _ = channel.receive(_CONNECT_SECONDS)
        with self._changed:
            # The connection may arrive before the start of its process has ended.
            self._changed.wait_for(lambda: self._hosts is not None, _START_SECONDS)
            hosts = self._hosts or {}
        process = validation.integer()(header.get("process", 0), "process")
        host = hosts.get((str(header.get("host")), process))
        if host is None or not host.offer(channel, header):
            channel.send({"close": True})


class RendezvousHost(RemoteHost):
    """A host whose process connects to this one.

    Parameters
    ----------
    label : str
    rendezvous : Rendezvous
    """

    def __init__(self, label: str, rendezvous: Rendezvous) -> None:
        super().__init__(label)
        self._rendezvous = rendezvous
        self._changed = threading.Condition()
        #: The channel for the next session, the one that `offer` reads, and that of `connect`.
        self._idle: secure_channel.AuthenticatedChannel | None = None
        self._read: secure_channel.AuthenticatedChannel | None = None
        self._connecting: secure_channel.AuthenticatedChannel | None = None
        self._loss_reason = ""
        self._closed = False
        #: Address and key of the first connection. Other hosts have the secret, too.
        self._origin: tuple[str, str] | None = None

    def offer(
        self, channel: secure_channel.AuthenticatedChannel, header: Mapping[str, Any]
    ) -> bool:
        """Offer a connection to the next session, and return when that session has ended.

        Parameters
        ----------
        channel : AuthenticatedChannel
        header : mapping
            The first message of the process, unchecked.

        Returns
        -------
        bool
            True if the process must connect again.
        """
        origin = channel.ends[0], str(header.get("token", ""))
        with self._changed:
            if self._closed:
                return False
            self._origin = self._origin or origin
            if origin != self._origin:
                log.warning(
                    "a connection from %s in the place of %s was closed", origin[0], self.label
                )
                return True
            if self._idle is not None:  # the process gave this connection up
                self._idle.close()
            self._idle = channel
            self._changed.notify_all()
        next_heartbeat = time.monotonic() + reconnect.HEARTBEAT_SECONDS
        try:
            while not channel.closed:
                if time.monotonic() > next_heartbeat:
                    channel.send({})
                    next_heartbeat = time.monotonic() + reconnect.HEARTBEAT_SECONDS
                with self._changed:
                    if self._idle is channel and channel.has_data:  # no session reads it
                        self._read = channel
                if self._read is channel:
                    # Without the lock: the host may send slowly.
                    self._read_end(channel.receive(_CONNECT_SECONDS)[0])
                    self._end_read(channel)
                with self._changed:
                    if not self._loss_reason and not self._closed:
                        self._changed.wait(_POLL_SECONDS)
                if self._loss_reason:
                    # The process ends its agent after this, which would report another reason.
                    if hasattr(self, "session"):
                        self.session.client.lost(self.loss(self._loss_reason).what)
                    break
        except (OSError, EOFError):
            pass  # the connection broke
        finally:
            with self._changed:
                if self._idle is channel:
                    self._idle = None
            self._end_read(channel)
        return not self._closed

    def _end_read(self, channel: secure_channel.AuthenticatedChannel) -> None:
        with self._changed:
            if self._read is channel:
                self._read = None
                self._changed.notify_all()

    @property
    def _free(self) -> secure_channel.AuthenticatedChannel | None:
        return None if self._idle is self._read else self._idle

    def connect(self, agent: str, start: bool) -> Channel:
        with self._changed:
            self._changed.wait_for(
                lambda: self._free or self._loss_reason or self._closed, _CONNECT_SECONDS
            )
            if self._loss_reason:
                raise self.loss(self._loss_reason)
            if (channel := self._free) is not None:
                self._idle, self._connecting = None, channel
        if channel is None:
            raise OSError(
                f"its process did not connect to {self.kernel_address} "
                f"within {_CONNECT_SECONDS:g} s"
            )
        try:
            self.peer_address, self.own_address = channel.ends
            channel.send({"agent": agent, "mode": "start" if start else "reconnect"})
            header, _ = channel.receive(_ANSWER_SECONDS if start else _CONNECT_SECONDS)
            self._read_end(header)
            if self._loss_reason:
                raise self.loss(self._loss_reason)
            line = stdio.HANDSHAKE + json.dumps(header.get("handshake"))
            self.handshake = read_handshake(self.label, iter([line.encode()]), reconnect=not start)
        except EOFError as error:
            channel.close()
            raise OSError(str(error)) from None
        except BaseException:
            channel.close()
            raise
        finally:
            self._connecting = None
        return LineChannel(channel)

    def _read_end(self, header: Mapping[str, Any]) -> None:
        """Store why the process ends, if it reports that."""
        self._loss_reason = validation.short_text(header.get("ended", ""), "ended")

    @property
    def unreached_fix(self) -> str:
        return (
            f"check that the host is up, and that it reaches {self.kernel_address} (TCP); address= "
            "selects another address of this host"
        )

    @property
    def kernel_address(self) -> str:
        """The address (``"host:port"``) of this process that the host must reach."""
        return self._rendezvous.address

    def loss(self, reason: str) -> AgentLost:
        """Return the error after the process has reported why it ends."""
        return AgentLost(f"{self.label}: {reason}", fix="start the cluster again")

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            idle, self._idle = self._idle, None
            connecting = self._connecting
        if connecting is not None:
            connecting.close()  # `connect` ends
        if idle is not None:
            with contextlib.suppress(OSError):
                idle.send({"close": True})
            idle.close()
        self._rendezvous.release()


class LineChannel:
    """A channel of lines over an authenticated channel."""

    def __init__(self, channel: secure_channel.AuthenticatedChannel) -> None:
        self._channel = channel
        self._sending = threading.Lock()

    def send(self, data: bytes) -> None:
        with self._sending:  # no other line may arrive in between
            for start in range(0, len(data), _CHUNK_BYTES):
                self._channel.send({}, data[start : start + _CHUNK_BYTES])

    def lines(self) -> Iterator[bytes]:
        buffer = LineBuffer()
        while True:
            try:
                _, body = self._channel.receive(reconnect.SILENT_SECONDS)
            except (OSError, EOFError):
                return
            yield from buffer.feed(bytes(body))

    def close(self) -> None:
        self._channel.close()
