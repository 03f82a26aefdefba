"""What limits a consumer that runs: read from outside about once a second, at no cost to it."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tfd_notebook._compat.tf_data.meter import MetricTotals
from tfd_notebook.data.explain.advice import advise, dataset_variable, more_workers
from tfd_notebook.data.explain.classification import is_busy, slow_worker
from tfd_notebook.data.service.usage import Delivery, Machine, WorkerUtilization, processors, use_in
from tfd_notebook.model.limit import Limit

#: Seconds that an answer rests on.
_WINDOW = 5.0
_KEPT = 720
#: Seconds without a look after which the figures begin anew.
_GAP = 3.0
#: Processors that a data worker uses when it works all the time.
_WORKS = 0.85
_PROBE = 0.002
_PROBES = 5

NOTHING = Limit("none", figures={"elements_per_s": 0.0, "wait_fraction": 0.0, "cpu_cores": 0.0})


class ProcessSampler:
    """What this process as a whole does: its processors, and the interpreter's lock."""

    def __init__(self) -> None:
        self._at, self._cpu = time.perf_counter(), _cpu()
        self._machine = Machine()
        self.cpu = 0.0
        #: Busy cores of this machine, with any process.
        self.machine = 0.0
        self.locked = 0.0

    def sample(self) -> None:
        """Take the sampler since the last time; takes some milliseconds of waiting."""
        now, cpu = time.perf_counter(), _cpu()
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
    """The limit of one consumer, kept up to date by `look`.

    Attributes
    ----------
    limit : Limit
        The latest.
    blind : bool
        Whether the pipeline could not be read.
    history : deque of tuple of float and Limit
        When (seconds since the epoch) and what, one for every 5 seconds, the latest last.
    """

    def __init__(self) -> None:
        self.limit = NOTHING
        self.disabled = False
        self.history: deque[tuple[float, Limit]] = deque(maxlen=_KEPT)
        self._iterator: Callable[[], Any] = lambda: None
        self._dataset: Callable[[], Any] = lambda: None
        self._last: Any = None
        self._delivery: Delivery | None = None
        self._costs: Any = None
        self._began = self._looked = time.perf_counter()
        self._base = MetricTotals()
        self._cpu: list[float] = []
        self._locked: list[float] = []

    @property
    def delivery(self) -> Delivery | None:
        """The parameters of reading through a service of this package; None without one."""
        return self._delivery

    @property
    def through_service(self) -> bool:
        """Whether a tf.data service is in the pipeline; true while that is not known yet."""
        return self._last is None or any(s.kind == "DataService" for s in self._last.walk())

    def look(
        self,
        iterator: Any,
        reading: MetricTotals,
        sampler: ProcessSampler,
        workers: Sequence[WorkerUtilization],
        reads: bool,
    ) -> None:
        """Take in how the consumer is now.

        Parameters
        ----------
        iterator : WatchedIterator or None
        reading : Reading
            Its totals.
        sampler : Pulse
        workers : sequence of WorkerUse
            The data workers of its cluster.
        reads : bool
            Whether somebody uses what comes; otherwise it is only measured.
        """
        from tfd_notebook._compat.tf_data.pipeline_model import model_of, stages_of
        from tfd_notebook.data.explain.cost_model import Costs

        now = time.perf_counter()
        if iterator is None or iterator.opened is None:
            return
        # Weakly: an iterator that nobody else holds has ended.
        if now - self._looked > _GAP:  # paused, or between two loops: that is nobody's limit
            self._dataset = self._iterator = lambda: None
        if iterator is not self._iterator():
            fresh = iterator.dataset is not self._dataset()
            self._iterator = weakref.ref(iterator)
            self._dataset = weakref.ref(iterator.dataset)
            if fresh:
                self._last = stages_of(iterator.dataset, keep=False)
                use = use_in(iterator.dataset)
                self._delivery = None if use is None else use.delivery
                self._costs, self._began = Costs(self._last), now
                self._base, self._cpu, self._locked = reading, [], []
            else:
                self._costs.restart()
        model = model_of(iterator.opened)
        if model is not None:
            self._costs.add(model, now - self._looked)
        self._looked = now
        self._cpu.append(sampler.cpu)
        self._locked.append(sampler.locked)
        seconds = now - self._began
        if seconds < (1.0 if reading.elements > self._base.elements else _WINDOW):
            return
        self.limit = self._judge(reading, seconds, workers, reads, sampler.machine)
        if seconds >= _WINDOW:
            self.history.append((time.time(), self.limit))
            lanes = Costs(self._last)
            if model is not None:
                lanes.add(model, 0.0)
            self._costs, self._began, self._base = lanes, now, reading
            self._cpu, self._locked = [], []

    def _judge(
        self,
        reading: MetricTotals,
        seconds: float,
        workers: Sequence[WorkerUtilization],
        reads: bool,
        machine: float,
    ) -> Limit:
        from tfd_notebook.data.explain.classification import judge, judge_service
        from tfd_notebook.data.explain.cost_model import Measurement

        base, cores = self._base, processors()
        seen = Measurement(
            seconds=seconds,
            elements=reading.elements - base.elements,
            bytes=reading.bytes - base.bytes,
            waited=reading.waited - base.waited,
            first=0.0,
            cpu=sum(self._cpu) / len(self._cpu),
            locked=sum(self._locked) / len(self._locked),
            lanes=tuple(self._costs.lanes()),
        )
        verdict = judge(seen, self._last, cores, reads)
        if verdict.kind == "workers" and workers:
            verdict = judge_service(seen, workers, cores, None)
            host = None if self._delivery is None else self._delivery.host()
            if host is None or host.service_on_this_host:
                verdict = replace(verdict, saturated=verdict.saturated or is_busy(machine, cores))
            else:
                verdict = replace(verdict, saturated=False)
        figures = seen.figures()
        del figures["first_element_s"]
        share = None if verdict.kind == "none" else min(1.0, verdict.share)
        dataset = self._dataset()
        use = use_in(dataset) if verdict.kind == "transfer" and dataset is not None else None
        origin = None if use is None else use.origin
        said = advise(verdict, len(workers), self._delivery, dataset, origin)
        if verdict.kind == "device_copy":
            behind = any(
                s.kind == "Prefetch" and verdict.stage in s.inputs for s in self._last.walk()
            )
            said = "" if behind else f"{said}; "
            name = dataset_variable(dataset, "dataset")
            said = (
                f"{said}what comes before it cannot be seen while it runs: tfd.explain({name}) "
                "tells which of both it is"
            )
        return Limit(verdict.kind, verdict.name, share, figures, said)


def worker_limit(
    task: str,
    workers: Sequence[WorkerUtilization],
    saturated: bool = False,
    delivery: Delivery | None = None,
) -> Limit:
    """Return what limits one data worker: itself, or nothing that it could change.

    Parameters
    ----------
    task : str
    workers : sequence of WorkerUse
    saturated : bool
        Whether the cores that the workers may use are busy. Default false.
    delivery : Delivery, optional
        How the dataset is read that is read now.
    """
    mine = next((worker for worker in workers if worker.task == task), None)
    if mine is None:
        return Limit("none", task)
    figures = {
        name: value
        for name, value in (("cpu_cores", mine.cpu), ("bytes_per_s", mine.bytes_per_s))
        if value is not None
    }
    verdict = slow_worker(workers)
    if verdict is not None and verdict.task == task:
        share, advice = verdict.share, advise(verdict, len(workers))
        return Limit("workers", verdict.name, share, figures, advice)
    if mine.cpu is not None and mine.cpu >= _WORKS:
        advice = more_workers(len(workers), delivery, saturated)
        return Limit("workers", task, min(1.0, mine.cpu), figures, advice)
    return Limit("none", task, None, figures)


def _cpu() -> float:
    times = os.times()
    return times.user + times.system
