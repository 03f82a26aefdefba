"""`explain`: run a pipeline for a few seconds and say what limits it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tfd_notebook._compat.tf_data.pipeline_model import READERS, Stage, stages_of
from tfd_notebook.data.consume.observe import check_dataset
from tfd_notebook.data.explain import advice, experiments
from tfd_notebook.data.explain.classification import Bottleneck, judge, judge_service
from tfd_notebook.data.explain.cost_model import Measurement
from tfd_notebook.data.explain.measurement import measure
from tfd_notebook.data.service.usage import Machine, Workers, WorkerUtilization, processors
from tfd_notebook.errors import UsageError
from tfd_notebook.model.limit import Limit

#: Share of the time that goes into looking; the rest is for trying changes.
_LOOK = 0.4
#: Elements of fewer bytes cost more to send than they hold.
_SMALL_BYTES = 20_000
#: Share of waiting from which on a consumer does not have what it needs.
_STARVES = 0.1
#: A change that gains less is not worth a word.
_WORTH = 1.1


def explain(
    dataset: Any,
    seconds: float = 10.0,
    *,
    step: Callable[[Any], object] | None = None,
    step_time: float | None = None,
) -> Limit:
    """Run a pipeline against a consumer and say what limits it.

    Elements are consumed, from the first one on and again where the data ends. Half of the time
    the pipeline runs as it is, in the other half changes to it are tried, where there are some
    that can be made to its graph.

    Parameters
    ----------
    dataset : tf.data.Dataset
        Any; a cluster is not needed.
    seconds : float
        How long to run it. Default 10.
    step : callable, optional
        What consumes an element, such as a training step. Default: nothing, and then the answer is
        what keeps the pipeline from being faster still.
    step_time : float, optional
        Seconds that a consumer would take for an element, instead of `step`.

    Returns
    -------
    Limit

    Raises
    ------
    UsageError
        An argument cannot be meant.
    Exception
        The pipeline's own error.

    Examples
    --------
    >>> tfd.explain(batches, step_time=0.05)  # doctest: +SKIP
    map(decode) (In[4], line 12) is the limit: it is busy 98 % of the time, at 12 elements/s; ...
    """
    check_dataset(dataset)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise UsageError(f"seconds={seconds!r} must be more than 0", fix="use 5 or 10")
    if step is not None and step_time is not None:
        raise UsageError("step or step_time?", fix="give the one that describes your consumer")
    if step_time is not None and (
        not isinstance(step_time, (int, float)) or isinstance(step_time, bool) or step_time < 0
    ):
        raise UsageError(f"step_time={step_time!r} must be 0 or more seconds")
    if step is not None and not callable(step):
        raise UsageError(
            f"step={step!r} is no function", fix="seconds for an element are given as step_time="
        )
    if step_time is not None:
        step = _Sleeper(step_time)
    return _Explanation(dataset, seconds, step, target=step_time is not None).limit()


class _Sleeper:
    """A consumer that takes a given time."""

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
        self._step = step
        self._target = target
        self._cores = processors()
        self._last = stages_of(dataset)
        self._use = next((s.service for s in self._last.walk() if s.service is not None), None)
        host = self._use.delivery.host() if self._use is not None else None
        self._until = time.monotonic() + seconds
        warm_up = min(1.0, 0.15 * seconds)
        workers = Workers(host) if host is not None else None
        self._workers: tuple[WorkerUtilization, ...] = ()
        #: Busy cores of this machine, with any process.
        self._busy = 0.0

        machine = Machine()

        def ended() -> None:
            self._busy = machine.busy()
            if workers is not None:
                self._workers = tuple(workers.read())

        self._seen = measure(
            dataset,
            _LOOK * seconds - warm_up,
            step,
            warm_up=warm_up,
            last=self._last,
            ended=ended,
        )
        # A step that compiled first has taken its time from nobody.
        self._until = max(self._until, time.monotonic() + (1 - _LOOK) * seconds)
        self._alone: Measurement | None = None
        self._figures = self._seen.figures()

    def limit(self) -> Limit:
        """Return the answer."""
        seen = self._seen
        if seen.empty:
            return Limit("none", figures=self._figures, advice="the dataset is empty")
        verdict = judge(seen, self._last, self._cores, self._step is not None)
        if verdict.kind == "workers" and self._use is not None:
            verdict = self._look_at_service()
        if verdict.kind == "device_copy" and verdict.stage is not None:
            verdict = self._look_before(verdict)
        kind = "none" if verdict.kind == "consumer" and self._target else verdict.kind
        change, gain = getattr(self, f"_advise_{kind}")(verdict)
        return Limit(
            kind=kind,
            stage=verdict.name,
            share=None if kind == "none" else min(1.0, verdict.share),
            figures=self._figures,
            advice=change,
            expected_gain=gain,
            service=self._service(kind),
        )

    def _look_at_service(self) -> Bottleneck:
        """Run the workers' pipeline here, without them, and compare what it costs."""
        cost = None
        if self._plain:
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
        return judge_service(self._seen, self._workers, self._cores, cost)

    @property
    def _plain(self) -> bool:
        """Whether what comes is what the workers send, so that their pipeline can be compared."""
        return (
            self._use is not None
            and self._use.origin is not None
            and all(stage.kind in ("Prefetch", "DataService") for stage in self._last.walk())
        )

    def _attempt(self, dataset: Any, seconds: float, warm_up: float) -> Measurement | None:
        """Measure something else than the user's pipeline: it may fail, and then tells nothing."""
        if dataset is None or seconds < 0.2:
            return None
        try:
            found = measure(dataset, seconds, self._step, warm_up=warm_up)
        except Exception:
            return None
        return found if found.rate else None

    def _look_before(self, verdict: Bottleneck) -> Bottleneck:
        """Run what is copied without the copy: that may be as slow."""
        assert verdict.stage is not None
        before = verdict.stage.inputs[0]
        left = self._until - time.monotonic()
        found = measure(
            before.dataset, max(0.5, left / 2 - 0.3), self._step, warm_up=0.3, last=before
        )
        self._figures["elements_per_s_without_copy"] = found.rate
        if self._seen.rate and found.rate / self._seen.rate >= _WORTH:
            return replace(verdict, share=1 - self._seen.rate / found.rate)
        return judge(found, before, self._cores, self._step is not None)

    def _try(self, make: Callable[[], Any], parts: int = 1, in_turn: bool = False) -> float | None:
        """Return how many times as fast a changed dataset is, in a part of the time that is left.

        None where it cannot be made, fails, or brings nothing. Where it is `in_turn`, both are
        tried again and the best of each is compared: what else goes on in a machine slows down
        now the one and now the other, and memory and network more than all else.
        """
        left = (self._until - time.monotonic()) / parts
        try:
            dataset = make()
        except Exception:
            return None
        before: list[float] = [self._seen.rate]
        after: list[float] = []
        turns = (dataset, self._dataset, dataset) if in_turn else (dataset,)
        for each in turns:
            warm_up = min(1.0, left / len(turns) / 3)
            found = self._attempt(each, left / len(turns) - warm_up, warm_up)
            if found is not None:
                (after if each is dataset else before).append(found.rate)
        if not after or not max(before):
            return None
        return max(after) / max(before)

    # One for each kind: what to change, and what that would gain

    def _advise_none(self, verdict: Bottleneck) -> tuple[str, float | None]:
        waits = self._seen.wait_fraction
        if self._step is not None and waits >= _STARVES:
            return f"but the consumer waits {waits:.0%} of the time, for what cannot be seen", None
        if self._target:
            return f"the data keeps up with the given step, which waits {waits:.0%}", None
        return "", None

    def _advise_consumer(self, verdict: Bottleneck) -> tuple[str, float | None]:
        if verdict.stage is not None or self._step is None:
            return advice.SINGLE, None
        alone = measure(self._dataset, max(0.3, self._until - time.monotonic() - 0.5), warm_up=0.5)
        gain = alone.rate / self._seen.rate if self._seen.rate and alone.rate else None
        self._figures["elements_per_s_without_step"] = alone.rate
        return advice.STEP, gain

    def _advise_source(self, verdict: Bottleneck) -> tuple[str, float | None]:
        stage = verdict.stage
        assert stage is not None
        if stage.kind == "Generator":
            return advice.GENERATOR, None
        if stage.kind not in (*READERS, "Interleave", "FlatMap"):
            above = self._above(stage)
            if above is None or above.kind not in ("Interleave", "FlatMap"):
                return advice.SLOW_SOURCE, None
            stage = above
        gain = self._try(lambda: experiments.parallel(self._dataset, stage))
        if gain is None or gain < _WORTH:
            return advice.SLOW_SOURCE, None
        how = {
            "Interleave": "give it num_parallel_calls=tf.data.AUTOTUNE",
            "FlatMap": "write interleave(..., num_parallel_calls=tf.data.AUTOTUNE) for flat_map",
        }.get(stage.kind, "give it num_parallel_reads=tf.data.AUTOTUNE")
        return f"read several files at a time: {how}", gain

    def _advise_stage(self, verdict: Bottleneck) -> tuple[str, float | None]:
        stage = verdict.stage
        assert stage is not None
        if stage.kind == "Shuffle":
            return self._shuffle(stage)
        if stage.kind == "Map":
            gain = self._try(lambda: experiments.parallel(self._dataset, stage))
            if gain is not None and gain >= _WORTH:
                return advice.PARALLEL, gain
            if gain is None and not stage.parallel and not verdict.saturated:
                return advice.PARALLEL, None
        return (advice.ALL_PROCESSORS if verdict.saturated else advice.LESS), None

    def _shuffle(self, stage: Stage) -> tuple[str, float | None]:
        size = stage.number or 0
        smaller = max(1, size // 10)
        said = (
            f"it fills {size:,} elements before the first one comes: shuffle file names or indices "
            f"instead of finished examples, or a buffer of {smaller:,}"
        )
        try:
            changed = experiments.smaller_buffer(self._dataset, stage, smaller)
        except Exception:
            changed = None
        left = max(0.5, self._until - time.monotonic())
        found = self._attempt(changed, left, 0.0)
        if found is None or not self._seen.elements:
            return said, None
        self._figures["first_element_s_then"] = found.first
        return (
            f"{said}, with which the first one came after {found.first:.1f} s instead of "
            f"{self._seen.first:.1f} s",
            None,
        )

    def _advise_python(self, verdict: Bottleneck) -> tuple[str, float | None]:
        cores = self._cores
        gain = min(float(cores), cores / max(self._seen.cpu, self._busy, 1.0), self._most)
        if gain < _WORTH:  # other processes use the cores, or there is one
            return f"{advice.PYTHON}; this machine has no free core for them", None
        return f"{advice.PYTHON}: tfd.Cluster(data_workers={cores})", gain

    def _advise_device_copy(self, verdict: Bottleneck) -> tuple[str, float | None]:
        stage = verdict.stage
        assert stage is not None
        if any(s.kind == "Prefetch" and stage in s.inputs for s in self._last.walk()):
            return "", None
        gain = self._try(lambda: self._dataset.prefetch(2))
        said = advice.copy(self._dataset, "dataset")
        return said, gain if gain is not None and gain >= _WORTH else None

    def _advise_transfer(self, verdict: Bottleneck) -> tuple[str, float | None]:
        use, seen = self._use, self._seen
        if use is None or use.again is None or not self._plain:
            origin = None if use is None else use.origin
            return f"{advice.batch(origin)}, or {advice.MEMORY}", None
        batch = advice.batch(use.origin)
        again = use.again
        small = seen.elements and seen.bytes / seen.elements < _SMALL_BYTES
        if use.compressed:
            parts = 2 if small else 1
            plain = self._try(lambda: again(use.origin, compression=None), parts, True)
            if plain is not None and plain >= _WORTH:
                return advice.PLAIN, plain
        if small:
            # A step takes elements as they are, and would not know what to do with batches.
            batched = None
            if self._step is None:
                batched = self._try(
                    lambda: again(use.origin.batch(advice.BATCH_SIZE)), in_turn=True
                )
            return batch, None if batched is None else batched * advice.BATCH_SIZE
        gain = self._try(lambda: use.origin, in_turn=True)
        return advice.MEMORY, gain if gain is not None and gain >= _WORTH else None

    def _advise_workers(self, verdict: Bottleneck) -> tuple[str, float | None]:
        if verdict.task:
            return advice.look_at(verdict.task), None
        used = sum(worker.cpu or 0.0 for worker in self._workers) + self._seen.cpu
        self._figures["cpu_cores_all"] = used
        count = len(self._workers)
        if not count:
            return advice.SOMEBODYS, None
        assert self._use is not None
        delivery = self._use.delivery
        more = max(count + 1, min(2 * count, 8))
        useful = delivery.can_use(more)
        if useful <= count:
            return advice.more_workers(count, delivery, False), None
        host, cores = delivery.host(), float("inf")
        if host is None or host.service_on_this_host:
            cores = self._cores
        free = cores / max(used, self._busy, 0.05)
        gain = min(useful / count, free, self._most)
        if verdict.saturated or free < _WORTH:
            return advice.ALL_CORES_BUSY, None
        return advice.more_workers(count, delivery, False, useful), gain

    # What the answers share

    @property
    def _most(self) -> float:
        """How many times as fast the consumer could go if it never waited."""
        return 1 / max(1 - self._seen.wait_fraction, 1e-3) if self._step is not None else 1e3

    def _above(self, wanted: Stage) -> Stage | None:
        """Return the stage whose input is `wanted`."""
        return next((s for s in self._last.walk() if wanted in s.inputs), None)

    def _service(self, kind: str) -> str:
        """Say whether a tf.data service would help."""
        alone = self._alone
        if self._use is not None and alone is None:
            return ""
        if kind == "none" and self._step is not None and self._seen.wait_fraction >= _STARVES:
            return ""
        if alone is not None and self._seen.rate:
            faster = alone.rate / self._seen.rate
            if faster >= _WORTH:
                return (
                    f"without a tf.data service the same pipeline is {faster:.1f} times as fast "
                    "on this machine: do not use one here"
                )
            if faster > 1 / _WORTH:
                return "the tf.data service brings nothing with so many workers"
            return f"the tf.data service makes it {1 / faster:.1f} times as fast"
        if kind == "python":
            where = "on this machine too" if self._cores > 1 else "with workers on other machines"
            return f"a tf.data service helps, {where}"
        if kind in ("consumer", "none", "device_copy"):
            return "a tf.data service would only cost"
        if kind == "source":
            return "a tf.data service on this machine would not help"
        if kind == "stage":
            return (
                "a tf.data service helps only with workers on other machines"
                if self._seen.cpu > 0.8 * self._cores
                else "a tf.data service would run it in several processes at a time"
            )
        return ""
