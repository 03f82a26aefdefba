"""Registry of the consumers in this process that read a cluster's data, with their metrics."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tfd_notebook._compat.tf_data.meter import IteratorMetrics, MetricTotals
from tfd_notebook.data.explain.classification import is_busy
from tfd_notebook.data.explain.live_limit import LiveLimit, ProcessSampler
from tfd_notebook.data.service.usage import WorkerUtilization, processors
from tfd_notebook.errors import Interrupted, TfdError, TimeLimit, UnknownName
from tfd_notebook.model.snapshot import StreamRow

#: Length of the window for rates and the share of waiting, in seconds.
WINDOW = 5.0

#: Seconds without an element after which a consumer that does not wait counts as idle.
_IDLE_SECONDS = 2.0

#: Number of consumers that are still listed after their end.
_ENDED_LISTED = 20


class RateSample(NamedTuple):
    """Metrics of one second: totals at its end, rates and share of waiting."""

    second: int
    elements: int
    bytes: int
    elements_per_s: float
    bytes_per_s: float
    wait_fraction: float


class Series:
    """Rates and a history by the second, from readings at arbitrary times.

    Parameters
    ----------
    keep : int
        Seconds of history that are kept.
    """

    def __init__(self, keep: int = 60) -> None:
        self._start = time.perf_counter()
        self._recent: deque[tuple[float, MetricTotals]] = deque([(self._start, MetricTotals())])
        self._last_second = (self._start, MetricTotals())
        self._seconds: deque[RateSample] = deque(maxlen=keep)
        self._keep = keep
        self._lock = threading.Lock()

    def add(self, reading: MetricTotals, now: float) -> None:
        """Add the totals `reading` at the time `now` (`time.perf_counter`)."""
        with self._lock:
            self._add(reading, now)

    def _add(self, reading: MetricTotals, now: float) -> None:
        self._recent.append((now, reading))
        while len(self._recent) > 2 and self._recent[1][0] < now - WINDOW:
            self._recent.popleft()
        began, before = self._last_second
        if now - began >= 1.0:
            self._close_seconds(began, before, reading, now)

    def _close_seconds(
        self, began: float, before: MetricTotals, reading: MetricTotals, now: float
    ) -> None:
        """Distribute the elements since `began` evenly over the seconds that passed."""
        count = int(now - began)
        share = 1.0 / (now - began)
        rates = [(after - old) * share for after, old in zip(reading, before, strict=True)]
        for step in range(max(1, count - self._keep + 1), count + 1):
            self._seconds.append(
                RateSample(
                    second=round(began + step - self._start),
                    elements=round(before.elements + rates[0] * step),
                    bytes=round(before.bytes + rates[1] * step),
                    elements_per_s=rates[0],
                    bytes_per_s=rates[1],
                    wait_fraction=min(1.0, rates[2]),
                )
            )
        ahead = [old + rate * count for old, rate in zip(before, rates, strict=True)]
        self._last_second = (
            began + count,
            MetricTotals(round(ahead[0]), round(ahead[1]), ahead[2]),
        )

    def rates(self) -> tuple[float, float, float | None]:
        """Return elements/s, bytes/s and the share of waiting over the last seconds."""
        with self._lock:
            (begin, first), (end, last) = self._recent[0], self._recent[-1]
        if end <= begin:
            return 0.0, 0.0, None
        elements, size, waited = (
            (new - old) / (end - begin) for new, old in zip(last, first, strict=True)
        )
        return elements, size, min(1.0, max(0.0, waited))

    def history(self) -> tuple[RateSample, ...]:
        """Return the samples of all whole seconds, latest last."""
        with self._lock:
            return tuple(self._seconds)


class Consumer(Protocol):
    """The interface of a consumer."""

    series: Series
    live: LiveLimit

    @property
    def kind(self) -> str:
        """``"stream"`` or ``"dataset"``."""

    @property
    def used(self) -> bool:
        """True if the elements are used, so that their user can be the bottleneck."""

    @property
    def meter(self) -> IteratorMetrics | None:
        """The metrics of the latest iterator."""

    @property
    def state(self) -> str: ...

    @property
    def error(self) -> object:
        """The error that ended it, an exception or its text. None without one."""

    @property
    def ended(self) -> float | None:
        """The time of its end (`time.perf_counter`). None before."""

    def reading(self) -> MetricTotals: ...

    def waiting_since(self) -> float | None: ...

    def cancel(self, error: TfdError) -> None: ...


class DatasetConsumer:
    """An observed dataset. All its iterators, one per epoch, form one consumer."""

    kind = "dataset"
    used = True

    def __init__(self) -> None:
        self._finished = MetricTotals()
        self._meters: list[IteratorMetrics] = []
        self._latest: IteratorMetrics | None = None
        self.series = Series()
        self.live = LiveLimit()
        self._lock = threading.Lock()

    @property
    def meter(self) -> IteratorMetrics | None:
        return self._latest

    def add(self, meter: IteratorMetrics) -> None:
        """Add the metrics of another iterator."""
        self.reading()  # merges ended iterators, so that their number does not grow
        with self._lock:
            self._meters.append(meter)
            self._latest = meter

    def reading(self) -> MetricTotals:
        with self._lock:
            total, running = self._finished, []
            for meter in self._meters:
                ended = meter.ended is not None
                total = total.plus(reading := meter.read())
                if ended:
                    self._finished = self._finished.plus(reading)
                else:
                    running.append(meter)
            self._meters = running
            return total

    @property
    def state(self) -> str:
        with self._lock:
            if any(meter.ended is None for meter in self._meters):
                return "running"
            latest = self._latest
        if latest is None:
            return "new"
        if latest.finished:
            return "finished"
        if latest.failure is not None:
            return "failed"
        if latest.error is None or latest.interrupted or isinstance(latest.error, Interrupted):
            return "stopped"
        return "failed"

    @property
    def error(self) -> object:
        latest = self._latest
        if latest is None or latest.finished:
            return None
        return latest.failure or latest.error

    @property
    def ended(self) -> float | None:
        latest = self._latest
        return latest.ended if latest is not None else None

    def waiting_since(self) -> float | None:
        with self._lock:
            waits = [meter.waiting_since() for meter in self._meters]
        return min((since for since in waits if since is not None), default=None)

    def cancel(self, error: TfdError) -> None:
        with self._lock:
            meters = list(self._meters)
        for meter in meters:
            meter.cancel(error)


@dataclass
class _Entry:
    source: Consumer
    elements: int = 0
    moved: float = field(default_factory=time.perf_counter)
    final: StreamRow | None = None


class Consumers:
    """Thread-safe registry of consumers.

    Parameters
    ----------
    task_of : callable, optional
        Returns the task name for an address such as ``"localhost:4711"``, or None.
    """

    def __init__(self, task_of: Callable[[str], str | None] | None = None) -> None:
        self.task_of = task_of or (lambda address: None)
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.RLock()
        self._sampler = ProcessSampler()

    def add(self, source: Consumer, name: str) -> str:
        """Register `source`. Return its name, unique among the consumers that have not ended."""
        with self._lock:
            for known, entry in self._entries.items():
                if entry.source is source:
                    return known
            unique, number = name, 1
            while unique in self._entries and not _has_ended(self._entries[unique].source.state):
                number += 1
                unique = f"{name}-{number}"
            self._entries.pop(unique, None)
            self._entries[unique] = _Entry(source)
            self._discard_oldest()
            return unique

    def rows(self) -> tuple[StreamRow, ...]:
        """Return a row for each consumer in the order of their start."""
        with self._lock:
            now = time.perf_counter()
            return tuple(self._row(name, entry, now) for name, entry in self._entries.items())

    def look(self, workers: Sequence[WorkerUtilization] = ()) -> None:
        """Update the bottleneck of each consumer. Call it about once per second.

        Raises
        ------
        Exception
            A pipeline cannot be read. The consumer is then excluded from later updates.
        """
        running = [
            entry.source
            for _, entry in self._running()
            if entry.source.state == "running" and not entry.source.live.disabled
        ]
        if not running:
            return
        self._sampler.sample()
        for source in running:
            iterator = source.meter.iterator() if source.meter is not None else None
            try:
                source.live.look(iterator, source.reading(), self._sampler, workers, source.used)
            except Exception:
                source.live.disabled = True
                raise

    def machine_is_busy(self) -> bool:
        """Return True if the cores of this machine were busy in the last second."""
        return is_busy(self._sampler.machine, processors())

    def latest(self) -> Consumer | None:
        """Return the consumer that received an element last, of those that have not ended."""
        self.rows()
        with self._lock:
            running = [entry for entry in self._entries.values() if entry.final is None]
        entry = max(running, key=lambda entry: entry.moved, default=None)
        return entry.source if entry is not None else None

    def named(self, name: str) -> Consumer:
        """Return the consumer with this name, or raise UnknownName."""
        with self._lock:
            if name in self._entries:
                return self._entries[name].source
            known = ", ".join(self._entries) or "none, nothing was read yet"
        raise UnknownName(f"unknown consumer {name!r}", fix=f"known consumers: {known}")

    def cancel_all(self, error: TfdError) -> None:
        """End every iteration. Blocked consumers, and later calls, raise `error`."""
        for _, entry in self._running():
            entry.source.cancel(error)

    def stuck(self, seconds: float) -> tuple[str, ...]:
        """Return the names of consumers that have waited for one element at least `seconds`."""
        now = time.perf_counter()
        return tuple(
            name
            for name, entry in self._running()
            if (since := entry.source.waiting_since()) is not None and now - since >= seconds
        )

    def idle(self) -> bool:
        """Return True if no stream runs and no dataset is being read."""
        self.rows()
        now = time.perf_counter()
        return not any(
            entry.source.kind == "stream"
            or now - entry.moved < _IDLE_SECONDS
            or entry.source.waiting_since() is not None
            for _, entry in self._running()
            if entry.source.state == "running"
        )

    def reading(self) -> bool:
        """Return True if a consumer has not finished its data, even if it reads slowly."""
        return any(entry.source.state == "running" for _, entry in self._running())

    def wait_idle(self, timeout: float | None = None) -> None:
        """Wait until `idle`, or raise TimeLimit after `timeout` seconds. Ctrl-C interrupts it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.idle():
            if deadline is not None and time.monotonic() >= deadline:
                names = ", ".join(name for name, entry in self._running() if entry.final is None)
                raise TimeLimit(
                    f"consumers still read after {timeout:g} s: {names}",
                    fix="wait longer, or stop them",
                )
            time.sleep(0.05)

    def _running(self) -> list[tuple[str, _Entry]]:
        with self._lock:
            return [
                (name, entry)
                for name, entry in self._entries.items()
                if not _has_ended(entry.source.state)
            ]

    def _row(self, name: str, entry: _Entry, now: float) -> StreamRow:
        source = entry.source
        state = source.state
        reading = source.reading()
        final = entry.final
        if final is not None and (final.state, final.elements) == (state, reading.elements):
            return final
        entry.final = None  # another epoch of a dataset can follow
        if reading.elements != entry.elements:
            entry.elements, entry.moved = reading.elements, now
        over = _has_ended(state)
        source.series.add(reading, min(now, source.ended or now) if over else now)
        elements, size, waiting = source.series.rates()
        error, meter = source.error, source.meter
        use = meter.use if meter is not None else None
        row = StreamRow(
            name=name,
            kind=source.kind,
            state=state,
            elements=reading.elements,
            bytes=reading.bytes,
            elements_per_s=elements,
            bytes_per_s=size,
            wait_fraction=waiting,
            history=tuple(second.elements_per_s for second in source.series.history()[-60:]),
            error=str(error) if error is not None else "",
            limit="" if over or not source.live.history else source.live.limit.sentence(),
            epoch=use.account(meter.read().elements) if use and meter and meter.complete else "",
            job=(use.job_name or "") if use else "",
        )
        if over:
            entry.final = row
        return row

    def _discard_oldest(self) -> None:
        over = [name for name, entry in self._entries.items() if _has_ended(entry.source.state)]
        for name in over[:-_ENDED_LISTED]:
            del self._entries[name]


def _has_ended(state: str) -> bool:
    return state in ("finished", "failed", "stopped")
