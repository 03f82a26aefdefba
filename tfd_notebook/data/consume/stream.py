"""A dataset that a background thread iterates."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tfd_notebook._compat.tf_data.elements import static_bytes
from tfd_notebook._compat.tf_data.meter import IteratorMetrics, MetricTotals, without_traceback
from tfd_notebook.data.bottleneck.live_limit import LiveLimit
from tfd_notebook.data.consume import checkpoint as consume_checkpoint
from tfd_notebook.data.consume import sampler
from tfd_notebook.data.consume.consumers import Consumers, RateSample, Series
from tfd_notebook.data.consume.element_size import element_bytes
from tfd_notebook.data.consume.observe import open_iterator
from tfd_notebook.errors import DataError, Interrupted, StateError, TfdError, TimeLimit, UsageError
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.spec import check_count, check_timeout
from tfd_notebook.views.formatting import plural

if TYPE_CHECKING:
    import pandas as pd

#: Default timeout of `Stream.stop`. Only a sink that does not return needs more.
_STOP_SECONDS = 5.0

_NEVER = math.inf

#: Marks the end of the elements in the buffer.
_END: Any = object()

#: Limits of the default buffer. It is full as soon as it reaches one of them. A full buffer stops
#: the threads of the pipeline. With 12 elements, their restarts cost more CPU than the pipeline
#: itself, if the elements are not copied.
_BUFFER_BYTES = 128_000_000
_BUFFER_ELEMENTS = 64
#: Assumed bytes of an element that cannot be measured. Two of them fill the buffer.
_UNKNOWN_BYTES = _BUFFER_BYTES // 2

#: Seconds that a reader sleeps if the buffer is empty, by its size, so that several small elements
#: arrive. The pause is too short for the buffer to become full.
_SLEEP_SECONDS_PER_ELEMENT = 0.001 / 64
#: Size of a buffer from which on its reader sleeps.
_SLEEP_MIN_BUFFER = 8


class Stream(Handle):
    """A dataset that a background thread iterates, as `tfd_notebook.Cluster.stream` returns it.

    Each element is passed to every sink, in the stream's thread.

    * Before the stream is iterated, elements are dropped. A stream can therefore be measured, or
      feed its sinks, without a reader.
    * After iteration has begun (``for element in stream``, which also starts a new stream),
      elements go to the buffer. The thread waits while the buffer is full.

    Iterate before `start`, or pass ``discard=False``, to drop no elements.

    Parameters
    ----------
    dataset : tf.data.Dataset
    consumers : Consumers
        The registry of the cluster's consumers. `tfd_notebook.Cluster.stream` passes it.
    name : str, optional
        Default ``"stream"``. A number is appended if a running consumer has that name.
    buffer : int, optional
        Maximum number of buffered elements. By default, the buffer is full with 64 elements or 128
        MB. It holds at most 128 MB plus one element, with strings, ragged and sparse tensors. Two
        elements of unknown size, such as datasets, fill it. A slice ``x[0]`` counts with
        its own size, but keeps the whole tensor in memory.
    sinks : sequence of callable
        Called with each element. An error of a sink fails the stream.
    discard : bool
        Whether elements are dropped before the stream is iterated. Default true.

    Attributes
    ----------
    name : str
    series : Series
        Its metrics by the second.
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
        if buffer is not None:
            check_count("buffer", buffer, None, 1)
        for sink in sinks:
            if not callable(sink):
                raise UsageError(f"invalid sink {sink!r}: expected a callable")
        self._sinks = tuple(sinks)
        self._keep = not discard
        self._buffer: SimpleQueue[Any] = SimpleQueue()
        self._changed = threading.Condition()
        self._state = "new"
        self._error: BaseException | None = None
        self._cancelled: TfdError | None = None
        self._handled = 0
        #: Number of elements after which the thread checks for requests.
        self._attention = _NEVER
        self._paused = self._parked = self._full = False
        self._quiet = False
        self._thread: threading.Thread | None = None
        self._iterator, self._meter = open_iterator(dataset, consumers)
        self._spec = self._iterator.element_spec
        #: Bytes of each buffered element, if they vary. Readers do not use them and need no lock.
        self._sizes: deque[int] | None = None
        self._bytes = 0
        #: Number of elements that fill the buffer. It varies with their size.
        self._limit = 1
        if buffer is not None:
            self._limit = buffer
        elif (size := static_bytes(self._spec)) is not None:
            self._limit = min(_BUFFER_ELEMENTS, _count(_BUFFER_BYTES, size))
        else:
            self._sizes = deque()
        self.series = Series(keep=3600)
        self.live = LiveLimit()
        self._consumers = consumers
        self.name = consumers.add(self, name or "stream")

    @property
    def state(self) -> str:
        """One of ``"new" "running" "paused" "finished" "failed" "stopped"``."""
        return "paused" if self._paused and self._state == "running" else self._state

    @property
    def error(self) -> BaseException | None:
        """The error that ended the stream. None without one."""
        return self._error

    @property
    def elements(self) -> int:
        """Number of elements that have passed the sinks."""
        return self._handled

    @property
    def bytes(self) -> int:
        """Bytes of the dense numeric tensors taken from the dataset.

        Strings and ragged and sparse tensors count as 0 bytes.
        """
        return self._meter.bytes

    @property
    def wait_fraction(self) -> float | None:
        """Share of the last seconds that the stream waited for data, 0 to 1. None if unknown."""
        return self.series.rates[2]

    @property
    def ended(self) -> float | None:
        return self._meter.ended

    @property
    def used(self) -> bool:
        """True if a sink or a reader uses the elements."""
        return bool(self._sinks) or self._keep

    @property
    def limit(self) -> Limit:
        """The current bottleneck, over the last seconds. ``none`` while unknown."""
        return self.live.limit

    @property
    def meter(self) -> IteratorMetrics:
        return self._meter

    def start(self) -> Stream:
        """Start to iterate, and return the stream. No-op if it runs."""
        with self._changed:
            if self._has_ended:
                raise StateError(
                    f"stream {self.name} has ended ({self._state})",
                    fix="create a new one: cluster.stream(dataset).start()",
                )
            if self._thread is None:
                self._state = "running"
                self._thread = threading.Thread(
                    target=self._run, name=f"tfd-stream-{self.name}", daemon=True
                )
                _running.add(self)
                self._consumers.activate(self)
                self._thread.start()
        return self

    def pause(self) -> None:
        """Take no further element until `resume`. The current element is completed."""
        with self._changed:
            self._require_state("pause", "running")
            self._paused, self._attention = True, 0
            self._consumers.measure(self)

    def resume(self) -> None:
        """Continue after `pause`."""
        with self._changed:
            self._require_state("resume", "running")
            self._paused = False
            self._consumers.measure(self)
            self._changed.notify_all()

    def stop(self, timeout: float = _STOP_SECONDS) -> None:
        """Stop the stream in any state, even without a running data worker.

        Parameters
        ----------
        timeout : float
            Seconds to wait for a sink, or a Python function of the pipeline in this process, to
            return. TimeLimit is raised after that.
        """
        check_timeout(timeout)
        self.cancel(Interrupted(f"stream {self.name} was stopped"), quiet=True)
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            raise TimeLimit(
                f"the thread of stream {self.name} did not end within {timeout:g} s: a sink, or a "
                "Python function that the pipeline calls in this process, has not returned",
                fix="make the sink or function return; the stream then ends",
            )

    def cancel(self, error: TfdError, quiet: bool = False) -> None:
        """End the stream without waiting for its thread. Waiting callers get `error`.

        With `quiet`, a loop over the stream ends without an error. Any error other than
        Interrupted sets the state ``"failed"``.
        """
        with self._changed:
            if self._has_ended or self._cancelled is not None:
                return
            self._cancelled = error
            self._quiet = quiet
            if self._thread is None:
                self._end(error)
            self._take_buffer()
            self._buffer.put(_END)  # readers need not wait for the thread
            self._changed.notify_all()
        self._meter.cancel(error)

    def wait(self, elements: int | None = None, timeout: float | None = None) -> bool:
        """Wait until `elements` have arrived, or until the end. Ctrl-C interrupts it.

        Parameters
        ----------
        elements : int, optional
            Number of elements since the start. Default: wait for the end of the data.
        timeout : float, optional
            Seconds. Default: no timeout.

        Returns
        -------
        bool
            Always true.

        Raises
        ------
        TimeLimit
            The wait took longer than `timeout`.
        DataError
            The data ended earlier.
        Interrupted
            The stream, or its cluster, was stopped.
        Exception
            The error of the data path, or of a sink.
        """
        if elements is not None:
            check_count("elements", elements, None)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            if self._state == "new":
                raise StateError(f"stream {self.name} has not started", fix="call start() first")
            while not self._has_ended and (elements is None or self._handled < elements):
                if elements is not None:
                    self._attention = min(self._attention, elements)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeLimit(self._timeout_text(elements, timeout), fix=self._hint())
                self._changed.wait(left)
            if elements is not None and self._handled >= elements:
                self._consumers.measure(self)  # `throughput` then includes these elements
                return True
            self._raise_error()
            if self._state == "stopped":
                raise Interrupted(f"stream {self.name} was stopped")
            if elements is not None:
                raise DataError(
                    f"the data of stream {self.name} ended after {self._handled} of {elements} "
                    "elements",
                    fix="wait for fewer elements, or repeat() the dataset",
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
            if self._limit >= _SLEEP_MIN_BUFFER:
                elements = min(self._limit, _BUFFER_ELEMENTS)
                time.sleep(_SLEEP_SECONDS_PER_ELEMENT * elements)
            element = buffer.get()
        if element is _END:
            buffer.put(_END)
            self._raise_error()
            raise StopIteration
        if self._full and buffer.qsize() <= self._limit // 2:
            with self._changed:
                self._changed.notify_all()
        return element

    def checkpoint(self, path: str, timeout: float = 60.0) -> None:
        """Write the position to disk, including the buffered elements.

        After the end of the data, this is possible while elements are buffered.

        Parameters
        ----------
        path : str
            As for ``tf.train.Checkpoint.write``.
        timeout : float
            Seconds to wait for the current element.

        Raises
        ------
        Unsupported
            TensorFlow cannot save the position of this dataset. This applies to all datasets that
            read from a tf.data service, before their end.
        StateError
            The stream was stopped, failed, or has ended and no element is buffered.
        TimeLimit
            The wait took longer than `timeout`.
        """
        check_timeout(timeout)
        with self._changed:
            paused, self._paused, self._attention = self._paused, True, 0
            try:
                parked = self._changed.wait_for(
                    lambda: self._parked or self._thread is None or self._has_ended, timeout
                )
                if not parked:
                    raise TimeLimit(self._timeout_text(None, timeout), fix=self._hint())
                taken = self._take_buffer()
                for element in taken:
                    self._buffer.put(element)
                buffered = [element for element in taken if element is not _END]
                if self._state in ("failed", "stopped") or (self._has_ended and not buffered):
                    raise StateError(
                        f"stream {self.name} has ended and has no position",
                        fix="checkpoint earlier",
                    )
                consume_checkpoint.save(path, self._iterator, self._spec, self._handled, buffered)
            finally:
                self._paused = paused
                self._changed.notify_all()

    def restore(self, path: str) -> Stream:
        """Continue at the position of `checkpoint`. The stream must not have started.

        Raises
        ------
        UsageError
            The file is not a checkpoint of a stream, or one of another dataset.
        StateError
            The stream has started.
        """
        self._require_state("restore", "new")
        self._handled, buffered, ended = consume_checkpoint.load(path, self._iterator)
        self._meter.elements = self._handled
        for element in buffered:
            self._keep = True
            self._put(element)
        if ended:
            self._iterator = None
        return self

    def throughput(self) -> float:
        """Return elements per second over the last seconds."""
        return self.series.rates[0]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per second, for the last hour at most.

        The columns ``second elements bytes`` are totals at the end of each second since the stream
        was created. ``elements_per_s bytes_per_s wait_fraction`` are of that second.
        """
        import pandas as pd

        return pd.DataFrame.from_records(self.series.history(), columns=list(RateSample._fields))

    def reading(self) -> MetricTotals:
        return self._meter.read()

    def sample(self) -> MetricTotals:
        return self._meter.sample()

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
        return f"<Stream {self.name} {self.state}, {plural(self.elements, 'element')}{error}>"

    @property
    def _has_ended(self) -> bool:
        return self._state in ("finished", "failed", "stopped")

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            if self._iterator is not None:  # not restored at the end of the data
                self._iterate()
        except BaseException as raised:
            error = raised
        with self._changed:
            self._end(error)
        # Breaks a reference cycle with this frame, which would keep the iterator alive.
        error = None

    def _iterate(self) -> None:
        self._wait_for_room()  # restored elements may fill the buffer
        for element in self._iterator:
            for sink in self._sinks:
                sink(element)
            self._handled += 1
            if self._keep:
                self._put(element)
                self._wait_for_room()
            if self._handled >= self._attention:
                self._handle_requests()

    def _put(self, element: Any) -> None:
        self._buffer.put(element)
        if self._sizes is not None:
            size = self._meter.latest or element_bytes(element)
            self._sizes.append(_UNKNOWN_BYTES if size is None else size)
            self._bytes += self._sizes[-1]

    def _wait_for_room(self) -> None:
        """Wait while the buffer is full."""
        if self._is_full():
            with self._changed:
                self._changed.notify_all()
                self._full = self._parked = True
                while self._cancelled is None and self._is_full():
                    self._changed.wait()
                self._full = self._parked = False

    def _is_full(self) -> bool:
        """Return True if no element may be added. Update the limit to the size of the latest."""
        count = self._buffer.qsize()
        sizes = self._sizes
        if sizes and count:
            latest = sizes[-1]
            while len(sizes) > count:  # the readers took the oldest
                self._bytes -= sizes.popleft()
            more = _count(_BUFFER_BYTES - self._bytes, latest)
            self._limit = max(1, min(_BUFFER_ELEMENTS, count + more))
        return count >= self._limit

    def _take_buffer(self) -> list[Any]:
        """Empty the buffer and return its elements."""
        elements = []
        with contextlib.suppress(Empty):
            while True:
                elements.append(self._buffer.get_nowait())
        return elements

    def _handle_requests(self) -> None:
        """Notify waiting callers, and wait while paused."""
        with self._changed:
            self._attention = _NEVER  # callers that still wait set it again
            self._changed.notify_all()
            self._parked = True
            while self._paused and self._cancelled is None:
                self._changed.wait()
            self._parked = False

    def _end(self, error: BaseException | None) -> None:
        """Record how the stream ended. The caller holds the lock."""
        if (cancelled := self._cancelled) is not None:
            error = None if isinstance(cancelled, Interrupted) else cancelled
            self._take_buffer()
        self._error = error  # before the state, which other threads read first
        good = "finished" if cancelled is None else "stopped"
        self._meter.end()
        self._state = good if error is None else "failed"
        self._consumers.measure(self)
        self._buffer.put(_END)
        sampler.wake()
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None
        _running.discard(self)
        self._changed.notify_all()

    def _raise_error(self) -> None:
        """Raise the error for a caller of an ended stream, if any."""
        if self._error is not None:
            raise self._error
        if self._cancelled is not None and not self._quiet:
            raise without_traceback(self._cancelled)

    def _require_state(self, verb: str, state: str) -> None:
        if self._state != state:
            raise StateError(
                f"{verb}() failed: stream {self.name} is {self.state}, expected {state}"
            )

    def _timeout_text(self, elements: int | None, timeout: float | None) -> str:
        total = "" if elements is None else f" of {elements}"
        return f"stream {self.name} has {self._handled}{total} elements after {timeout:g} s"

    def _hint(self) -> str:
        if self._paused:
            return "the stream is paused: call resume()"
        if self._full:
            return "the buffer is full and has no reader: iterate the stream"
        return "wait longer, or check that the cluster's data workers run"


def _count(space: int, size: int) -> int:
    """Return the number of elements of `size` bytes that fill `space` bytes."""
    return -(-space // max(1, size))


_running: weakref.WeakSet[Stream] = weakref.WeakSet()
os.register_at_fork(after_in_child=_running.clear)  # a forked child has none of their threads


@atexit.register
def _stop_all() -> None:
    for stream in list(_running):
        with contextlib.suppress(TimeLimit):
            stream.stop()
