"""Connection of a node to the driver.

Background threads maintain it, so that `DriverConnection.send` never blocks.
"""

from __future__ import annotations

import collections
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook.net import secure_channel

#: Interval in seconds between heartbeats to the driver.
HEARTBEAT_SECONDS = 1.0
#: Interval in seconds between connection attempts.
_RECONNECT_SECONDS = 0.5
#: Seconds without an acknowledgement after which a channel is replaced. If the network drops all
#: packets, TCP would detect the loss much later.
_ACKNOWLEDGE_SECONDS = 5.0
#: Maximum characters of the log that wait for the driver, and that one message contains.
MAX_LOG_CHARS = 1 << 15


class DriverConnection:
    """An ordered stream of messages to the driver, and of orders from it.

    The driver acknowledges every message. A message without an acknowledgement is sent again on
    the next channel.

    Parameters
    ----------
    driver : str
        Address of the driver.
    secret : bytes
    hello : callable
        Returns the first message of every channel.
    fields : callable
        Returns fields that every message contains.
    on_order : callable
        Called with each order.
    """

    def __init__(
        self,
        driver: str,
        secret: bytes,
        hello: Callable[[], Mapping[str, Any]],
        fields: Callable[[], Mapping[str, Any]],
        on_order: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._driver, self._secret = driver, secret
        self._hello, self._fields, self._on_order = hello, fields, on_order
        self._changed = threading.Condition()
        self._messages: collections.deque[Mapping[str, Any]] = collections.deque()
        self._next_number = 0
        #: The first message as it was sent, until the driver acknowledges it.
        self._unacknowledged: Mapping[str, Any] | None = None
        #: Channel and time of its last transmission.
        self._sent_on: secure_channel.AuthenticatedChannel | None = None
        self._sent_at = 0.0
        self._log: collections.deque[str] = collections.deque()
        self._log_size = 0
        self._channel: secure_channel.AuthenticatedChannel | None = None
        self._closed = False
        self._last_received = time.monotonic()
        for work in (self._receive_loop, self._send_loop):
            threading.Thread(target=work, name="tfd-driver-link", daemon=True).start()

    @property
    def silence_s(self) -> float:
        """Seconds since the last message from the driver."""
        return time.monotonic() - self._last_received

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message; return at once."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def send_heartbeat(self) -> None:
        """Queue a heartbeat, unless other messages wait."""
        with self._changed:
            if not self._messages:
                self._messages.append({"type": "heartbeat"})
                self._changed.notify_all()
            overdue = (
                self._unacknowledged is not None
                and time.monotonic() - self._sent_at > _ACKNOWLEDGE_SECONDS
            )
            channel = self._sent_on if overdue else None
        if channel is not None:
            channel.close()

    def log(self, text: str) -> None:
        """Add `text` to the log of the next message; of a long log, keep the end."""
        with self._changed:
            self._log.append(text)
            self._log_size += len(text)
            while self._log_size > MAX_LOG_CHARS and len(self._log) > 1:
                self._log_size -= len(self._log.popleft())

    def close(self, timeout: float) -> None:
        """Close the connection when all messages are acknowledged, or after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._messages, timeout)
            self._closed = True
            self._changed.notify_all()
            channel = self._channel
        if channel is not None:
            channel.close()

    def _receive_loop(self) -> None:
        while not self._closed:
            try:
                with secure_channel.connect(self._driver, self._secret) as channel:
                    channel.send(dict(self._hello()))
                    with self._changed:
                        self._channel = channel
                        self._changed.notify_all()
                    while True:
                        order, _ = channel.receive()
                        self._last_received = time.monotonic()
                        if order.get("order") == "acknowledge":
                            self._acknowledge(order["seq"])
                        else:
                            self._on_order(order)
            except (OSError, EOFError):
                with self._changed:
                    self._channel = None
                    self._changed.wait_for(lambda: self._closed, _RECONNECT_SECONDS)

    def _acknowledge(self, number: int) -> None:
        with self._changed:
            if self._unacknowledged is not None and self._unacknowledged["seq"] == number:
                self._unacknowledged = None
                self._messages.popleft()
                self._changed.notify_all()

    def _send_loop(self) -> None:
        def can_send() -> bool:
            unsent = (
                self._channel is not self._sent_on
                if self._unacknowledged is not None
                else bool(self._messages)
            )
            return self._closed or (unsent and self._channel is not None)

        while True:
            with self._changed:
                self._changed.wait_for(can_send)
                if self._closed or self._channel is None:
                    return
                channel, message = self._channel, self._unacknowledged
                if message is None:
                    message = {
                        **self._messages[0],
                        "seq": self._next_number,
                        "log": self._take_log(),
                    }
                    self._next_number += 1
                    self._unacknowledged = message
                self._sent_on, self._sent_at = channel, time.monotonic()
            try:
                channel.send({**message, **self._fields()})
            except OSError:
                channel.close()  # `_receive_loop` opens another one
            except Exception:  # a message that is too large or not JSON would fail again
                traceback.print_exc()
                self._acknowledge(message["seq"])

    def _take_log(self) -> str:
        log = "".join(self._log)[-MAX_LOG_CHARS:]
        self._log.clear()
        self._log_size = 0
        return log
