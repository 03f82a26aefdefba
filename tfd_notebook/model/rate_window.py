"""Rates of a total that grows, over its latest measurements."""

from __future__ import annotations

import itertools
from collections import deque


class RateWindow:
    """Rates of a total over a window of time.

    Parameters
    ----------
    seconds : float
        Length of the window.
    keep : int
        Maximum number of measurements. Default 60.
    """

    def __init__(self, seconds: float, keep: int = 60) -> None:
        self._seconds = seconds
        self._entries: deque[tuple[float, float]] = deque(maxlen=keep)

    def add(self, at: float, total: float) -> bool:
        """Add a measurement. Return False if the total has restarted from a smaller value."""
        grows = not self._entries or total >= self._entries[-1][1]
        if not grows:
            self._entries.clear()
        self._entries.append((at, total))
        return grows

    @property
    def rate(self) -> float | None:
        """The mean rate per second over the window, or None with fewer than two measurements."""
        recent = self._recent()
        if len(recent) < 2:
            return None
        (began, first), (ended, last) = recent[0], recent[-1]
        return (last - first) / (ended - began) if ended > began else None

    @property
    def rates(self) -> tuple[float, ...]:
        """The rate between each two consecutive measurements of the window."""
        return tuple(
            (last - first) / (ended - began)
            for (began, first), (ended, last) in itertools.pairwise(self._recent())
            if ended > began
        )

    def _recent(self) -> list[tuple[float, float]]:
        if not self._entries:
            return []
        start = self._entries[-1][0] - self._seconds
        return [entry for entry in self._entries if entry[0] >= start]
