"""A node's line to the driver: threads of its own keep it up, so that nobody waits who speaks."""

from __future__ import annotations

import collections
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook.net import secure_channel

#: Seconds between two reports to the driver.
BEAT_SECONDS = 1.0
#: Seconds between two attempts to reach it.
_AGAIN_SECONDS = 0.5
#: Seconds without an answer after which a channel is given up for a new one: where the network was
#: cut without a word, it would take far longer to find out.
_DEAF_SECONDS = 5.0
#: Characters of the log that wait for the driver, and that one report carries.
MOST_LOG = 1 << 15


class DriverConnection:
    """What a node says to the driver, in order, and what it hears from there.

    The driver tells which word it has heard; one that it may not have got is said again on the
    next channel.

    Parameters
    ----------
    driver : str
        Where it listens.
    secret : bytes
    greeting : callable
        Returns what is said first on every channel.
    known : callable
        Returns what every word carries.
    heard : callable
        Takes each order.
    """

    def __init__(
        self,
        driver: str,
        secret: bytes,
        greeting: Callable[[], Mapping[str, Any]],
        known: Callable[[], Mapping[str, Any]],
        heard: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._driver, self._secret = driver, secret
        self._greeting, self._known, self._heard = greeting, known, heard
        self._changed = threading.Condition()
        self._words: collections.deque[Mapping[str, Any]] = collections.deque()
        self._number = 0
        #: The first of the words as it was said, until the driver has heard it.
        self._unheard: Mapping[str, Any] | None = None
        self._said_at = 0.0
        self._log: collections.deque[str] = collections.deque()
        self._log_size = 0
        self._channel: secure_channel.AuthenticatedChannel | None = None
        self._closed = False
        self._last = time.monotonic()
        for work in (self._listen, self._speak):
            threading.Thread(target=work, name="tfd-line", daemon=True).start()

    @property
    def silent(self) -> float:
        """Seconds since the driver was heard of."""
        return time.monotonic() - self._last

    def say(self, word: Mapping[str, Any]) -> None:
        """Have something said; returns at once."""
        with self._changed:
            self._words.append(word)
            self._changed.notify_all()

    def beat(self) -> None:
        """Have a sign of life given, where nothing else waits to be said."""
        with self._changed:
            if not self._words:
                self._words.append({"say": "beat"})
                self._changed.notify_all()
            deaf = self._unheard is not None and time.monotonic() - self._said_at > _DEAF_SECONDS
            channel = self._channel if deaf else None
        if channel is not None:
            channel.close()

    def log(self, text: str) -> None:
        """Have `text` told with the next word; of too much the end."""
        with self._changed:
            self._log.append(text)
            self._log_size += len(text)
            while self._log_size > MOST_LOG and len(self._log) > 1:
                self._log_size -= len(self._log.popleft())

    def close(self, timeout: float) -> None:
        """Let go of it when all was said, or after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._words, timeout)
            self._closed = True
            self._changed.notify_all()
            channel = self._channel
        if channel is not None:
            channel.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                with secure_channel.connect(self._driver, self._secret) as channel:
                    channel.send(dict(self._greeting()))
                    with self._changed:
                        self._channel = channel
                        self._changed.notify_all()
                    while True:
                        order, _ = channel.receive()
                        self._last = time.monotonic()
                        if order.get("order") == "heard":
                            self._has_heard(order["word"])
                        else:
                            self._heard(order)
            except (OSError, EOFError):
                with self._changed:
                    self._channel = None
                    self._changed.wait_for(lambda: self._closed, _AGAIN_SECONDS)

    def _has_heard(self, number: int) -> None:
        with self._changed:
            if self._unheard is not None and self._unheard["word"] == number:
                self._unheard = None
                self._words.popleft()
                self._changed.notify_all()

    def _speak(self) -> None:
        used: secure_channel.AuthenticatedChannel | None = None  # by what is not heard yet

        def may_speak() -> bool:
            fresh = self._channel is not used if self._unheard is not None else bool(self._words)
            return self._closed or (fresh and self._channel is not None)

        while True:
            with self._changed:
                self._changed.wait_for(may_speak)
                if self._closed or self._channel is None:
                    return
                used, said = self._channel, self._unheard
                if said is None:
                    said = {**self._words[0], "word": self._number, "log": self._take_log()}
                    self._number += 1
                    self._unheard = said
                self._said_at = time.monotonic()
            try:
                used.send({**said, **self._known()})
            except OSError:
                used.close()  # whoever listens there makes another one
            except Exception:  # a message that is too large or not JSON would fail again
                traceback.print_exc()
                self._has_heard(said["word"])

    def _take_log(self) -> str:
        log = "".join(self._log)[-MOST_LOG:]
        self._log.clear()
        self._log_size = 0
        return log
