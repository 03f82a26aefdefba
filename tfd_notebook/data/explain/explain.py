"""`explain`: run a pipeline for a few seconds and report its bottleneck."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tfd_notebook._compat.tf_data.pipeline_model import (
    READERS,
    Stage,
    calls,
    running_function,
    stages_of,
)
from tfd_notebook.data.bottleneck import advice
from tfd_notebook.data.bottleneck.classification import (
    Bottleneck,
    judge,
    judge_service,
    needs_cores,
)
from tfd_notebook.data.bottleneck.cost_model import Measurement
from tfd_notebook.data.bottleneck.usage import Machine, Workers, WorkerUtilization, processors
from tfd_notebook.data.consume.observe import check_dataset
from tfd_notebook.data.explain import experiments
from tfd_notebook.data.explain.measurement import Blocked, measure
from tfd_notebook.errors import UsageError
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.spec import check_seconds
from tfd_notebook.model.stacks import BlockedFunction

#: Share of the time for measuring the pipeline. The rest is for experiments.
_MEASURING_SHARE = 0.4
#: Seconds after which a Python function in a data worker counts as blocked.
_BLOCKED_SECONDS = 1.0
#: Elements of fewer bytes cost more to send than their content.
_SMALL_BYTES = 20_000
#: Share of waiting above which the data does not keep up with the consumer.
_STARVING_SHARE = 0.1
#: Smallest gain for which a change is suggested.
_MIN_GAIN = 1.1


def explain(
    dataset: Any,
    seconds: float = 10.0,
    *,
    step: Callable[[Any], object] | None = None,
    step_time: float | None = None,
) -> Limit:
    """Run a pipeline for a few seconds and report its bottleneck.

    Elements are consumed from the first one on, and again from the start if the data ends. The
    pipeline runs unchanged in 40 % of the time. In the rest, `explain` tries changes that it can
    make to the graph. If a Python function does not return, `explain` ends after `seconds` plus
    about one, and names it.

    Parameters
    ----------
    dataset : tf.data.Dataset
        Any dataset, with or without a cluster.
    seconds : float
        Duration of the run. Default 10.
    step : callable, optional
        Consumes an element, such as a training step. Default: no work, so that the result is the
        part of the pipeline that limits its maximum speed.
    step_time : float, optional
        Seconds that a consumer needs for an element, instead of `step`.

    Returns
    -------
    Limit

    Raises
    ------
    UsageError
        An argument is invalid.
    Exception
        The pipeline's own error.

    Examples
    --------
    >>> tfd.explain(batches, step_time=0.05)  # doctest: +SKIP
    Bottleneck: the stage map(decode) (In[4], line 12) (busy 98 % of the time, 12 elements/s). ...
    """
    check_dataset(dataset)
    check_seconds("seconds", seconds)
    if step is not None and step_time is not None:
        raise UsageError(
            "step and step_time are mutually exclusive",
            fix="pass the one that describes your consumer",
        )
    if step_time is not None:
        check_seconds("step_time", step_time, 0)
    if step is not None and not callable(step):
        raise UsageError(
            f"invalid step={step!r}: expected a function",
            fix="pass the seconds for an element as step_time=",
        )
    if step_time is not None:
        step = _Sleeper(step_time)
    return _Explanation(dataset, seconds, step, target=step_time is not None).limit()


class _Sleeper:
    """A consumer that takes a fixed time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, element: Any) -> None:
        time.sleep(self._seconds)


class _Explanation:
    def __init__(
        self,
        dataset: Any,
        seconds: float,
        step: Callable[[Any], object] | None,
        target: bool,
    ) -> None:
        self._dataset = dataset
        self._seconds = seconds
        self._step = step
        self._target = target
        self._cores = processors()
        self._last = stages_of(dataset)
        self._use = next((s.service for s in self._last.walk() if s.service is not None), None)
        cluster = self._use.delivery.cluster() if self._use is not None else None
        self._until = time.monotonic() + seconds
        warm_up = min(1.0, 0.15 * seconds)
        workers = Workers(cluster) if cluster is not None else None
        self._workers: tuple[WorkerUtilization, ...] = ()
        #: Busy cores of this host, including all processes.
        self._busy = 0.0

        self._figures: dict[str, float] = {"elements_per_s": 0.0}
        self._alone: Measurement | None = None
        machine = Machine()

        def ended() -> None:
            self._busy = machine.busy()
            if workers is not None:
                self._workers = tuple(workers.read())

        self._measure = partial(
            measure,
            dataset,
            _MEASURING_SHARE * seconds - warm_up,
            step,
            warm_up=warm_up,
            last=self._last,
            ended=ended,
            patience=(1 - _MEASURING_SHARE) * seconds + 1,
        )

    def limit(self) -> Limit:
        """Return the bottleneck, the advice and the expected gain."""
        try:
            self._measurement = self._measure()
            return self._limit()
        except Blocked:
            return self._blocked()

    def _blocked(self) -> Limit:
        """Return the function that has not returned, or the servers that do not answer."""
        origin = self._use.origin if self._use is not None else None
        found = running_function(self._last)
        if found is None and origin is not None:
            found = running_function(stages_of(origin))
        if found is not None:
            stage, function, _ = found
            kind = "source" if stage.is_source else "stage"
            return Limit(kind, stage.name, None, self._figures, advice.blocked(function))
        if self._use is not None:
            waiting, others = self._blocked_in_workers(_BLOCKED_SECONDS)
            # The dispatcher may still list the iterator that was measured.
            missing = advice.missing_consumers(self._use.delivery, unregistered=1)
            text = advice.blocked(str(waiting[0])) if waiting else missing
            text = text or (advice.occupied(str(others[0])) if others else advice.NO_ANSWER)
            return Limit("workers", figures=self._figures, advice=text)
        return Limit("none", figures=self._figures, advice=advice.BLOCKED)

    def _blocked_in_workers(
        self, seconds: float
    ) -> tuple[list[BlockedFunction], list[BlockedFunction]]:
        """Return the functions that block data workers: of this pipeline, and of others."""
        cluster = None if self._use is None else self._use.delivery.cluster()
        if cluster is None or self._use is None:
            return [], []
        found = cluster.blocked_functions(seconds)
        if self._use.origin is None:
            return list(found), []
        last = stages_of(self._use.origin)
        own = [each for each in found if calls(last, each.function, each.file)]
        return own, [each for each in found if each not in own]

    def _is_blocked(self) -> bool:
        """Return True if a function does not return in the rest of the time."""
        if self._measurement.stalled < _MEASURING_SHARE * self._seconds / 2:
            return False
        left = max(_BLOCKED_SECONDS, self._until - time.monotonic())
        if self._blocked_in_workers(left)[0]:
            return True
        found = first = running_function(self._last)
        while found is not None and first is not None and found[2] is first[2]:
            if time.monotonic() > self._until:
                return True
            time.sleep(0.05)
            found = running_function(self._last)
        return False

    def _limit(self) -> Limit:
        measurement = self._measurement
        if self._step is not None:
            # Compilation during warm-up does not count against the time budget.
            left = (1 - _MEASURING_SHARE) * self._seconds
            self._until = max(self._until, time.monotonic() + left)
        self._figures = measurement.figures()
        if measurement.empty:
            return Limit("none", figures=self._figures, advice="the dataset is empty")
        if (self._use is not None and not measurement.elements) or self._is_blocked():
            return self._blocked()
        bottleneck = judge(measurement, self._last, self._cores, self._step is not None)
        if bottleneck.kind == "workers" and self._use is not None:
            bottleneck = self._classify_service()
        if bottleneck.kind == "device_copy" and bottleneck.stage is not None:
            bottleneck = self._classify_copy(bottleneck)
        kind = "none" if bottleneck.kind == "consumer" and self._target else bottleneck.kind
        change, gain, service = "", None, ""
        fills = bottleneck.stage is not None and bottleneck.stage.kind == "Shuffle"
        if measurement.elements or kind == "none" or fills:
            change, gain = getattr(self, f"_advise_{kind}")(bottleneck)
            service = self._service(kind, gain)
        elif bottleneck.stage is not None and bottleneck.stage is measurement.silent:
            change = advice.silent(bottleneck.stage.kind)
        return Limit(
            kind=kind,
            stage=bottleneck.name,
            share=None if kind == "none" else min(1.0, bottleneck.share),
            figures=self._figures,
            advice=change,
            expected_gain=gain,
            service=service,
        )

    def _classify_service(self) -> Bottleneck:
        """Compare the cost of the service with that of the same pipeline in this process."""
        cost = None
        if self._is_unchanged:
            assert self._use is not None
            left = self._until - time.monotonic()
            self._alone = self._attempt(self._use.origin, left / 3 - 0.3, 0.3)
        if self._alone is not None:
            self._figures["elements_per_s_without_service"] = self._alone.rate
            cost = self._alone.cpu / self._alone.rate
        for worker in self._workers:
            if worker.cpu is not None:
                self._figures[f"cpu_cores {worker.task}"] = worker.cpu
            if worker.bytes_per_s is not None:
                self._figures[f"bytes_per_s {worker.task}"] = worker.bytes_per_s
        delivery = self._use.delivery if self._use is not None else None
        while True:
            self._read_replies()
            found = judge_service(self._measurement, self._workers, self._cores, cost, delivery)
            # A worker that has replied late once may stop again. No experiment follows.
            judged = found.kind != "workers" or found.task or not any(w.late for w in self._workers)
            if judged or time.monotonic() > self._until:
                return found
            time.sleep(0.1)

    def _read_replies(self) -> None:
        """Read which of the latest replies of the data workers were late."""
        cluster = None if self._use is None else self._use.delivery.cluster()
        late = {} if cluster is None else {row.task: row.late for row in cluster.data_workers()}
        self._workers = tuple(
            replace(worker, late=late.get(worker.task, worker.late)) for worker in self._workers
        )

    @property
    def _is_unchanged(self) -> bool:
        """True if no stage after the service changes its elements."""
        return (
            self._use is not None
            and self._use.origin is not None
            and all(stage.kind in ("Prefetch", "DataService") for stage in self._last.walk())
        )

    def _attempt(self, dataset: Any, seconds: float, warm_up: float) -> Measurement | None:
        """Measure a changed pipeline. Return None if it fails."""
        if dataset is None or seconds < 0.2:
            return None
        try:
            result = measure(dataset, seconds, self._step, warm_up=warm_up)
        except Exception:
            return None
        return result if result.rate else None

    def _classify_copy(self, bottleneck: Bottleneck) -> Bottleneck:
        """Run the stages before a copy to a device. Without the copy they may be as slow."""
        assert bottleneck.stage is not None
        before = bottleneck.stage.inputs[0]
        left = self._until - time.monotonic()
        result = measure(
            before.dataset, max(0.5, left / 2 - 0.3), self._step, warm_up=0.3, last=before
        )
        self._figures["elements_per_s_without_copy"] = result.rate
        if self._measurement.rate and result.rate / self._measurement.rate >= _MIN_GAIN:
            return replace(bottleneck, share=1 - self._measurement.rate / result.rate)
        return judge(result, before, self._cores, self._step is not None)

    def _try(
        self, make: Callable[[], Any], parts: int = 1, alternate: bool = False
    ) -> float | None:
        """Return the gain of a changed dataset, or None if it fails or cannot be created.

        The experiment takes one of `parts` equal parts of the remaining time. With `alternate`,
        the original runs again between two runs of the change, and the best runs are compared.
        Other processes slow down single runs, in particular by their use of memory and network.
        """
        left = (self._until - time.monotonic()) / parts
        try:
            dataset = make()
        except Exception:
            return None
        before: list[float] = [self._measurement.rate]
        after: list[float] = []
        runs = (dataset, self._dataset, dataset) if alternate else (dataset,)
        for each in runs:
            warm_up = min(1.0, left / len(runs) / 3)
            result = self._attempt(each, left / len(runs) - warm_up, warm_up)
            if result is not None:
                (after if each is dataset else before).append(result.rate)
        if not after or not max(before):
            return None
        return max(after) / max(before)

    # One method per kind of bottleneck. Each returns the advice and the expected gain.

    def _advise_none(self, bottleneck: Bottleneck) -> tuple[str, float | None]:
        waits = self._measurement.wait_fraction
        if self._step is not None and waits >= _STARVING_SHARE:
            return (
                f"the consumer waits {100 * waits:.0f} % of the time, for an unknown reason",
                None,
            )
        if self._target:
            share = f"{100 * waits:.0f} % of the time"
            return f"the data keeps up with the given step, which waits {share}", None
        return "", None

    def _advise_consumer(self, bottleneck: Bottleneck) -> tuple[str, float | None]:
        if bottleneck.stage is not None or self._step is None:
            return advice.single(self._dataset), None
        alone = measure(self._dataset, max(0.3, self._until - time.monotonic() - 0.5), warm_up=0.5)
        gain = (
            alone.rate / self._measurement.rate if self._measurement.rate and alone.rate else None
        )
        self._figures["elements_per_s_without_step"] = alone.rate
        return advice.STEP, gain

    def _advise_source(self, bottleneck: Bottleneck) -> tuple[str, float | None]:
        stage = bottleneck.stage
        assert stage is not None
        if stage.kind == "Generator":
            return advice.GENERATOR, None
        if stage.kind not in (*READERS, "Interleave", "FlatMap"):
            above = next((s for s in self._last.walk() if stage in s.inputs), None)
            if above is None or above.kind not in ("Interleave", "FlatMap"):
                return advice.SLOW_SOURCE, None
            stage = above
        gain = self._try(lambda: experiments.parallel(self._dataset, stage))
        if gain is None or gain < _MIN_GAIN:
            return advice.SLOW_SOURCE, None
        how = {
            "Interleave": "pass num_parallel_calls=tf.data.AUTOTUNE",
            "FlatMap": "replace flat_map by interleave(..., num_parallel_calls=tf.data.AUTOTUNE)",
        }.get(stage.kind, "pass num_parallel_reads=tf.data.AUTOTUNE")
        return f"read several files at a time: {how}", gain

    def _advise_stage(self, bottleneck: Bottleneck) -> tuple[str, float | None]:
        stage = bottleneck.stage
        assert stage is not None
        if stage.kind == "Shuffle":
            return self._shuffle(stage)
        if stage.kind == "Map":
            gain = self._try(lambda: experiments.parallel(self._dataset, stage))
            if gain is not None and gain >= _MIN_GAIN:
                return advice.PARALLEL, gain
            if gain is None and not stage.parallel and not bottleneck.saturated:
                return advice.PARALLEL, None
        return (advice.ALL_PROCESSORS if bottleneck.saturated else advice.LESS), None

    def _shuffle(self, stage: Stage) -> tuple[str, float | None]:
        size = stage.number or 0
        smaller = max(1, size // 10)
        text = (
            f"shuffle file names or indices instead of finished examples, or use a buffer of "
            f"{smaller:,}: the current one reads {size:,} elements before it returns the first"
        )
        try:
            changed = experiments.smaller_buffer(self._dataset, stage, smaller)
        except Exception:
            changed = None
        left = max(0.5, self._until - time.monotonic())
        result = self._attempt(changed, left, 0.0)
        if result is None or not self._measurement.elements:
            return text, None
        self._figures["first_element_s_then"] = result.first
        return (
            f"{text}. With the smaller buffer, the first element arrived after "
            f"{result.first:.1f} s instead of {self._measurement.first:.1f} s",
            None,
        )

    def _advise_python(self, bottleneck: Bottleneck) -> tuple[str, float | None]:
        cores = self._cores
        gain = min(
            float(cores), cores / max(self._measurement.cpu, self._busy, 1.0), self._max_gain
        )
        if gain < _MIN_GAIN:  # other processes use the cores, or the host has only one
            return f"{advice.PYTHON}. This host has no free core for data workers", None
        return f"{advice.PYTHON}: tfd.Cluster(data_workers={cores})", gain

    def _advise_device_copy(self, bottleneck: Bottleneck) -> tuple[str, float | None]:
        stage = bottleneck.stage
        assert stage is not None
        if any(s.kind == "Prefetch" and stage in s.inputs for s in self._last.walk()):
            return "", None
        gain = self._try(lambda: self._dataset.prefetch(2))
        text = advice.copy(self._dataset, "dataset")
        return text, gain if gain is not None and gain >= _MIN_GAIN else None

    def _advise_transfer(self, bottleneck: Bottleneck) -> tuple[str, float | None]:
        use, measurement = self._use, self._measurement
        if use is None or use.distribute_again is None or not self._is_unchanged:
            origin = None if use is None else use.origin
            return f"{advice.batch(origin)}, or {advice.MEMORY}", None
        batch = advice.batch(use.origin)
        distribute_again = use.distribute_again
        small = measurement.elements and measurement.bytes / measurement.elements < _SMALL_BYTES
        if use.compressed:
            parts = 2 if small else 1
            plain = self._try(lambda: distribute_again(use.origin, compression=None), parts, True)
            if plain is not None and plain >= _MIN_GAIN:
                return advice.PLAIN, plain
        if small:
            # A step expects single elements and cannot process batches.
            batched = None
            if self._step is None:
                batched = self._try(
                    lambda: distribute_again(use.origin.batch(advice.BATCH_SIZE)), alternate=True
                )
            return batch, None if batched is None else batched * advice.BATCH_SIZE
        gain = self._try(lambda: use.origin, alternate=True)
        return advice.MEMORY, gain if gain is not None and gain >= _MIN_GAIN else None

    def _advise_workers(self, bottleneck: Bottleneck) -> tuple[str, float | None]:
        if bottleneck.task:
            return advice.inspect_worker(bottleneck.task), None
        used = sum(worker.cpu or 0.0 for worker in self._workers) + self._measurement.cpu
        self._figures["cpu_cores_all"] = used
        count = len(self._workers)
        if not count:
            return advice.EXTERNAL_WORKERS, None
        assert self._use is not None
        delivery = self._use.delivery
        more = max(count + 1, min(2 * count, 8))
        useful = delivery.can_use(more)
        if useful <= count:
            return advice.more_workers(count, delivery, False), None
        cluster, cores = delivery.cluster(), float("inf")
        if cluster is None or cluster.service_on_this_host:
            cores = self._cores
        busy = max(used, self._busy) if needs_cores(self._workers, self._measurement.cpu) else 0.0
        free = cores / max(busy, 0.05)
        gain = min(useful / count, free, self._max_gain)
        if bottleneck.saturated or free < _MIN_GAIN:
            return advice.ALL_CORES_BUSY, None
        return advice.more_workers(count, delivery, False, useful), gain

    # Shared by these methods

    @property
    def _max_gain(self) -> float:
        """The gain of a consumer that never waits."""
        if self._step is None:
            return 1e3
        return 1 / max(1 - self._measurement.wait_fraction, 1e-3)

    def _service(self, kind: str, gain: float | None) -> str:
        """Return whether a tf.data service helps, as a clause about it. Empty if unknown.

        `gain` is the expected gain of the advice for `kind`.
        """
        alone = self._alone
        if self._use is not None and alone is None:
            return self._measurement.after_service(self._last)
        if (
            kind == "none"
            and self._step is not None
            and self._measurement.wait_fraction >= _STARVING_SHARE
        ):
            return ""
        if alone is not None and self._measurement.rate:
            faster = alone.rate / self._measurement.rate
            if faster >= _MIN_GAIN:
                return f"not worth it here. Without it, this pipeline runs {faster:.1f}x faster"
            if faster > 1 / _MIN_GAIN:
                return "no gain with the current number of data workers"
            return f"it makes the pipeline {1 / faster:.1f}x faster"
        if kind == "python":
            return (
                "it would help, even on this host"
                if gain is not None
                else "it would help, with data workers on other hosts"
            )
        if kind in ("consumer", "none", "device_copy"):
            return "it would only add overhead"
        if kind == "source":
            return "on this host, it would not help"
        if kind == "stage":
            return (
                "it would only help with data workers on other hosts"
                if self._measurement.cpu > 0.8 * self._cores
                else "it would run the stage in several processes"
            )
        return ""
