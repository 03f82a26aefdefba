"""Runs a pipeline for a few seconds and records the use of time by its stages."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from tfd_notebook._compat.tf_data.pipeline_model import Stage, model_of, stages_of
from tfd_notebook.data.bottleneck.cost_model import Costs, Measurement
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.data.consume.observe import open_iterator
from tfd_notebook.errors import TimeLimit

#: Seconds between two readings of the model. Short epochs need a shorter interval.
_MODEL_EVERY = 0.1
_MODEL_EVERY_SHORT = 0.02
_PROBE = 0.002
#: A thread that wakes up later than this had to wait for the GIL. If all cores are busy, it may
#: have waited for a core.
_LATE = 0.0005


class Blocked(Exception):
    """The end of a measurement whose pipeline does not return an element."""


def measure(
    dataset: Any,
    seconds: float,
    consume: Callable[[Any], object] | None = None,
    warm_up: float = 1.0,
    last: Stage | None = None,
    ended: Callable[[], object] | None = None,
    patience: float = 1.0,
) -> Measurement:
    """Iterate `dataset` for `seconds`, and again from the start if it ends.

    Parameters
    ----------
    dataset : tf.data.Dataset
    seconds : float
        Time to measure, after `warm_up`.
    consume : callable, optional
        Called with each element.
    warm_up : float
        Seconds before the measurement. Default 1.
    last : Stage, optional
        The last of the stages to which the time is attributed. Default: that of `dataset`.
    ended : callable, optional
        Called at the end of the measurement, before the iterator is released. The release can
        take a second with a tf.data service.
    patience : float
        Seconds after the end of the measurement that the current element may take. Default 1.

    Raises
    ------
    Blocked
        The pipeline did not return in time. A Python function of it continues to run, because
        TensorFlow cannot cancel it.
    Exception
        The pipeline's error, or the consumer's.
    """
    run = _Run(last or stages_of(dataset), ended)
    return run.measure_in_thread(dataset, seconds, consume, warm_up, patience)


class _Run:
    def __init__(self, last: Stage, ended: Callable[[], object] | None) -> None:
        self._last = last
        self._ended = ended
        self._costs = Costs(last)
        self._lags: list[float] = []
        self._stopped = threading.Event()
        self._iterator: Any = None
        self._meter: Any = None
        self._lock = threading.Lock()
        self._counting = False
        self._passes = 0
        self._read = 0.0
        self._end = self._consumed = 0.0

    def measure_in_thread(
        self,
        dataset: Any,
        seconds: float,
        consume: Callable[[Any], object] | None,
        warm_up: float,
        patience: float,
    ) -> Measurement:
        """Iterate in a separate thread, which can block, and call `consume` in this one."""
        elements: queue.SimpleQueue[Any] = queue.SimpleQueue()
        errors: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        ended = object()
        results: list[Measurement | BaseException] = []

        def consume_in_caller(element: Any) -> None:
            elements.put(element)
            if (error := errors.get()) is not None:
                raise error

        def run() -> None:
            consumer = None if consume is None else consume_in_caller
            try:
                results.append(self.measure(dataset, seconds, consumer, warm_up))
            except BaseException as error:
                results.append(error)
            elements.put(ended)

        self._end = time.perf_counter() + warm_up + seconds
        thread = threading.Thread(target=run, name="tfd-explain-run", daemon=True)
        thread.start()
        try:
            while (element := self._next_of(elements, patience)) is not ended:
                assert consume is not None
                try:
                    consume(element)
                    errors.put(None)
                except BaseException as error:
                    errors.put(error)
                self._consumed = time.perf_counter()
        except BaseException:  # the time limit, or Ctrl-C
            self._ended = None
            self._stopped.set()
            stopped = TimeLimit("the measurement has ended")
            errors.put(stopped)
            if self._meter is not None:
                self._meter.cancel(stopped)
            raise
        thread.join()
        (result,) = results
        if isinstance(result, BaseException):
            raise result
        return result

    def _next_of(self, elements: queue.SimpleQueue[Any], patience: float) -> Any:
        while True:
            left = max(self._end, self._consumed) + patience - time.perf_counter()
            if left < 0:
                raise Blocked
            with contextlib.suppress(queue.Empty):
                # A signal that another thread receives does not end the wait.
                return elements.get(timeout=min(left, 0.2))

    def measure(
        self,
        dataset: Any,
        seconds: float,
        consume: Callable[[Any], object] | None,
        warm_up: float,
    ) -> Measurement:
        begin = time.perf_counter()
        warm = begin + warm_up
        end = self._end = warm + seconds
        elements = size = 0
        waited, first, started, cpu = 0.0, 0.0, begin, time.process_time()
        stalled = 0.0
        sampler = threading.Thread(target=self._sample, name="tfd-explain", daemon=True)
        sampler.start()
        try:
            while True:
                self._passes += 1
                iterator, meter = open_iterator(dataset, Consumers())
                with self._lock:
                    self._meter, self._iterator = meter, iterator
                    self._costs.restart()
                    self._read = time.perf_counter()
                any_came = False
                base = (0, 0, 0.0)
                now = time.perf_counter()
                try:
                    for element in iterator:
                        now = time.perf_counter()
                        if not any_came:
                            any_came = True
                            first = first or now - begin
                        if consume is not None:
                            consume(element)
                            now = time.perf_counter()
                        if consume is not None and meter.elements == 1 and self._passes == 1:
                            # Compilation of the first step can take long and does not count.
                            warm, end = now + warm_up, now + warm_up + seconds
                            self._end = end
                        if not self._counting and warm <= now < end:
                            # The warm-up is over: restart the counts.
                            self._counting, started, cpu = True, now, time.process_time()
                            with self._lock:
                                self._costs = Costs(self._last)
                                self._read = now
                            base = (meter.elements, meter.bytes, meter.waited)
                        if now >= end:
                            break
                except TimeLimit:
                    stalled = time.perf_counter() - now
                    now += stalled
                reading = meter.read()
                if self._counting:
                    elements += reading.elements - base[0]
                    size += reading.bytes - base[1]
                    waited += reading.waited - base[2]
                used = time.process_time() - cpu
                is_end = now >= end or self._stopped.is_set() or not any_came
                if is_end and self._ended is not None:
                    self._ended()
                with self._lock:
                    self._iterator = None
                del iterator
                if is_end:
                    break
        finally:
            self._stopped.set()
            sampler.join(5)
            self._iterator = None
        if not self._counting:  # no element arrived during the measurement
            reading = meter.read()
            started, elements, size = begin, reading.elements, reading.bytes
            waited = reading.waited
        return Measurement(
            seconds=now - started,
            elements=elements,
            bytes=size,
            waited=waited,
            first=first or now - begin,
            cpu=used / max(now - started, 1e-9),
            locked=sum(lag > _LATE for lag in self._lags) / max(1, len(self._lags)),
            lanes=tuple(self._costs.lanes()),
            empty=self._passes == 1 and meter.complete and not meter.elements,
            stalled=stalled,
            silent=self._costs.silent(),
        )

    def _sample(self) -> None:
        """Sample the model and the contention for the GIL, and cancel a blocked pipeline."""
        while not self._stopped.is_set():
            began = time.perf_counter()
            time.sleep(_PROBE)
            now = time.perf_counter()
            if self._counting:
                self._lags.append(now - began - _PROBE)
            self._read_model(now)
            if now > self._end + 0.1 and self._meter is not None:
                self._meter.cancel(TimeLimit("the measurement has reached its time limit"))

    def _read_model(self, now: float) -> None:
        every = _MODEL_EVERY_SHORT if self._passes > 1 else _MODEL_EVERY
        with self._lock:
            resource = getattr(self._iterator, "opened", None)
            if now - self._read < every or resource is None:
                return
            model = model_of(resource)
            if model is not None:
                self._costs.add(model, now - self._read)
            self._read = now
