"""A dataset that a background thread iterates."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tfd_notebook._compat.tf_data.meter import IteratorMetrics, MetricTotals, again
from tfd_notebook.data.consume import checkpoint as consume_checkpoint
from tfd_notebook.data.consume.consumers import Consumers, RateSample, Series
from tfd_notebook.data.consume.observe import open_iterator
from tfd_notebook.data.explain.live_limit import LiveLimit
from tfd_notebook.errors import DataError, Interrupted, StateError, TfdError, TimeLimit, UsageError
from tfd_notebook.model.limit import Limit

if TYPE_CHECKING:
    import pandas as pd

#: Seconds that `Stream.stop` gives the thread; only a sink that does not return needs more.
_STOP_SECONDS = 5.0

_NEVER = math.inf

#: Follows the last element in the buffer.
_END: Any = object()

_BUFFER_BYTES = 64_000_000
_BUFFER_ELEMENTS = (2, 64)

#: Seconds that a reader of small elements sleeps when it finds none: several come meanwhile.
_NAP = 0.001
_NAP_ELEMENTS = 8


class Stream:
    """A dataset that a background thread iterates, as `tfd_notebook.Cluster.stream` returns it.

    Each element goes to every sink, in the stream's thread. What else happens to it:

    * While nobody has iterated the stream it is dropped, so that a stream can be measured, or can
      feed its sinks, without a reader.
    * From the moment that somebody has (``for element in stream``, which also starts a new
      stream) it goes into the buffer, and the thread waits while the buffer is full.

    Iterate before `start`, or pass ``discard=False``, and no element is dropped.

    Parameters
    ----------
    dataset : tf.data.Dataset
    consumers : Consumers
        The table of the cluster's consumers. `tfd_notebook.Cluster.stream` passes it.
    name : str, optional
        Default ``"stream"``; a number is added where a living consumer has that name.
    buffer : int, optional
        Elements that wait for a reader at most. Default: what fits into 64 MB, from 2 to 64.
    sinks : sequence of callable
        Called with each element. An error of a sink fails the stream.
    discard : bool
        Whether elements that nobody has asked for are dropped. Default true.

    Attributes
    ----------
    name : str
    series : Series
        Its figures by the second.
    """

    kind = "stream"

    def __init__(
        self,
        dataset: Any,
        consumers: Consumers,
        name: str | None = None,
        *,
        buffer: int | None = None,
        sinks: Sequence[Callable[[Any], object]] = (),
        discard: bool = True,
    ) -> None:
        if buffer is not None and (not isinstance(buffer, int) or buffer < 1):
            raise UsageError(f"buffer={buffer!r} must be a whole number of at least 1")
        for sink in sinks:
            if not callable(sink):
                raise UsageError(f"the sink {sink!r} cannot be called")
        self._sinks = tuple(sinks)
        self._limit = buffer
        self._keep = not discard
        self._buffer: SimpleQueue[Any] = SimpleQueue()
        self._changed = threading.Condition()
        self._state = "new"
        self._error: BaseException | None = None
        self._cancelled: TfdError | None = None
        self._handled = 0
        self._attention = _NEVER  # handled elements at which the thread looks up from its work
        self._paused = self._parked = self._full = False
        self._quiet = False
        self._thread: threading.Thread | None = None
        self._iterator, self._meter = open_iterator(dataset, consumers)
        self.series = Series(keep=3600)
        self.live = LiveLimit()
        self.name = consumers.add(self, name or "stream")

    @property
    def state(self) -> str:
        """One of ``"new" "running" "paused" "finished" "failed" "stopped"``."""
        return "paused" if self._paused and self._state == "running" else self._state

    @property
    def error(self) -> BaseException | None:
        """The error that ended the stream, None where there is none."""
        return self._error

    @property
    def elements(self) -> int:
        """Elements that have passed the sinks so far."""
        return self._handled

    @property
    def bytes(self) -> int:
        """Bytes of the elements taken from the dataset so far; strings are not counted."""
        return self._meter.bytes

    @property
    def wait_fraction(self) -> float | None:
        """Share of the last seconds that the stream waited for data, 0 to 1; None if unknown."""
        self._sample()
        return self.series.rates()[2]

    @property
    def ended(self) -> float | None:
        return self._meter.ended

    @property
    def used(self) -> bool:
        """Whether somebody takes the elements: a sink, or a reader."""
        return bool(self._sinks) or self._keep

    @property
    def limit(self) -> Limit:
        """What limits the stream now, over the last seconds; ``none`` while that is unknown."""
        return self.live.limit

    @property
    def meter(self) -> IteratorMetrics:
        return self._meter

    def start(self) -> Stream:
        """Begin to iterate; returns the stream. A stream that runs goes on unchanged."""
        with self._changed:
            if self._over:
                raise StateError(
                    f"stream {self.name} has ended ({self._state})",
                    fix="make a new one: cluster.stream(dataset).start()",
                )
            if self._thread is None:
                self._state = "running"
                self._thread = threading.Thread(
                    target=self._run, name=f"tfd-stream-{self.name}", daemon=True
                )
                _running.add(self)
                self._thread.start()
        return self

    def pause(self) -> None:
        """Take no further element until `resume`; the one in work is finished."""
        with self._changed:
            self._need("pause", "running")
            self._paused, self._attention = True, 0

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._changed:
            self._need("resume", "running")
            self._paused = False
            self._changed.notify_all()

    def stop(self, timeout: float = _STOP_SECONDS) -> None:
        """End the stream, at any moment, also while no data worker is alive; twice is fine.

        Parameters
        ----------
        timeout : float
            Seconds that a sink, or a Python function which the pipeline calls in this process, may
            take to return; TimeLimit is raised then.
        """
        self.cancel(Interrupted(f"stream {self.name} was stopped"), quiet=True)
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            raise TimeLimit(
                f"the thread of stream {self.name} did not end within {timeout:g} s: a sink, or a "
                "Python function that the pipeline calls in this process, has not returned",
                fix="let it return; the stream ends then",
            )

    def cancel(self, error: TfdError, quiet: bool = False) -> None:
        """End the stream without waiting for its thread; waiting callers get `error`.

        With `quiet`, a loop over the stream just ends. An error other than Interrupted makes the
        state ``"failed"``.
        """
        with self._changed:
            if self._over or self._cancelled is not None:
                return
            self._cancelled = error
            self._quiet = quiet
            if self._thread is None:
                self._end(error)
            self._buffered()
            self._buffer.put(_END)  # whoever reads need not wait for the thread
            self._changed.notify_all()
        self._meter.cancel(error)

    def wait(self, elements: int | None = None, timeout: float | None = None) -> bool:
        """Wait until that many elements have come, or until the end; answers Ctrl-C.

        Parameters
        ----------
        elements : int, optional
            Elements since the start. Default: until the stream ends by itself.
        timeout : float, optional
            Seconds. Default: no limit.

        Returns
        -------
        bool
            True.

        Raises
        ------
        TimeLimit
            After `timeout`.
        DataError
            The data ended earlier.
        Interrupted
            The stream, or its cluster, was stopped.
        Exception
            The error of the data path, or of a sink.
        """
        if elements is not None and elements < 0:
            raise UsageError(f"elements={elements!r} must be 0 or more")
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            if self._state == "new":
                raise StateError(f"stream {self.name} has not started", fix="call start() first")
            while not self._over and (elements is None or self._handled < elements):
                if elements is not None:
                    self._attention = min(self._attention, elements)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeLimit(self._late(elements, timeout), fix=self._hint())
                self._changed.wait(left)
            if elements is not None and self._handled >= elements:
                return True
            self._raise_error()
            if self._state == "stopped":
                raise Interrupted(f"stream {self.name} was stopped")
            if elements is not None:
                raise DataError(
                    f"the data of stream {self.name} ended after {self._handled} of {elements} "
                    "elements",
                    fix="ask for fewer, or repeat() the dataset",
                )
            return True

    def __iter__(self) -> Iterator[Any]:
        self._keep = True
        if self._state == "new":
            self.start()
        return self

    def __next__(self) -> Any:
        buffer = self._buffer
        try:
            element = buffer.get_nowait()
        except Empty:
            if self._limit is not None and self._limit >= _NAP_ELEMENTS:
                time.sleep(_NAP)
            element = buffer.get()
        if element is _END:
            buffer.put(_END)
            self._raise_error()
            raise StopIteration
        if self._full and buffer.qsize() <= (self._limit or 0) // 2:
            with self._changed:
                self._changed.notify_all()
        return element

    def checkpoint(self, path: str, timeout: float = 60.0) -> None:
        """Write the position: what left the stream is not repeated, what is buffered is kept.

        Parameters
        ----------
        path : str
            As for ``tf.train.Checkpoint.write``.
        timeout : float
            Seconds that the element in work may take.

        Raises
        ------
        Unsupported
            TensorFlow cannot save this dataset's position; no dataset from a tf.data service has
            one that it can.
        """
        with self._changed:
            if self._over or self._iterator is None:
                raise StateError(
                    f"stream {self.name} has ended and has no position", fix="checkpoint earlier"
                )
            paused, self._paused, self._attention = self._paused, True, 0
            try:
                parked = self._changed.wait_for(
                    lambda: self._parked or self._thread is None or self._over, timeout
                )
                if not parked:
                    raise TimeLimit(self._late(None, timeout), fix=self._hint())
                if self._over:
                    raise StateError(f"stream {self.name} ended meanwhile")
                buffered = self._buffered()
                for element in buffered:
                    self._buffer.put(element)
                consume_checkpoint.save(path, self._iterator, self._handled, buffered)
            finally:
                self._paused = paused
                self._changed.notify_all()

    def restore(self, path: str) -> Stream:
        """Begin where `checkpoint` was called; for a stream that has not started."""
        self._need("restore", "new")
        self._handled, buffered = consume_checkpoint.load(path, self._iterator)
        self._meter.elements = self._handled
        for element in buffered:
            self._keep = True
            self._buffer.put(element)
        return self

    def throughput(self) -> float:
        """Return elements per second over the last seconds."""
        self._sample()
        return self.series.rates()[0]

    def to_frame(self) -> pd.DataFrame:
        """Return a row a second (the last hour at most).

        The columns are ``second elements bytes`` (totals at the end of each second, counted from
        the stream's making) and ``elements_per_s bytes_per_s wait_fraction`` (of that second).
        """
        import pandas as pd

        self._sample()
        return pd.DataFrame.from_records(self.series.history(), columns=list(RateSample._fields))

    def reading(self) -> MetricTotals:
        return self._meter.read()

    def waiting_since(self) -> float | None:
        return self._meter.waiting_since()

    def __enter__(self) -> Stream:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        error = f", {self._error}" if self._error is not None else ""
        return f"<Stream {self.name} {self.state}, {self.elements} elements{error}>"

    @property
    def _over(self) -> bool:
        return self._state in ("finished", "failed", "stopped")

    def _run(self) -> None:
        error: BaseException | None = None
        sampled = time.perf_counter()
        try:
            for element in self._iterator:
                for sink in self._sinks:
                    sink(element)
                self._handled += 1
                if self._keep:
                    self._offer(element)
                if self._handled >= self._attention:
                    self._attend()
                if (now := time.perf_counter()) - sampled > 1.0:
                    sampled = now
                    self._sample()
        except BaseException as raised:
            error = raised
        with self._changed:
            self._end(error)
        error = None  # a reference cycle with this frame, which would keep the iterator alive

    def _offer(self, element: Any) -> None:
        """Put `element` into the buffer; wait while that is full."""
        self._buffer.put(element)
        if self._limit is None:
            size = self._meter.bytes // self._meter.elements
            least, most = _BUFFER_ELEMENTS
            self._limit = max(least, min(most, _BUFFER_BYTES // max(1, size)))
        if self._buffer.qsize() >= self._limit:
            with self._changed:
                self._changed.notify_all()
                self._full = self._parked = True
                while self._buffer.qsize() >= self._limit and self._cancelled is None:
                    self._changed.wait()
                self._full = self._parked = False

    def _buffered(self) -> list[Any]:
        """Take what is buffered."""
        elements = []
        with contextlib.suppress(Empty):
            while True:
                elements.append(self._buffer.get_nowait())
        return elements

    def _attend(self) -> None:
        """Tell those who wait, and stay here while paused."""
        with self._changed:
            self._attention = _NEVER  # whoever still waits asks again
            self._changed.notify_all()
            self._parked = True
            while self._paused and self._cancelled is None:
                self._changed.wait()
            self._parked = False

    def _end(self, error: BaseException | None) -> None:
        """Note how the stream ended; the lock is held."""
        if (cancelled := self._cancelled) is not None:
            error = None if isinstance(cancelled, Interrupted) else cancelled
            self._state = "stopped" if error is None else "failed"
            self._buffered()
        else:
            self._state = "finished" if error is None else "failed"
        self._error = error
        self._buffer.put(_END)
        self._meter.end()
        self._sample()
        self._iterator = None
        _running.discard(self)
        self._changed.notify_all()

    def _raise_error(self) -> None:
        """Raise what the caller of an ended stream shall know, if there is something."""
        if self._error is not None:
            raise self._error
        if self._cancelled is not None and not self._quiet:
            raise again(self._cancelled)

    def _need(self, verb: str, state: str) -> None:
        if self._state != state:
            raise StateError(f"stream {self.name} is {self.state}: {verb}() needs it {state}")

    def _sample(self) -> None:
        self.series.add(self._meter.read(), self._meter.ended or time.perf_counter())

    def _late(self, elements: int | None, timeout: float | None) -> str:
        wanted = "" if elements is None else f" of {elements}"
        return f"stream {self.name} has {self._handled}{wanted} elements after {timeout:g} s"

    def _hint(self) -> str:
        if self._paused:
            return "the stream is paused: call resume()"
        if self._full:
            return "the buffer is full: iterate the stream, nobody reads it"
        return "wait longer, or look at the cluster: are its data workers alive?"


_running: weakref.WeakSet[Stream] = weakref.WeakSet()
os.register_at_fork(after_in_child=_running.clear)  # it has none of their threads


@atexit.register
def _stop_all() -> None:
    for stream in list(_running):
        with contextlib.suppress(TimeLimit):
            stream.stop()
