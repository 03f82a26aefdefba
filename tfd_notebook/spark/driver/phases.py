"""Phases of a cluster on Spark, and the allowed transitions."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum


class Phase(str, Enum):
    """A phase of a cluster on Spark, in the order in which they occur."""

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
        """True if no phase can follow."""
        return not MOVES[self]


#: The phases that can follow each phase.
MOVES: Mapping[Phase, frozenset[Phase]] = {
    Phase.RESERVING: frozenset({Phase.STARTING, Phase.DRAINING, Phase.FAILED}),
    Phase.STARTING: frozenset({Phase.RUNNING, Phase.DRAINING, Phase.FAILED}),
    Phase.RUNNING: frozenset({Phase.FEEDING, Phase.DRAINING, Phase.FAILED}),
    Phase.FEEDING: frozenset({Phase.RUNNING, Phase.DRAINING, Phase.FAILED}),
    Phase.DRAINING: frozenset({Phase.STOPPED, Phase.FAILED}),
    Phase.STOPPED: frozenset(),
    Phase.FAILED: frozenset(),
}

#: The phases after a `shutdown` without an error.
SHUT_DOWN = (Phase.DRAINING, Phase.STOPPED)


class Phases:
    """The current phase of a cluster, safe for use by several threads.

    Parameters
    ----------
    changed : callable
        Called after each transition, without a lock.
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
        """The current phase."""
        return self._now

    @property
    def since(self) -> float:
        """Start of the phase, in seconds since the epoch."""
        return self._since

    @property
    def reason(self) -> str:
        """Cause of the phase, or the condition that it waits for; may be empty."""
        return self._reason

    def move(self, to: Phase, reason: str = "") -> bool:
        """Enter the phase `to`; return False if it cannot follow the current phase."""
        with self._condition:
            if to not in MOVES[self._now]:
                return False
            self._enter(to, reason)
        self._changed()
        return True

    def feed_began(self) -> None:
        """Count a feed that begins."""
        with self._condition:
            self._feeds += 1
            if self._now is not Phase.RUNNING:
                return
            self._enter(Phase.FEEDING, "")
        self._changed()

    def feed_ended(self) -> None:
        """Count a feed that ends; the last one restores the running phase."""
        with self._condition:
            self._feeds -= 1
            if self._feeds or self._now is not Phase.FEEDING:
                return
            self._enter(Phase.RUNNING, "")
        self._changed()

    def wait(self, reached: Callable[[Phase], bool], timeout: float | None = None) -> bool:
        """Wait until `reached` is true for the phase; return False after `timeout` seconds."""
        limit = None if timeout == math.inf else timeout
        with self._condition:
            return self._condition.wait_for(lambda: reached(self._now), limit)

    def wait_until(self, reached: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait until `reached` returns true. It is called after transitions and `wake_waiters`."""
        return self.wait(lambda _: bool(reached()), timeout)

    def wake_waiters(self) -> None:
        """Make waiting threads check their conditions again."""
        with self._condition:
            self._condition.notify_all()

    def _enter(self, to: Phase, reason: str) -> None:
        self._now, self._reason, self._since = to, reason, time.time()
        self._condition.notify_all()
