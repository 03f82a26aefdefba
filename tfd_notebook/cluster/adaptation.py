"""The rule of adaptive data workers: from measurements to a number of data workers and a reason.

All functions are pure. `tfd_notebook.cluster.adaptation_loop` applies the rule to a cluster, and
the simulator of the tests replays load traces with it.

A consumer that waits is *starved*. Its demand follows from its share of waiting: it would read
``1 / (1 - share)`` times as fast. The data workers are then fully used. Their number and the rate
give the cost of an element, in seconds of one data worker. Later, demand and cost give the number
of data workers that are needed. The number grows as soon as a consumer is starved. It shrinks to
the largest number that was needed during a cool-down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

#: Share of waiting from which a consumer is starved.
_STARVED = 0.1
#: The least share of the time in which a consumer works, so that demand stays finite.
_LEAST_WORK = 0.02
#: Maximum factor of one increase, over the data workers that serve. Their measurement may be wrong.
_MOST_GROWTH = 4
#: Reserve over the measured need, so that a consumer does not wait again after a reduction.
_RESERVE = 1.1
#: Length of the cool-down, in start times of a data worker.
_COOL_DOWN_STARTS = 2.0
_LEAST_COOL_DOWN_SECONDS = 5.0
#: Checks without starvation that a reduction needs.
_QUIET_CHECKS = 3
#: Maximum factor of the cool-down after reductions that were too large.
_MOST_PATIENCE = 16.0
#: A window ends with the latest sample. It is the shortest one with these seconds and elements.
_WINDOW_SECONDS = (0.9, 5.5)
_WINDOW_ELEMENTS = 4
#: Seconds of a start, while none is measured.
_START_SECONDS = 5.0
#: Seconds after a change until all new data workers that a consumer can use are serving.
_SETTLED_SECONDS = 10.0
#: Length of the pause after a change that failed, in cool-downs.
_PAUSE_COOL_DOWNS = 4.0


@dataclass(frozen=True)
class Load:
    """One consumer that has started and has not ended, as of its latest sample.

    Parameters
    ----------
    name : str
    time : float
        Time of the sample in seconds.
    elements : int
        Number of elements so far.
    waited : float
        Seconds of waiting so far.
    paused : bool
        Whether it is paused. It has no demand then.
    useful : int, optional
        Number of data workers that can work for it at the same time. None if unlimited.
    bottleneck : str
        Its bottleneck, if more data workers cannot help. Else empty.
    keeps : {"", "fewer", "all"}
        The changes that would damage its epoch: none, a reduction, or any.
    """

    name: str
    time: float
    elements: int
    waited: float
    paused: bool = False
    useful: int | None = None
    bottleneck: str = ""
    keeps: str = ""


@dataclass(frozen=True)
class Measurement:
    """State of the data workers and their consumers at one check.

    Parameters
    ----------
    time : float
        Seconds.
    workers : int
        Data workers that have not ended, including those that start.
    serving : int
        Those from which a consumer has read.
    pending : int
        Those that are not ready yet.
    pending_seconds : float
        Time since the oldest of them was requested.
    start_seconds : float, optional
        Measured time from the request of a data worker until it is ready.
    loads : tuple of Load
    """

    time: float
    workers: int
    serving: int
    pending: int = 0
    pending_seconds: float = 0.0
    start_seconds: float | None = None
    loads: tuple[Load, ...] = ()


@dataclass(frozen=True)
class Bounds:
    """The range of the number of data workers, and the timeout of their start in seconds."""

    minimum: int
    maximum: int
    start_timeout: float = 180.0


@dataclass(frozen=True)
class Decision:
    """A new number of data workers, and its reason in words."""

    workers: int
    reason: str


@dataclass(frozen=True)
class History:
    """The result of earlier checks.

    Parameters
    ----------
    samples : tuple of Measurement
        Checks with the current number of serving data workers, latest last.
    needs : tuple of (float, int)
        Time and number of data workers that were needed, since the latest change.
    costs : tuple of (str, float)
        Consumer, and seconds of one data worker per element.
    changed, lowered, blocked : float
        Time of the latest change, of the latest reduction, and until which no data worker is added.
    patience : float
        Factor of the cool-down.
    """

    samples: tuple[Measurement, ...] = ()
    needs: tuple[tuple[float, int], ...] = ()
    costs: tuple[tuple[str, float], ...] = ()
    changed: float = -math.inf
    lowered: float = -math.inf
    blocked: float = -math.inf
    patience: float = 1.0


@dataclass(frozen=True)
class _Rate:
    """Rate and share of waiting of a consumer over the latest seconds."""

    load: Load
    elements_per_s: float
    waiting: float

    @property
    def starved(self) -> bool:
        return self.waiting > _STARVED and not self.load.bottleneck

    @property
    def demand(self) -> float:
        """Elements per second that it would read without waiting for data workers."""
        waiting = 0.0 if self.load.bottleneck else self.waiting
        return self.elements_per_s / max(1 - waiting, _LEAST_WORK)


def decide(bounds: Bounds, history: History, now: Measurement) -> tuple[History, Decision | None]:
    """Return the history for the next check, and a decision if the number has to change.

    Parameters
    ----------
    bounds : Bounds
    history : History
        The result of the previous check.
    now : Measurement

    Returns
    -------
    History
    Decision or None
        None without a consumer, while the number is right, or while it must not change yet.
    """
    if now.workers < bounds.minimum and now.time >= history.blocked:
        return _change(history, now, bounds.minimum, f"the minimum is {bounds.minimum}")
    if now.workers > bounds.maximum:
        return _change(history, now, bounds.maximum, f"the maximum is {bounds.maximum}")
    if now.pending and now.pending_seconds >= bounds.start_timeout:
        left = max(bounds.minimum, now.workers - now.pending)
        reason = f"{now.pending} did not start within {bounds.start_timeout:g} s"
        history = failed(history, now)
        return (history, None) if left == now.workers else _change(history, now, left, reason)
    history = _observe(history, now)
    if not now.loads or not now.serving:
        return replace(history, needs=()), None
    rates = _rates(history)
    if rates is None:
        return history, None
    history, need = _need(history, now, rates)
    starved = max(
        (rate for rate in rates if rate.starved), key=lambda rate: rate.waiting, default=None
    )
    if starved is not None:
        count = min(need, _MOST_GROWTH * now.serving, _useful(bounds.maximum, now.loads))
        if count > now.workers and now.time >= history.blocked and not _keeps(now.loads, "all"):
            return _change(history, now, count, _waits(starved))
        return history, None
    return _lower(bounds, history, now)


def failed(history: History, now: Measurement) -> History:
    """Return the history after a change that failed: no data worker is added for a while."""
    pause = _PAUSE_COOL_DOWNS * _cool_down(history, now)
    return replace(history, blocked=now.time + pause)


def _observe(history: History, now: Measurement) -> History:
    """Return the history with a sample. It starts again when other data workers serve."""
    before = history.samples[-1] if history.samples else None
    known = history.samples
    if before is None or before.serving != now.serving:
        known = ()
    start = now.time - _WINDOW_SECONDS[1]
    return replace(history, samples=(*(s for s in known if s.time >= start), now))


def _rates(history: History) -> list[_Rate] | None:
    """Return the rates of the consumers that are not paused, or None while one is unknown."""
    rates = []
    for load in history.samples[-1].loads:
        if load.paused:
            continue
        rate = _rate(load, history.samples)
        if rate is None:
            return None
        rates.append(rate)
    return rates


def _rate(load: Load, samples: tuple[Measurement, ...]) -> _Rate | None:
    """Return the rate over the shortest window with enough elements, else over the longest."""
    longest = None
    for sample in reversed(samples):
        before = next((known for known in sample.loads if known.name == load.name), None)
        if before is None or before.paused or before.elements > load.elements:
            break
        seconds = load.time - before.time
        if seconds < _WINDOW_SECONDS[0]:
            continue
        elements = load.elements - before.elements
        waiting = min(1.0, max(0.0, load.waited - before.waited) / seconds)
        longest = _Rate(load, elements / seconds, waiting)
        if elements >= _WINDOW_ELEMENTS:
            break
    return longest


def _need(history: History, now: Measurement, rates: list[_Rate]) -> tuple[History, int]:
    """Return the history with the costs and the need, and the number that is needed now."""
    starved = any(rate.starved for rate in rates)
    total = sum(rate.elements_per_s for rate in rates)
    if starved and total > 0:
        need = now.serving * sum(rate.demand for rate in rates) / total
        # Data workers that have just started deliver elements before they count as serving.
        if now.serving == now.workers or now.time - history.changed > _SETTLED_SECONDS:
            history = _learn(history, now, rates, now.serving / total)
    elif starved:
        need = float(now.workers)  # without an element, the cost is unknown
    else:
        need = _need_by_cost(history, now, rates)
    count = math.ceil(need - 1e-6)
    entries = [*history.needs, (now.time, count)]
    start = now.time - _cool_down(history, now)
    # The entry before the start shows that the checks cover the whole cool-down.
    while len(entries) > 1 and entries[1][0] <= start:
        entries.pop(0)
    return replace(history, needs=tuple(entries)), count


def _need_by_cost(history: History, now: Measurement, rates: Iterable[_Rate]) -> float:
    """Return the number for consumers that do not wait."""
    costs = dict(history.costs)
    need = 0.0
    for rate in rates:
        if rate.elements_per_s > 0:
            if rate.load.name not in costs:
                # It has never waited, so a few less may be enough.
                return now.workers - math.ceil(now.workers / 4)
            need += rate.demand * costs[rate.load.name] * _RESERVE
    return need


def _learn(history: History, now: Measurement, rates: list[_Rate], cost: float) -> History:
    """Return the history with the cost of an element, as data workers without idle time have it."""
    known = dict(history.costs)
    waiting = max(rate.waiting for rate in rates)
    for rate in rates:
        before = known.get(rate.load.name, cost)
        # A window in which the wait ended shows too few elements, and little waiting.
        weight = 0.5 if cost < before else 0.25 * waiting
        known[rate.load.name] = before + weight * (cost - before)
    names = {load.name for load in now.loads}
    costs = tuple(entry for entry in known.items() if entry[0] in names)
    return replace(history, costs=costs)


def _lower(bounds: Bounds, history: History, now: Measurement) -> tuple[History, Decision | None]:
    """Return a reduction, if a whole cool-down has shown that fewer data workers are enough."""
    cool_down = _cool_down(history, now)
    quiet = [entry for entry in history.needs if entry[0] >= now.time - cool_down / 2]
    unused = all(need == 0 for _, need in quiet)
    period = cool_down / 2 if unused else cool_down
    covered = history.needs[0][0] <= now.time - period
    if not covered or now.pending or len(quiet) < _QUIET_CHECKS:
        return history, None
    if now.time - history.changed < period or _keeps(now.loads, "all", "fewer"):
        return history, None
    count = max(bounds.minimum, 0 if unused else max(need for _, need in history.needs))
    if count >= now.workers:
        return history, None
    reason = f"no consumer has read for {period:.0f} s"
    if not unused:
        reason = f"{count} {'was' if count == 1 else 'were'} enough for {period:.0f} s"
    saved = f"{100 * (1 - count / now.workers):.0f} % of worker time saved"
    return _change(history, now, count, f"{reason}: {saved}, no more waiting")


def _change(
    history: History, now: Measurement, count: int, reason: str
) -> tuple[History, Decision]:
    lowers = count < now.workers
    # A reduction was too large if it is soon reverted. The next one then waits longer.
    too_low = now.time - history.lowered <= 2 * _cool_down(history, now)
    patience = history.patience
    if not lowers:
        patience = min(_MOST_PATIENCE, 2 * patience) if too_low else 1.0
    history = replace(
        history,
        needs=(),
        changed=now.time,
        lowered=now.time if lowers else history.lowered,
        patience=patience,
    )
    return history, Decision(count, reason)


def _cool_down(history: History, now: Measurement) -> float:
    """Return the seconds for which fewer data workers must be enough before a reduction."""
    start = _START_SECONDS if now.start_seconds is None else now.start_seconds
    return max(_LEAST_COOL_DOWN_SECONDS, _COOL_DOWN_STARTS * start) * history.patience


def _useful(maximum: int, loads: Iterable[Load]) -> int:
    """Return the number of data workers that can work at the same time, at most `maximum`."""
    return min(maximum, max(maximum if load.useful is None else load.useful for load in loads))


def _keeps(loads: Iterable[Load], *changes: str) -> bool:
    return any(load.keeps in changes for load in loads)


def _waits(rate: _Rate) -> str:
    return f"{rate.load.name!r} waits {100 * rate.waiting:.0f} % of the time"
