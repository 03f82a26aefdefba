"""Rates of a total that grows, over its latest measurements."""

from __future__ import annotations

import bisect
import itertools
import math

#: Measurements that are closer than this are merged, so that their number bounds the time.
_MIN_INTERVAL = 0.9


class RateWindow:
    """Rates of a total over a window of time. One thread may add while others read.

    Parameters
    ----------
    seconds : float
        Length of the window. Default 5.
    keep : int
        Maximum number of measurements, about one a second. Default 60.
    """

    def __init__(self, seconds: float = 5.0, keep: int = 60) -> None:
        self._seconds = seconds
        self._keep = keep
        self._entries: tuple[tuple[float, float], ...] = ()

    def add(self, at: float, total: float) -> bool:
        """Add a measurement. Return False if the total has restarted from a smaller value."""
        entries = self._entries
        grows = not entries or total >= entries[-1][1]
        if not grows:
            entries = ()
        elif len(entries) > 1 and at - entries[-2][0] < _MIN_INTERVAL:
            entries = entries[:-1]
        self._entries = (*entries, (at, total))[-self._keep :]
        return grows

    @property
    def rate(self) -> float | None:
        """The mean rate per second over the window, or None with fewer than two measurements."""
        if not self._entries:
            return None
        at, total = self._entries[-1]
        began, first = self._since(at - self._seconds)[0]
        return (total - first) / (at - began) if at > began else None

    @property
    def rates(self) -> tuple[float, ...]:
        """The rate between each two consecutive measurements of the window."""
        recent = self._since(self._entries[-1][0] - self._seconds) if self._entries else ()
        return tuple(
            (last - first) / (ended - began)
            for (began, first), (ended, last) in itertools.pairwise(recent)
            if ended > began
        )

    def by_second(self, count: int = 3600) -> list[tuple[int, float]]:
        """Return the last `count` whole seconds with their totals, which are interpolated."""
        return [
            (second, first + (last - first) * (second - began) / (ended - began))
            for (began, first), (ended, last) in itertools.pairwise(self._entries[-count - 1 :])
            for second in range(math.ceil(began), math.ceil(ended))
        ][-count:]

    def _since(self, start: float) -> tuple[tuple[float, float], ...]:
        """Return the measurements since `start`, at least the latest two if there are two."""
        entries = self._entries
        return entries[max(0, min(bisect.bisect_left(entries, (start,)), len(entries) - 2)) :]
