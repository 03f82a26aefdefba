"""Connection of a node to the driver.

Background threads maintain it, so that `DriverConnection.update` never blocks.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook.net import secure_channel
from tfd_notebook.net.reconnect import reconnect

#: Interval in seconds between messages to the driver if nothing changes.
HEARTBEAT_SECONDS = 1.0
#: Interval in seconds between connection attempts.
_RECONNECT_SECONDS = 0.5
#: Seconds without an acknowledgement after which a channel is replaced. If the network drops all
#: packets, TCP would detect the loss much later.
_ACKNOWLEDGE_SECONDS = 5.0
#: Maximum characters of the log that wait for the driver, and that one message contains.
MAX_LOG_CHARS = 1 << 15


class DriverConnection:
    """A stream of updates to the driver, and of orders from it.

    Each update has the whole state of the node, so that a later one replaces it. It also has a
    part of the log. The driver acknowledges every update. Without an acknowledgement, the same part
    is sent again on the next channel.

    Parameters
    ----------
    driver : str
        Address of the driver.
    secret : bytes
    state : callable
        Returns the fields of an update.
    on_order : callable
        Called with each order.
    """

    def __init__(
        self,
        driver: str,
        secret: bytes,
        state: Callable[[], Mapping[str, Any]],
        on_order: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._driver, self._secret = driver, secret
        self._state, self._on_order = state, on_order
        self._changed = threading.Condition()
        #: True if the state has changed since the last update was composed.
        self._state_changed = True
        self._next_number = 0
        #: Number and log of the last update, until the driver acknowledges it.
        self._unacknowledged: Mapping[str, Any] | None = None
        #: Channel and time of its last transmission.
        self._sent_on: secure_channel.AuthenticatedChannel | None = None
        self._sent_at = 0.0
        self._log: collections.deque[str] = collections.deque()
        self._log_size = 0
        self._channel: secure_channel.AuthenticatedChannel | None = None
        self._closed = threading.Event()
        self._last_received = time.monotonic()
        for work in (self._receive_loop, self._send_loop):
            threading.Thread(target=work, name="tfd-driver-link", daemon=True).start()

    @property
    def silence_s(self) -> float:
        """Seconds since the last message from the driver."""
        return time.monotonic() - self._last_received

    def update(self) -> None:
        """Send the state soon; return at once."""
        with self._changed:
            self._state_changed = True
            self._changed.notify_all()

    def log(self, text: str) -> None:
        """Add `text` to the log of the next update; of a long log, keep the end."""
        with self._changed:
            self._log.append(text)
            self._log_size += len(text)
            while self._log_size > MAX_LOG_CHARS and len(self._log) > 1:
                self._log_size -= len(self._log.popleft())

    def close(self, timeout: float) -> None:
        """Close the connection when the state is acknowledged, or after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._state_changed and self._unacknowledged is None, timeout
            )
            self._closed.set()
            self._changed.notify_all()
            channel = self._channel
        if channel is not None:
            channel.close()

    def _receive_loop(self) -> None:
        connect = functools.partial(secure_channel.connect, self._driver, self._secret)
        pause = 0.0
        while channel := reconnect(
            connect, self._closed, first_delay=pause, max_delay=_RECONNECT_SECONDS
        ):
            pause = _RECONNECT_SECONDS
            with contextlib.suppress(OSError, EOFError), channel:
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
            with self._changed:
                self._channel = None

    def _acknowledge(self, number: int) -> None:
        with self._changed:
            if self._unacknowledged is not None and self._unacknowledged["seq"] == number:
                self._unacknowledged = None
                self._changed.notify_all()

    def _must_send(self) -> bool:
        if self._unacknowledged is None:
            has_message = self._state_changed
        else:
            has_message = self._channel is not self._sent_on
        return self._closed.is_set() or (has_message and self._channel is not None)

    def _send_loop(self) -> None:
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(self._must_send, HEARTBEAT_SECONDS)
                channel, message = self._channel, self._unacknowledged
                if self._closed.is_set() or channel is None:
                    continue
                awaits_acknowledgement = message is not None and channel is self._sent_on
                overdue = time.monotonic() - self._sent_at > _ACKNOWLEDGE_SECONDS
                if message is None:
                    message = self._unacknowledged = self._compose()
                if not awaits_acknowledgement:
                    self._sent_on, self._sent_at = channel, time.monotonic()
            try:
                if not awaits_acknowledgement:
                    channel.send({"type": "update", **message, **self._state()})
                elif overdue:
                    channel.close()  # `_receive_loop` opens another one
            except OSError:
                channel.close()
            except Exception:  # a message that is too large or not JSON would fail again
                traceback.print_exc()
                self._acknowledge(message["seq"])

    def _compose(self) -> Mapping[str, Any]:
        """Return number and log of a new update."""
        log = "".join(self._log)[-MAX_LOG_CHARS:]
        self._log.clear()
        self._log_size = 0
        self._state_changed = False
        self._next_number += 1
        return {"seq": self._next_number, "log": log}
