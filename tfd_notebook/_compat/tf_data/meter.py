"""Metrics of one iterator. Its consumer writes them, any thread reads them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tfd_notebook.errors import TfdError


class MetricTotals(NamedTuple):
    """Totals of an iteration: elements, bytes, and seconds that its consumer waited."""

    elements: int = 0
    bytes: int = 0
    waited: float = 0.0

    def plus(self, other: MetricTotals) -> MetricTotals:
        """Return the sum of both."""
        return MetricTotals(
            self.elements + other.elements, self.bytes + other.bytes, self.waited + other.waited
        )


#: A call in progress: its start (`time.perf_counter`), a function that cancels it, and whether it
#: is a ``tf.function``. The function is called from another thread. A ``tf.function`` may compute
#: instead of waiting for data.
Blocked = tuple[float, Callable[[], None], bool]


class GraphClock(Protocol):
    """Metrics that TensorFlow counts for an iterator that a ``tf.function`` reads.

    `totals` has the result of the latest `sample`.
    """

    totals: MetricTotals

    def sample(self) -> None: ...

    def starved(self) -> bool:
        """Return True if no element is buffered for the consumer."""

    def close(self) -> None: ...


class IteratorMetrics:
    """Metrics of one iterator. They remain after the iterator is deleted.

    Attributes
    ----------
    elements, bytes, waited
        Counted by Python's ``next``. `read` adds the consumption of a ``tf.function``, as of the
        latest `sample`.
    latest : int
        Bytes of the latest element, if they vary and are all counted. Otherwise 0.
    blocked : dict of int to Blocked
        The calls in progress, by thread.
    iterator : callable
        Returns the iterator while it exists, else None.
    complete : bool
        Whether the end of the data was reached. After a ``tf.function``, only `finished` is set.
    use : object
        Delivery of the dataset that is iterated. None without a service.
    on_end : callable
        Called at the end, also by the garbage collector. It must acquire no lock.
    error : TfdError or None
        Set by `cancel`. Every further use raises it.
    failure : str or None
        Text of the error that ended the iteration. The error itself would keep the iterator alive
        through its traceback.
    """

    __slots__ = (
        "__weakref__",
        "_progress",
        "blocked",
        "bytes",
        "clock",
        "complete",
        "elements",
        "ended",
        "error",
        "failure",
        "finished",
        "interrupted",
        "iterator",
        "latest",
        "on_end",
        "use",
        "waited",
    )

    def __init__(self) -> None:
        self.elements = 0
        self.bytes = 0
        self.latest = 0
        self.waited = 0.0
        self.blocked: dict[int, Blocked] = {}
        self.clock: GraphClock | None = None
        self.iterator: Callable[[], Any] = lambda: None
        self.on_end: Callable[[], object] = lambda: None
        self.use: Any = None
        self.error: TfdError | None = None
        self.failure: str | None = None
        self.interrupted = False
        self.finished = False
        self.complete = False
        self.ended: float | None = None
        self._progress = (0, time.perf_counter())

    def read(self) -> MetricTotals:
        """Return the totals up to now, including the current wait."""
        reading = MetricTotals(self.elements, self.bytes, self.waited)
        if (clock := self.clock) is not None:
            reading = reading.plus(clock.totals)
        if self.ended is None and (since := self._waiting_since(reading.elements)) is not None:
            reading = reading._replace(waited=reading.waited + time.perf_counter() - since)
        return reading

    def sample(self) -> MetricTotals:
        """Read the clock, record the progress, and return the totals.

        Release the clock of an ended iterator. Only one thread at a time may call this.
        """
        ended, clock = self.ended, self.clock
        if clock is not None:
            clock.sample()
        reading = self.read()
        if reading.elements != self._progress[0]:
            self._progress = (reading.elements, time.perf_counter())
        if ended is not None and clock is not None:
            self.clock, (self.elements, self.bytes, self.waited) = None, reading
            clock.close()
        return reading

    def waiting_since(self) -> float | None:
        """Return the start of the consumer's current wait (`time.perf_counter`), or None."""
        clock = self.clock
        return self._waiting_since(self.elements + (clock.totals.elements if clock else 0))

    def _waiting_since(self, elements: int) -> float | None:
        calls = list(self.blocked.values())
        if not calls:
            return None
        since, _, function = min(calls, key=lambda call: call[0])
        if not function:
            return since
        # Inside a tf.function the consumer waits if no element is buffered for it.
        clock = self.clock
        if clock is None or not clock.starved():
            return None
        known, at = self._progress
        return max(since, at if elements == known else time.perf_counter())

    def finish(self) -> None:
        """Record the end of the data."""
        self.finished = self.complete = True
        self.end()

    def end(self) -> None:
        """Record that no more elements follow."""
        if self.ended is None:
            self.ended = time.perf_counter()
            self.on_end()

    def cancel(self, error: TfdError) -> None:
        """Cancel the calls in progress. They and all later calls raise `error`."""
        if self.error is None:
            self.error = error
        self.end()
        for _, end_call, _ in list(self.blocked.values()):
            end_call()

    def interrupt(self, thread: int) -> None:
        """Cancel the call of `thread`, which then raises KeyboardInterrupt."""
        call = self.blocked.get(thread)
        if call is not None:
            self.interrupted = True
            call[1]()


def without_traceback(error: TfdError) -> TfdError:
    """Return a copy of an error without a traceback, which would grow with every raise."""
    return type(error)(error.what, task=error.task, fix=error.fix)
