"""A coordinator as it is seen in a snapshot, from counters and from its latest closures."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfd_notebook.coordinator.values import percentiles
from tfd_notebook.model.closure_gate import Gate
from tfd_notebook.model.closure_store import FAILED, READY, RETRYING, STATES, Store, Times
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import CoordinatedRow, CoordinatorRow, TaskRow
from tfd_notebook.model.spec import Role, TaskState

_RATE_SECONDS = 5.0
#: Closures that percentiles are of.
_LATEST = 500
#: Seconds after which figures, and what costs more than figures, are looked at again.
_FIGURES_EVERY = 0.4
_LIMIT_EVERY = 2.0
#: The spans, in seconds, over which throughput is looked at, the first one with enough ends.
_SPANS = (10.0, 60.0, 600.0)
_PARTS = 10
_LEAST_PARTS = 3
_LEAST_ENDS = 8
#: Standard deviations between the middle and what is exceeded one time in ten.
_TENTH = 1.28
#: What a task is in while nothing can run there.
_GONE = (
    TaskState.STARTING,
    TaskState.RESTARTING,
    TaskState.STOPPED,
    TaskState.FAILED,
    TaskState.LOST,
)


@dataclass(frozen=True)
class CompletionRate:
    """How many closures ended lately.

    Parameters
    ----------
    ends : sequence of int
        In each of some spans of time, the latest last; empty while too little is known.
    seconds : float
        How long each span is.
    """

    ends: Sequence[int] = ()
    seconds: float = 1.0

    def time_left(self, closures: int) -> tuple[float, float, float] | None:
        """Estimate when so many closures have ended.

        Returns
        -------
        tuple of float, optional
            Seconds: the middle, and a low and a high one between which it is four times out of
            five if all goes on as it did. None while too little is known.
        """
        if closures < 1 or not self.ends:
            return None
        mean = statistics.mean(self.ends)
        middle = closures / mean * self.seconds
        # Both how well the pace is known, and how it will vary until the end.
        varied = statistics.stdev(self.ends) / mean
        error = varied * math.sqrt(1 / len(self.ends) + 1 / max(middle / self.seconds, 1.0))
        error = max(error, 1 / math.sqrt(sum(self.ends)))
        return middle, middle / (1 + _TENTH * error), middle / max(1 - _TENTH * error, 0.1)


def pace(store: Store, now: float) -> CompletionRate:
    """Return how many closures ended lately, over the shortest time that tells enough.

    Parameters
    ----------
    store : Store
    now : float
        Seconds of `time.perf_counter`.
    """
    for span in _SPANS:
        length = span / _PARTS
        edges = [now - span + part * length for part in range(_PARTS)] + [now]
        ends = store.ended_between(edges)
        began = next((part for part, count in enumerate(ends) if count), _PARTS)
        # The part in which it began is not a whole one.
        ends = ends[began + 1 :] if began else ends
        if len(ends) >= _LEAST_PARTS and sum(ends) >= _LEAST_ENDS:
            return CompletionRate(ends, length)
    return CompletionRate()


def rate(store: Store, now: float) -> float:
    """Return closures per second over the last 5 seconds, or since they began within these."""
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
        By worker: what it has, with its ``key`` and ``name``.
    tasks : sequence of TaskRow
        Of the cluster.
    workers : int
        How many the coordinator has.
    """
    ended, resources = store.workers(), store.resources()
    away = {row.index for row in tasks if row.role is Role.WORKER and row.state in _GONE}
    has = dict(in_flight)
    taken = dict(zip(has, store.times([one.key for one in has.values()]), strict=True))
    now = time.perf_counter()
    rows = []
    for index in range(workers):
        closure, times, counts = has.get(index), taken.get(index), ended.get(index, {})
        held = gate.closed or index in gate.workers
        rows.append(
            CoordinatedRow(
                index,
                "lost"
                if index in away
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


class CoordinatorMetrics:
    """Makes the rows of one coordinator; what costs more than a counter is kept for a while.

    Parameters
    ----------
    store : Store
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._figures: dict[str, Any] = {}
        self._pace = CompletionRate()
        self._figures_due = 0.0
        self._said = ""
        self._ps_bytes: Mapping[str, int] = {}
        self._said_due = 0.0

    def figures(self) -> dict[str, Any]:
        """Return rate and percentiles of the latest closures."""
        with self._lock:
            if time.monotonic() >= self._figures_due:
                now = time.perf_counter()
                latest = self._store.latest_ready(_LATEST)
                self._figures = {
                    "closures_per_s": rate(self._store, now),
                    "queue_ms": _percentiles(latest, 0, 1),
                    "run_ms": _percentiles(latest, 2, 3),
                }
                self._pace = pace(self._store, now)
                self._figures_due = time.monotonic() + _FIGURES_EVERY
            return self._figures

    def said(
        self, limit: Callable[[], Limit], ps_bytes: Callable[[], Mapping[str, int]]
    ) -> tuple[str, Mapping[str, int]]:
        """Return the sentence of the limit, and the bytes of each parameter server."""
        with self._lock:
            if time.monotonic() >= self._said_due:
                self._said, self._ps_bytes = limit().sentence(), ps_bytes()
                self._said_due = time.monotonic() + _LIMIT_EVERY
            return self._said, self._ps_bytes

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
        """Return the coordinator as it is now; without a gate it is seen from outside only."""
        waiting, running = self._store.unfinished()
        closed = gate is not None and gate.closed
        said, ps = self.said(limit, ps_bytes)
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
            left_s=None if closed or stopped else self._pace.time_left(waiting + running),
            workers=()
            if gate is None
            else worker_rows(self._store, gate, in_flight, tasks, workers),
            traces=self._store.traces(),
            ps_bytes=ps,
            limit=said,
            held=() if gate is None else tuple(sorted(gate.workers)),
            break_on_failure=gate is not None and gate.break_failure,
            reduced=gate is None,
            **figures,
        )


def _percentiles(latest: list[Times], start: int, end: int) -> tuple[float, float, float] | None:
    spans = [(each[end] - each[start]) * 1e3 for each in latest if each[start] and each[end]]
    return percentiles(spans) if spans else None
