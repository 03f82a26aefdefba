"""Rates of streams and tasks by second, for charts."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

#: Seconds without a measurement that get the rate of the next one. Measurements are about one
#: second apart, so that two of them may leave out a second.
_FILLED_SECONDS = 2
#: Maximum number of rates in a reply. With many series, a reply still covers `_MIN_SECONDS`.
_MAX_RATES = 60_000
_MIN_SECONDS = 60


@dataclass
class _Series:
    """One rate for each second from `start`. NaN: not measured."""

    start: int
    rates: array[float] = field(default_factory=lambda: array("f"))

    @property
    def end(self) -> int:
        return self.start + len(self.rates)


class RateHistory:
    """The rates of the latest seconds. Not thread-safe.

    Parameters
    ----------
    seconds : int
        Number of seconds that are kept. Default 600.
    """

    def __init__(self, seconds: int = 600) -> None:
        self._seconds = seconds
        self._series: dict[str, _Series] = {}

    def add(self, name: str, at: float, rate: float) -> None:
        """Set the rate of a second; a later one in that second replaces it."""
        second = math.floor(at)
        series = self._series.get(name)
        if series is None or not series.start <= second < series.end + self._seconds:
            self._discard_old(second)
            series = self._series[name] = _Series(second)
        missing = second - series.end
        if missing < 0:  # measured twice, or the clock was set back
            del series.rates[missing:]
        series.rates.extend([rate if missing <= _FILLED_SECONDS else math.nan] * missing)
        series.rates.append(rate)
        over = max(0, len(series.rates) - self._seconds)
        del series.rates[:over]
        series.start += over

    def since(self, first: int, now: int) -> dict[str, list[float | None]]:
        """Return the rates of each second before `now`, from `first` on.

        Parameters
        ----------
        first, now : int
            Seconds since the Unix epoch. With many series, the reply begins later than `first`.

        Returns
        -------
        dict of str to list of float or None
            By name, all of the same length. None: not measured.
        """
        self._discard_old(now)
        limit = max(_MIN_SECONDS, _MAX_RATES // max(1, len(self._series)))
        first = max(first, now - min(limit, self._seconds))
        return {
            name: [
                round(series.rates[second - series.start], 1)
                if series.start <= second < series.end
                and not math.isnan(series.rates[second - series.start])
                else None
                for second in range(first, now)
            ]
            for name, series in self._series.items()
        }

    def _discard_old(self, now: int) -> None:
        for name in [n for n, s in self._series.items() if s.end < now - self._seconds]:
            del self._series[name]
