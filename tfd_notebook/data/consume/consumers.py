"""Registry of the consumers in this process that read a cluster's data, with their metrics."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tfd_notebook._compat.tf_data.meter import IteratorMetrics, MetricTotals
from tfd_notebook.data.bottleneck.live_limit import NOTHING, LiveLimit, ProcessSampler
from tfd_notebook.data.bottleneck.usage import WorkerUtilization
from tfd_notebook.data.consume import sampler
from tfd_notebook.errors import Interrupted, TfdError, TimeLimit, UnknownName
from tfd_notebook.model.events import ConsumerMeasured, Event, Notice
from tfd_notebook.model.rate_window import RateWindow
from tfd_notebook.model.snapshot import StreamRow

log = logging.getLogger("tfd_notebook")

#: Seconds without an element after which a consumer that does not wait counts as idle.
_IDLE_SECONDS = 2.0

#: Number of consumers that are still listed after their end.
_ENDED_LISTED = 20

_Workers = Callable[[], Sequence[WorkerUtilization]]


class RateSample(NamedTuple):
    """Metrics of one second: totals at its end, rates and share of waiting."""

    second: int
    elements: int
    bytes: int
    elements_per_s: float
    bytes_per_s: float
    wait_fraction: float


class Series:
    """Rates and history of one consumer. Only samples change them.

    Parameters
    ----------
    keep : int
        Seconds of history that are kept.
    """

    def __init__(self, keep: int = 60) -> None:
        self.start = self._moved = time.perf_counter()
        #: Elements per second in the last 60 seconds, latest last.
        self.recent: tuple[float, ...] = ()
        #: Elements/s, bytes/s and the share of waiting over the seconds before the latest sample.
        self.rates = (0.0, 0.0, 0.0)
        #: The totals of the latest sample.
        self.latest = MetricTotals()
        self._sampled, self._state = self.start, "new"
        self._windows = [RateWindow(keep=keep + 1) for _ in self.latest]
        for window in self._windows:
            window.add(0.0, 0)

    def add(self, event: ConsumerMeasured) -> None:
        """Add a sample."""
        totals = (event.elements, event.bytes, event.waited)
        # TensorFlow's clocks are estimates, which may decrease.
        latest = MetricTotals._make(map(max, self.latest, totals))
        self._sampled = self.start + event.seconds
        if latest.elements > self.latest.elements or event.state != self._state:
            self._moved = self._sampled
        self.latest, self._state = latest, event.state
        for window, total in zip(self._windows, latest, strict=True):
            window.add(event.seconds, total)
        elements, size, waited = (max(0.0, window.rate or 0.0) for window in self._windows)
        self.rates = elements, size, min(1.0, waited)
        seconds = self._windows[0].by_second(61)
        self.recent = tuple(new - old for (_, old), (_, new) in itertools.pairwise(seconds))

    @property
    def sampled(self) -> float:
        """The time of the latest sample (`time.perf_counter`)."""
        return self._sampled

    def moved(self, reading: MetricTotals, now: float) -> float:
        """Return the time of the latest element or start: of a sample, or `now` if it is newer."""
        return now if reading.elements > self.latest.elements else self._moved

    def is_idle(self, reading: MetricTotals) -> bool:
        """Return True if no element has arrived for a while, up to the latest sample and since."""
        idle = self._sampled - self._moved >= _IDLE_SECONDS
        return idle and reading.elements <= self.latest.elements

    def history(self) -> list[RateSample]:
        """Return the metrics of all whole seconds, latest last."""
        seconds = zip(*(window.by_second() for window in self._windows), strict=False)
        return [
            RateSample(second, round(n), round(size), n - n0, size - size0, min(1.0, wait - wait0))
            for ((_, n0), (_, size0), (_, wait0)), ((second, n), (_, size), (_, wait)) in (
                itertools.pairwise(seconds)
            )
        ]


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

    def reading(self) -> MetricTotals:
        """Return the totals. Those of a ``tf.function`` are as of the latest sample."""

    def sample(self) -> MetricTotals:
        """Read the iterators and return the totals. Only `Consumers.measure` calls it."""

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
        meter.on_end = sampler.wake
        with self._lock:
            self._meters.append(meter)
            self._latest = meter

    def reading(self) -> MetricTotals:
        with self._lock:
            return functools.reduce(
                MetricTotals.plus, (meter.read() for meter in self._meters), self._finished
            )

    def sample(self) -> MetricTotals:
        with self._lock:
            for meter in tuple(self._meters):
                ended, reading = meter.ended is not None, meter.sample()
                if ended:  # merged, so that the number of meters does not grow
                    self._finished = self._finished.plus(reading)
                    self._meters.remove(meter)
        return self.reading()

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
        return None if latest is None or self.state == "running" else latest.ended

    def waiting_since(self) -> float | None:
        with self._lock:
            waits = [meter.waiting_since() for meter in self._meters]
        return min((since for since in waits if since is not None), default=None)

    def cancel(self, error: TfdError) -> None:
        with self._lock:
            meters = list(self._meters)
        for meter in meters:
            meter.cancel(error)


class Consumers:
    """Thread-safe registry of consumers.

    Parameters
    ----------
    task_of : callable, optional
        Returns the task name for an address such as ``"localhost:4711"``, or None.
    """

    def __init__(self, task_of: Callable[[str], str | None] | None = None) -> None:
        self.task_of = task_of or (lambda address: None)
        self._consumers: dict[str, Consumer] = {}
        self._rows: dict[str, StreamRow] = {}
        self._lock = threading.RLock()
        #: Held from a sample to its event, so that a later event has the later sample.
        self._sampling = threading.RLock()
        self._publish: Callable[[Event], None] | None = None
        self._workers: _Workers = lambda: ()

    def connect(self, publish: Callable[[Event], None], workers: _Workers) -> None:
        """Send events to the monitor of a cluster, which passes measurements to `apply`."""
        self._publish, self._workers = publish, workers

    def add(self, consumer: Consumer, name: str) -> str:
        """Register `consumer`. Return its name, unique among the consumers that have not ended."""
        with self._sampling:
            with self._lock:
                unique = self._name_of(consumer)
                if not unique:
                    running = {known for known, _ in self.running()}
                    unique, number = name, 1
                    while unique in running:
                        number += 1
                        unique = f"{name}-{number}"
                    self._discard(unique)
                    self._consumers[unique] = consumer
                    self._discard_oldest()
            self.measure(consumer)
        if consumer.state == "running":
            sampler.watch(self)
        return unique

    def measure(self, consumer: Consumer, process: ProcessSampler | None = None) -> MetricTotals:
        """Sample a consumer and publish its state and totals. No-op if it is not registered.

        Call this after each change of its state. With `process`, update its bottleneck too.
        """
        with self._sampling:
            # First the state: the totals of an ended consumer are final.
            state, totals = consumer.state, consumer.sample()
            seconds = (consumer.ended or time.perf_counter()) - consumer.series.start
            if process is not None and state == "running" and not consumer.live.disabled:
                iterator = consumer.meter.iterator() if consumer.meter is not None else None
                since = consumer.waiting_since()
                waiting = 0.0 if since is None else time.perf_counter() - since
                consumer.live.update(
                    iterator, totals, process, self._workers(), consumer.used, waiting
                )
            elif state == "paused":
                consumer.live.limit = NOTHING
            with self._lock:
                name = self._name_of(consumer)
            if name:
                (self._publish or self.apply)(ConsumerMeasured(name, state, seconds, *totals))
        return totals

    def activate(self, consumer: Consumer) -> None:
        """Measure a consumer that now runs, and start the sampler if needed."""
        self.measure(consumer)
        sampler.watch(self)

    @property
    def active(self) -> bool:
        """True if a consumer has started and has not ended."""
        return any(consumer.state != "new" for _, consumer in self.running())

    def sample(self, process: ProcessSampler | None) -> None:
        """Measure every active consumer and its bottleneck.

        Without `process`, measure only the consumers that have ended since the last sample.
        """
        with self._lock:
            consumers = [
                (name, consumer)
                for name, consumer in self._consumers.items()
                if name not in self._rows or not _has_ended(self._rows[name].state)
            ]
        for name, consumer in consumers:
            state = consumer.state
            try:
                if _has_ended(state) or (process is not None and state != "new"):
                    self.measure(consumer, process)
            except Exception as error:  # the thread must continue with the other consumers
                what = f"measuring {name} failed: {type(error).__name__}: {error}"
                if consumer.live.disabled:
                    continue  # reported before
                consumer.live.disabled = True
                if self._publish is not None:
                    self._publish(Notice("error", what))
                else:
                    log.error("%s", what)

    def apply(self, event: ConsumerMeasured) -> StreamRow | None:
        """Record a sample, and return the new row. Only this changes the rows."""
        with self._lock:
            consumer = self._consumers.get(event.consumer)
            if consumer is None:
                return None
            consumer.series.add(event)
            row = self._rows[event.consumer] = _row(event, consumer)
            return row

    def rows(self) -> tuple[StreamRow, ...]:
        """Return the row of each consumer as of its latest sample, in the order of their start."""
        with self._lock:
            return tuple(self._rows[name] for name in self._consumers if name in self._rows)

    def latest(self) -> Consumer | None:
        """Return the consumer that received an element last, of those that have not ended."""
        now = time.perf_counter()
        return max(
            (consumer for _, consumer in self.running()),
            key=lambda consumer: consumer.series.moved(consumer.reading(), now),
            default=None,
        )

    def has_finished(self, name: str) -> bool:
        """Return True if a consumer of this name has read all its data."""
        with self._lock:
            consumer = self._consumers.get(name)
        return consumer is not None and consumer.state == "finished"

    def named(self, name: str) -> Consumer:
        """Return the consumer with this name, or raise UnknownName."""
        with self._lock:
            if name in self._consumers:
                return self._consumers[name]
            known = ", ".join(self._consumers) or "none, nothing was read yet"
        raise UnknownName(f"unknown consumer {name!r}", fix=f"known consumers: {known}")

    def cancel_all(self, error: TfdError) -> None:
        """End every iteration. Blocked consumers, and later calls, raise `error`."""
        running = self.running()
        for _, consumer in running:
            consumer.cancel(error)
        for _, consumer in running:
            self.measure(consumer)

    def stuck(self, seconds: float) -> tuple[str, ...]:
        """Return the names of consumers that have waited for one element at least `seconds`."""
        now = time.perf_counter()
        return tuple(
            name
            for name, consumer in self.running()
            if (since := consumer.waiting_since()) is not None and now - since >= seconds
        )

    def idle(self) -> bool:
        """Return True if no stream runs and no dataset is being read."""
        return not any(
            consumer.kind == "stream"
            or not consumer.series.is_idle(consumer.reading())
            or consumer.waiting_since() is not None
            for _, consumer in self.running()
            if consumer.state == "running"
        )

    def reading(self) -> bool:
        """Return True if a consumer has not finished its data, even if it reads slowly."""
        return any(consumer.state == "running" for _, consumer in self.running())

    def wait_idle(self, timeout: float | None = None) -> None:
        """Wait until `idle`, or raise TimeLimit after `timeout` seconds. Ctrl-C interrupts it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.idle():
            if deadline is not None and time.monotonic() >= deadline:
                names = ", ".join(name for name, _ in self.running())
                raise TimeLimit(
                    f"consumers still read after {timeout:g} s: {names}",
                    fix="wait longer, or stop them",
                )
            time.sleep(0.05)

    def running(self) -> list[tuple[str, Consumer]]:
        """Return the consumers that have not ended, with their names."""
        with self._lock:
            return [item for item in self._consumers.items() if not _has_ended(item[1].state)]

    def _name_of(self, consumer: Consumer) -> str:
        return next((name for name, each in self._consumers.items() if each is consumer), "")

    def _discard_oldest(self) -> None:
        over = [name for name, consumer in self._consumers.items() if _has_ended(consumer.state)]
        for name in over[:-_ENDED_LISTED]:
            self._discard(name)

    def _discard(self, name: str) -> None:
        self._consumers.pop(name, None)
        self._rows.pop(name, None)


def _row(event: ConsumerMeasured, consumer: Consumer) -> StreamRow:
    """Return the row of a consumer after the event was added to its series."""
    series, error, meter = consumer.series, consumer.error, consumer.meter
    elements, size, waiting = series.rates
    use = meter.use if meter is not None else None
    bottleneck = consumer.live.history and not _has_ended(event.state)
    return StreamRow(
        name=event.consumer,
        kind=consumer.kind,
        state=event.state,
        elements=series.latest.elements,
        bytes=series.latest.bytes,
        elements_per_s=elements,
        bytes_per_s=size,
        wait_fraction=waiting,
        history=series.recent,
        error=str(error) if error is not None else "",
        limit=consumer.live.limit.sentence() if bottleneck else "",
        epoch=use.account(meter.read().elements) if use and meter and meter.complete else "",
        job=(use.job_name or "") if use else "",
    )


def _has_ended(state: str) -> bool:
    return state in ("finished", "failed", "stopped")
