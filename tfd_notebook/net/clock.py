"""Deadlines by a clock that ignores steps of the wall clock and counts time in suspend."""

from __future__ import annotations

import time

__all__ = ["Deadline", "now"]

#: Seconds by which the wall clock must differ before the displayed time follows it.
_STEP_SECONDS = 1.0
#: On systems other than Linux the monotonic clock also counts time in suspend.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return the seconds since this host was booted; comparable within one boot only."""
    return time.clock_gettime(_CLOCK)


class Deadline:
    """A moment `seconds` from now.

    Parameters
    ----------
    seconds : float
        Time until the moment.

    Attributes
    ----------
    moment : float
        By the clock of `now`.
    """

    def __init__(self, seconds: float) -> None:
        self.moment = now() + seconds
        self._wall = time.time() + seconds

    @property
    def left(self) -> float:
        """Seconds until the moment, negative afterwards."""
        return self.moment - now()

    @property
    def over(self) -> bool:
        """True if the moment has passed."""
        return self.left < 0

    @property
    def wall(self) -> float:
        """The moment in seconds since the epoch, for display; it follows the wall clock's steps."""
        wall = time.time() + self.left
        if abs(wall - self._wall) > _STEP_SECONDS:
            self._wall = wall
        return self._wall
