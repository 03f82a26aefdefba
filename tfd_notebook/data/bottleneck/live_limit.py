"""The bottleneck of a running consumer, sampled about once a second without slowing it down."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tfd_notebook._compat.tf_data.meter import MetricTotals
from tfd_notebook._compat.tf_data.pipeline_model import model_of, stages_of
from tfd_notebook.data.bottleneck.advice import (
    advise,
    dataset_variable,
    missing_consumers,
    more_workers,
)
from tfd_notebook.data.bottleneck.classification import (
    is_busy,
    judge,
    judge_service,
    needs_cores,
    slow_worker,
)
from tfd_notebook.data.bottleneck.cost_model import Costs, Measurement
from tfd_notebook.data.bottleneck.usage import (
    Delivery,
    Machine,
    WorkerUtilization,
    processors,
    use_in,
)
from tfd_notebook.model.limit import Limit

#: Seconds of measurements that a result is based on.
_WINDOW = 5.0
_HISTORY_LENGTH = 720
#: Seconds without a sample after which the figures start again.
_MAX_GAP_SECONDS = 3.0
#: Seconds without an element after which the figures cover only the time since the latest one. At
#: least twice the usual time between two elements.
_STALL_SECONDS = 2.0
#: The same while the consumer waits for an element. At least three times the usual time.
_WAIT_SECONDS = 1.0
#: Number of recent times between elements, of which the second longest one counts as usual. One
#: stall alone does not.
_INTERVALS = 10
#: Cores that a data worker uses when it is always busy.
_BUSY_CORES = 0.85
_PROBE = 0.002
_PROBES = 5

NOTHING = Limit("none", figures={"elements_per_s": 0.0, "wait_fraction": 0.0, "cpu_cores": 0.0})


class ProcessSampler:
    """Samples the CPU use of this process and of the machine, and the contention for the GIL."""

    def __init__(self) -> None:
        self._at, self._cpu = time.perf_counter(), time.process_time()
        self._machine = Machine()
        self.cpu = 0.0
        #: Busy cores of this host, including all processes.
        self.machine = 0.0
        self.locked = 0.0

    def sample(self) -> None:
        """Measure since the previous call. Sleeps a few milliseconds to detect GIL contention."""
        now, cpu = time.perf_counter(), time.process_time()
        if now > self._at:
            self.cpu = (cpu - self._cpu) / (now - self._at)
        self._at, self._cpu = now, cpu
        self.machine = self._machine.busy()
        late = 0
        for _ in range(_PROBES):
            began = time.perf_counter()
            time.sleep(_PROBE)
            late += time.perf_counter() - began - _PROBE > 0.0005
        self.locked = late / _PROBES


class LiveLimit:
    """The bottleneck of one consumer, updated by `update`.

    Attributes
    ----------
    limit : Limit
        The latest bottleneck.
    disabled : bool
        Whether the pipeline could not be read.
    history : deque of tuple of float and Limit
        Time (seconds since the epoch) and bottleneck for every 5 seconds, latest last.
    """

    def __init__(self) -> None:
        self.limit = NOTHING
        self.disabled = False
        self.history: deque[tuple[float, Limit]] = deque(maxlen=_HISTORY_LENGTH)
        self._iterator: Callable[[], Any] = lambda: None
        self._dataset: Callable[[], Any] = lambda: None
        self._last: Any = None
        self._delivery: Delivery | None = None
        self._costs: Any = None
        self._began = self._sampled = time.perf_counter()
        self._base = self._latest = MetricTotals()
        #: Time of the latest element, and the latest times between elements.
        self._moved = self._began
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)
        self._cpu: list[float] = []
        self._locked: list[float] = []

    @property
    def delivery(self) -> Delivery | None:
        """The parameters of reading through a service. None without a service of this package."""
        return self._delivery

    @property
    def through_service(self) -> bool:
        """True if the pipeline contains a tf.data service. Also true while unknown."""
        return self._last is None or any(s.kind == "DataService" for s in self._last.walk())

    def update(
        self,
        iterator: Any,
        reading: MetricTotals,
        sampler: ProcessSampler,
        workers: Sequence[WorkerUtilization],
        reads: bool,
        waiting: float,
    ) -> None:
        """Record a sample of the consumer, and update `limit`.

        Parameters
        ----------
        iterator : WatchedIterator or None
        reading : MetricTotals
            Its totals.
        sampler : ProcessSampler
        workers : sequence of WorkerUtilization
            The data workers of its cluster.
        reads : bool
            Whether the elements are used. Otherwise the consumer only measures the pipeline.
        waiting : float
            Seconds for which it has waited for the next element. 0 if it does not wait.
        """
        now = time.perf_counter()
        if iterator is None or iterator.opened is None:
            return
        # Weak references: an iterator that is referenced only here has ended.
        # Paused or between epochs: no limit to attribute.
        if now - self._sampled > _MAX_GAP_SECONDS:
            self._dataset = self._iterator = lambda: None
        if iterator is not self._iterator():
            is_new = iterator.dataset is not self._dataset()
            self._iterator = weakref.ref(iterator)
            self._dataset = weakref.ref(iterator.dataset)
            if is_new:
                self._last = stages_of(iterator.dataset, keep=False)
                use = use_in(iterator.dataset)
                self._delivery = None if use is None else use.delivery
                self.limit = NOTHING
                self._costs, self._moved = Costs(self._last), now
                self._intervals.clear()
                self._latest = reading
                self._restart(now, reading)
            else:
                self._costs.restart()
        model = model_of(iterator.opened)
        if model is not None:
            self._costs.add(model, now - self._sampled)
        added = reading.elements - self._latest.elements
        usual = self._usual_interval
        quiet = max(_STALL_SECONDS, 2 * usual)
        stalled = bool(self._intervals) and waiting >= max(_WAIT_SECONDS, 3 * usual)
        if added > 0:
            # After a sample without elements, they have arrived together.
            interval = now - self._moved
            self._intervals.append(interval / added if self._moved == self._sampled else interval)
            self._moved, self._latest, stalled = now, reading, False
        elif self._base.elements < reading.elements and (stalled or now - self._moved >= quiet):
            self._restart(self._moved, self._latest)
        self._sampled = now
        self._cpu.append(sampler.cpu)
        self._locked.append(sampler.locked)
        seconds = now - self._began
        least = 1.0 if reading.elements > self._base.elements else min(_WINDOW, quiet)
        if seconds < least and not stalled:
            return
        self.limit = self._judge(reading, seconds, workers, reads, sampler.machine)
        if seconds >= _WINDOW:
            self.history.append((time.time(), self.limit))
            costs = Costs(self._last)
            if model is not None:
                costs.add(model, 0.0)
            self._costs = costs
            self._restart(now, reading)

    @property
    def _usual_interval(self) -> float:
        return sorted(self._intervals)[-2:][0] if self._intervals else 0.0

    def _restart(self, now: float, reading: MetricTotals) -> None:
        self._began, self._base = now, reading
        self._cpu, self._locked = [], []

    def _judge(
        self,
        reading: MetricTotals,
        seconds: float,
        workers: Sequence[WorkerUtilization],
        reads: bool,
        machine: float,
    ) -> Limit:
        base, cores = self._base, processors()
        measurement = Measurement(
            seconds=seconds,
            elements=reading.elements - base.elements,
            bytes=reading.bytes - base.bytes,
            waited=reading.waited - base.waited,
            first=0.0,
            cpu=sum(self._cpu) / len(self._cpu),
            locked=sum(self._locked) / len(self._locked),
            lanes=tuple(self._costs.lanes()),
        )
        bottleneck = judge(measurement, self._last, cores, reads)
        if bottleneck.kind == "workers" and workers:
            bottleneck = judge_service(measurement, workers, cores, None, self._delivery)
            cluster = None if self._delivery is None else self._delivery.cluster()
            if cluster is None or cluster.service_on_this_host:
                busy = is_busy(machine, cores) and needs_cores(workers, measurement.cpu)
                bottleneck = replace(bottleneck, saturated=bottleneck.saturated or busy)
            else:
                bottleneck = replace(bottleneck, saturated=False)
        figures = measurement.figures()
        del figures["first_element_s"]
        share = None if bottleneck.kind == "none" else min(1.0, bottleneck.share)
        if not measurement.elements and not bottleneck.state:
            text = missing_consumers(self._delivery) if bottleneck.kind == "workers" else ""
            return Limit(bottleneck.kind, "" if text else bottleneck.name, share, figures, text)
        dataset = self._dataset()
        use = use_in(dataset) if bottleneck.kind == "transfer" and dataset is not None else None
        origin = None if use is None else use.origin
        text = advise(bottleneck, len(workers), self._delivery, dataset, origin)
        if bottleneck.kind == "device_copy":
            prefetched = any(
                s.kind == "Prefetch" and bottleneck.stage in s.inputs for s in self._last.walk()
            )
            name = dataset_variable(dataset, "dataset")
            hint = (
                f"run tfd.explain({name}), which also measures the stages before the copy "
                "without it"
            )
            text = hint if prefetched else f"{text}, or {hint}"
        here = measurement.after_service(self._last)
        return Limit(bottleneck.kind, bottleneck.name, share, figures, text, service=here)


def worker_limit(
    task: str,
    workers: Sequence[WorkerUtilization],
    saturated: bool = False,
    delivery: Delivery | None = None,
    now: Limit | None = None,
) -> Limit:
    """Return the bottleneck of one data worker, or ``none`` if it is not the bottleneck.

    Parameters
    ----------
    task : str
    workers : sequence of WorkerUtilization
    saturated : bool
        Whether the cores that the workers may use are busy. Default false.
    delivery : Delivery, optional
        Parameters of the dataset that is read now.
    now : Limit, optional
        The bottleneck of its consumer. Only data workers that limit it get advice. None if unknown.
    """
    mine = next((worker for worker in workers if worker.task == task), None)
    if mine is None:
        return Limit("none", task)
    figures = {
        name: value
        for name, value in (("cpu_cores", mine.cpu), ("bytes_per_s", mine.bytes_per_s))
        if value is not None
    }
    bottleneck = slow_worker(workers, delivery)
    if bottleneck is not None and bottleneck.task == task:
        share, advice = bottleneck.share, advise(bottleneck, len(workers))
        return Limit("workers", bottleneck.name, share, figures, advice)
    limits = now is None or (now.kind == "workers" and now.figures["elements_per_s"] > 0)
    if limits and mine.cpu is not None and mine.cpu >= _BUSY_CORES:
        advice = more_workers(len(workers), delivery, saturated)
        return Limit("workers", task, min(1.0, mine.cpu), figures, advice)
    return Limit("none", task, None, figures)
