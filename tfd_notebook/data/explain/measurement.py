"""Runs a pipeline for a few seconds and records the use of time by its stages."""

from __future__ import annotations

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


def measure(
    dataset: Any,
    seconds: float,
    consume: Callable[[Any], object] | None = None,
    warm_up: float = 1.0,
    last: Stage | None = None,
    ended: Callable[[], object] | None = None,
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

    Raises
    ------
    Exception
        The pipeline's error, or the consumer's.
    """
    return _Run(last or stages_of(dataset), ended).measure(dataset, seconds, consume, warm_up)


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
        self._end = 0.0

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
                    now = time.perf_counter()
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
