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
    """A deadline that expires `seconds` from now.

    Parameters
    ----------
    seconds : float

    Attributes
    ----------
    expires_at : float
        By the clock of `now`.
    """

    def __init__(self, seconds: float) -> None:
        self.expires_at = now() + seconds
        self._wall = time.time() + seconds

    @property
    def left(self) -> float:
        """Seconds until it expires, negative afterwards."""
        return self.expires_at - now()

    @property
    def expired(self) -> bool:
        """True if the deadline has passed."""
        return self.left < 0

    @property
    def wall(self) -> float:
        """The deadline in seconds since the epoch, for display; it follows clock steps."""
        wall = time.time() + self.left
        if abs(wall - self._wall) > _STEP_SECONDS:
            self._wall = wall
        return self._wall
