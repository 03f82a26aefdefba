"""The phases of a cluster on Spark, and which of them may follow which."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum


class Phase(str, Enum):
    """What a cluster on Spark is doing; in their order."""

    RESERVING = "reserving"
    STARTING = "starting"
    RUNNING = "running"
    FEEDING = "feeding"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value

    @property
    def is_end(self) -> bool:
        """Whether nothing follows."""
        return not MOVES[self]


#: What may follow each phase.
MOVES: Mapping[Phase, frozenset[Phase]] = {
    Phase.RESERVING: frozenset({Phase.STARTING, Phase.DRAINING, Phase.FAILED}),
    Phase.STARTING: frozenset({Phase.RUNNING, Phase.DRAINING, Phase.FAILED}),
    Phase.RUNNING: frozenset({Phase.FEEDING, Phase.DRAINING, Phase.FAILED}),
    Phase.FEEDING: frozenset({Phase.RUNNING, Phase.DRAINING, Phase.FAILED}),
    Phase.DRAINING: frozenset({Phase.STOPPED, Phase.FAILED}),
    Phase.STOPPED: frozenset(),
    Phase.FAILED: frozenset(),
}

#: The phases after `shutdown` where nothing failed.
SHUT_DOWN = (Phase.DRAINING, Phase.STOPPED)


class Phases:
    """The phase of one cluster: moved by many threads, waited for by others.

    Parameters
    ----------
    changed : callable
        Called after each move, with no lock held.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        self._condition = threading.Condition()
        self._now = Phase.RESERVING
        self._since = time.time()
        self._reason = ""
        self._feeds = 0

    @property
    def now(self) -> Phase:
        """The present one."""
        return self._now

    @property
    def since(self) -> float:
        """When it began, in seconds since the epoch."""
        return self._since

    @property
    def reason(self) -> str:
        """Why it began, or what it waits for; may be empty."""
        return self._reason

    def move(self, to: Phase, reason: str = "") -> bool:
        """Move on to `to`; False where that may not follow the present phase."""
        with self._condition:
            if to not in MOVES[self._now]:
                return False
            self._enter(to, reason)
        self._changed()
        return True

    def feed_began(self) -> None:
        """Count a feed that has begun."""
        with self._condition:
            self._feeds += 1
            if self._now is not Phase.RUNNING:
                return
            self._enter(Phase.FEEDING, "")
        self._changed()

    def feed_ended(self) -> None:
        """Count a feed that has ended; the last one takes the phase back."""
        with self._condition:
            self._feeds -= 1
            if self._feeds or self._now is not Phase.FEEDING:
                return
            self._enter(Phase.RUNNING, "")
        self._changed()

    def wait(self, reached: Callable[[Phase], bool], timeout: float | None = None) -> bool:
        """Wait until `reached` says so of the present phase; False after `timeout` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: reached(self._now), timeout)

    def wait_until(self, reached: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `reached` says so; it is asked after each move, and each `wake_waiters`."""
        return self.wait(lambda _: reached(), timeout)

    def wake_waiters(self) -> None:
        """Have those that wait look again."""
        with self._condition:
            self._condition.notify_all()

    def _enter(self, to: Phase, reason: str) -> None:
        self._now, self._reason, self._since = to, reason, time.time()
        self._condition.notify_all()
