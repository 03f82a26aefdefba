"""Metrics of a coordinator for snapshots, from counters and its latest closures."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfd_notebook.coordinator.values import percentiles
from tfd_notebook.model.closure_gate import Gate
from tfd_notebook.model.closure_store import FAILED, READY, RETRYING, STATES, Store
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import CoordinatedRow, CoordinatorRow, TaskRow
from tfd_notebook.model.spec import Role, TaskState

_RATE_SECONDS = 5.0
#: Number of latest closures in the percentiles.
_LATEST_CLOSURES = 500
#: Seconds after which rates and percentiles, and the more expensive bottleneck, are computed again.
_FIGURES_EVERY = 0.4
_LIMIT_EVERY = 2.0
#: Seconds after a transition in which rates and the bottleneck still change.
_SETTLE_SECONDS = _RATE_SECONDS + _LIMIT_EVERY
#: Time spans in seconds for the completion rate. The first with enough ended closures is used.
_SPANS = (10.0, 60.0, 600.0)
_PARTS_PER_SPAN = 10
_MIN_PARTS = 3
_MIN_ENDED = 8
#: Standard deviations between the mean and the 90th percentile of a normal distribution.
_P90_DEVIATIONS = 1.28
#: States in which a task cannot run closures.
_DOWN_STATES = (
    TaskState.STARTING,
    TaskState.RESTARTING,
    TaskState.STOPPED,
    TaskState.FAILED,
    TaskState.LOST,
)


@dataclass(frozen=True)
class CompletionRate:
    """Numbers of closures that ended recently.

    Parameters
    ----------
    ends : sequence of int
        Ended closures in each of some intervals, the latest last. Empty if there is too little
        data.
    seconds : float
        Length of each interval.
    """

    ends: Sequence[int] = ()
    seconds: float = 1.0

    def time_left(self, closures: int) -> tuple[float, float, float] | None:
        """Estimate the time until the given number of closures have ended.

        Returns
        -------
        tuple of float, optional
            Seconds: the expected value, and the low and high ends of an 80 % interval, assuming a
            constant rate. None if there is too little data.
        """
        if closures < 1 or not self.ends:
            return None
        mean = statistics.mean(self.ends)
        middle = closures / mean * self.seconds
        # Combines the uncertainty of the mean and the future variation.
        varied = statistics.stdev(self.ends) / mean
        error = varied * math.sqrt(1 / len(self.ends) + 1 / max(middle / self.seconds, 1.0))
        error = max(error, 1 / math.sqrt(sum(self.ends)))
        return (
            middle,
            middle / (1 + _P90_DEVIATIONS * error),
            middle / max(1 - _P90_DEVIATIONS * error, 0.1),
        )


def completion_rate(store: Store, now: float) -> CompletionRate:
    """Return the recent completion rate, over the shortest span with enough data.

    Parameters
    ----------
    store : Store
    now : float
        Seconds of `time.perf_counter`.
    """
    for span in _SPANS:
        length = span / _PARTS_PER_SPAN
        edges = [now - span + part * length for part in range(_PARTS_PER_SPAN)] + [now]
        ends = store.ended_between(edges)
        began = next((part for part, count in enumerate(ends) if count), _PARTS_PER_SPAN)
        # The first interval with closures is incomplete.
        ends = ends[began + 1 :] if began else ends
        if len(ends) >= _MIN_PARTS and sum(ends) >= _MIN_ENDED:
            return CompletionRate(ends, length)
    return CompletionRate()


def rate(store: Store, now: float) -> float:
    """Return closures per second over the last 5 seconds, or since the first one in that time."""
    parts = int(_RATE_SECONDS * 2)
    ends = store.ended_between([now - part / 2 for part in range(parts, -1, -1)])
    began = next((part for part, count in enumerate(ends) if count), parts)
    return sum(ends) / max((parts - began) / 2, 1.0)


def worker_rows(
    store: Store,
    gate: Gate,
    in_flight: Mapping[int, Any],
    tasks: Sequence[TaskRow],
    workers: int,
) -> tuple[CoordinatedRow, ...]:
    """Return the workers of a coordinator.

    Parameters
    ----------
    store : Store
    gate : Gate
    in_flight : mapping of int to Closure
        The current closure of each worker, with its ``key`` and ``name``.
    tasks : sequence of TaskRow
        The tasks of the cluster.
    workers : int
        Number of workers of the coordinator.
    """
    ended, resources = store.workers(), store.resources()
    down = {row.index for row in tasks if row.role is Role.WORKER and row.state in _DOWN_STATES}
    closures = dict(in_flight)
    times_of = dict(
        zip(closures, store.times([closure.key for closure in closures.values()]), strict=True)
    )
    now = time.perf_counter()
    rows = []
    for index in range(workers):
        closure, times, counts = closures.get(index), times_of.get(index), ended.get(index, {})
        held = gate.closed or index in gate.workers
        rows.append(
            CoordinatedRow(
                index,
                "lost"
                if index in down
                else "running"
                if closure is not None
                else "paused"
                if held
                else "idle",
                None if closure is None else closure.key,
                "" if closure is None else closure.name,
                None if times is None else max(0.0, now - times[1]),
                counts.get(STATES[READY], 0),
                counts.get(STATES[FAILED], 0),
                counts.get(STATES[RETRYING], 0),
                *resources.get(index, (0, 0)),
            )
        )
    return tuple(rows)


def row_version(store: Store) -> Hashable:
    """Return a value that is different after each change of the row of a store's coordinator."""
    now = time.perf_counter()
    _, running = store.unfinished()
    # Elapsed times change while a closure runs, and rates change after it.
    changes = running or now - store.changed_at < _SETTLE_SECONDS
    return store.version, int(now / _FIGURES_EVERY) if changes else None


class CoordinatorMetrics:
    """Computes the rows of a coordinator. Expensive values are cached for a short time.

    Parameters
    ----------
    store : Store
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._figures: dict[str, Any] = {}
        self._completion_rate = CompletionRate()
        self._figures_due = 0.0
        self._limit_sentence = ""
        self._ps_bytes: Mapping[str, int] = {}
        self._limit_due = 0.0

    def figures(self) -> dict[str, Any]:
        """Return the rate and percentiles of the latest closures."""
        with self._lock:
            if time.monotonic() >= self._figures_due:
                now = time.perf_counter()
                latest = self._store.latest_ready(_LATEST_CLOSURES)
                self._figures = {
                    "closures_per_s": rate(self._store, now),
                    "queue_ms": _percentiles(latest.queued, latest.dispatched),
                    "run_ms": _percentiles(latest.started, latest.fetching),
                }
                self._completion_rate = completion_rate(self._store, now)
                self._figures_due = time.monotonic() + _FIGURES_EVERY
            return self._figures

    def _limit_and_ps_bytes(
        self, limit: Callable[[], Limit], ps_bytes: Callable[[], Mapping[str, int]]
    ) -> tuple[str, Mapping[str, int]]:
        """Return the sentence about the bottleneck, and the bytes of each parameter server."""
        with self._lock:
            if time.monotonic() >= self._limit_due:
                self._limit_sentence, self._ps_bytes = limit().sentence(), ps_bytes()
                self._limit_due = time.monotonic() + _LIMIT_EVERY
            return self._limit_sentence, self._ps_bytes

    def row(
        self,
        *,
        gate: Gate | None,
        in_flight: Mapping[int, Any],
        stopped: bool,
        workers: int,
        counts: Mapping[str, int],
        tasks: Sequence[TaskRow],
        limit: Callable[[], Limit],
        ps_bytes: Callable[[], Mapping[str, int]],
    ) -> CoordinatorRow:
        """Return the current row. Without a gate, only values from RemoteValues are available."""
        waiting, running = self._store.unfinished()
        closed = gate is not None and gate.closed
        limit_sentence, ps = self._limit_and_ps_bytes(limit, ps_bytes)
        figures = self.figures()
        return CoordinatorRow(
            state="stopped"
            if stopped
            else "paused"
            if closed
            else "running"
            if waiting or running
            else "idle",
            reason=gate.reason if gate is not None and closed and not stopped else "",
            counts=counts,
            left_s=None
            if closed or stopped
            else self._completion_rate.time_left(waiting + running),
            workers=()
            if gate is None
            else worker_rows(self._store, gate, in_flight, tasks, workers),
            traces=self._store.traces(),
            ps_bytes=ps,
            limit=limit_sentence,
            held=() if gate is None else tuple(sorted(gate.workers)),
            break_on_failure=gate is not None and gate.break_failure,
            reduced=gate is None,
            **figures,
        )


def _percentiles(
    starts: Sequence[float], ends: Sequence[float]
) -> tuple[float, float, float] | None:
    pairs = zip(starts, ends, strict=True)
    spans = [(end - start) * 1e3 for start, end in pairs if start and end]
    return percentiles(spans) if spans else None
