"""Which part of a pipeline is the limit, from what was measured: a pure function."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfd_notebook._compat.tf_data.pipeline_model import Stage
from tfd_notebook.data.explain.cost_model import ThreadCost

if TYPE_CHECKING:
    from tfd_notebook.data.explain.cost_model import Measurement
    from tfd_notebook.data.service.usage import WorkerUtilization

#: Below this share of waiting the consumer has what it needs.
_WAITS = 0.1
#: A lane that works less than this is not what the others wait for.
_BUSY = 0.5
#: Share of the processors at which they are the limit of what computes.
_SATURATED = 0.85
#: Share of the time with the interpreter's lock taken from which on Python is the limit.
_LOCKED = 0.4
#: Seconds that handing one element over to Python takes.
_HAND_OVER = 100e-6
#: Share of the time until the first element from which on filling a buffer is the limit.
_FILLING = 0.3
#: Elements below which a buffer fills in no time.
_LARGE_BUFFER = 50


#: A worker that sends less than this share of what the others send is slow.
_SLOW = 0.5
#: Measurements, about one a second, in which it has to be slow.
_STEADY = 3
#: Share of that below which it has no share of the data.
_NO_SHARE = 0.02
#: Share of the time from which on a worker always works.
_WORKS = 0.9
#: Share of that below which other workers wait for it.
_WAIT = 0.7
#: Factor up to which a worker sends as much as the others.
_AS_MUCH = 1.4
#: Processor seconds, in workers and consumer together, that a gRPC transfer takes.
TRANSFER_PER_BYTE = 4e-9
TRANSFER_PER_ELEMENT = 300e-6


@dataclass(frozen=True)
class Bottleneck:
    """What limits.

    Parameters
    ----------
    kind : str
        One of `tfd_notebook.model.limit.DATA_KINDS`.
    share : float
        Share of the time that it takes.
    stage : Stage, optional
    task : str
        The task, where it is one.
    state : str
        That task's state, where that is what is wrong.
    saturated : bool
        Whether the processors are all in use.
    """

    kind: str
    share: float
    stage: Stage | None = None
    task: str = ""
    state: str = ""
    saturated: bool = False

    @property
    def name(self) -> str:
        """The stage or task as users know it."""
        if self.stage is not None:
            return self.stage.name
        return f"{self.task} ({self.state})" if self.state else self.task


def judge(seen: Measurement, last: Stage, cores: int, has_consumer: bool) -> Bottleneck:
    """Return what limits a pipeline that runs in this process."""
    waits = seen.wait_fraction
    if has_consumer and waits < _WAITS:
        return Bottleneck("consumer", 1.0 - waits)
    shuffle = _filled(seen, last)
    filling = seen.first / (seen.first + seen.seconds) if seen.elements else 1.0
    if shuffle is not None and filling > _FILLING:
        return Bottleneck("stage", filling, shuffle)
    if any(s.kind == "DataService" for s in last.walk()):
        lane = next((lane for lane in seen.lanes if _before_service(lane)), None)
        if lane is None or lane.busy < _SATURATED:
            return Bottleneck("workers", waits)
    saturated = seen.cpu >= _SATURATED * cores
    python = [s for s in last.walk() if s.python]
    if python and seen.locked > _LOCKED and not saturated:
        stage = max(python, key=lambda s: _busy_of(seen.lanes, s))
        if _busy_of(seen.lanes, stage) >= _BUSY:
            return Bottleneck("python", max(seen.locked, 0.0), stage)
    copy = next((s for s in last.walk() if s.kind == "CopyToDevice"), None)
    if copy is not None:
        return Bottleneck("device_copy", waits, copy)
    hand_over = seen.rate * _HAND_OVER
    lane = next((lane for lane in seen.lanes if _stage_of(lane) is not None), None)
    if not seen.elements and (lane is None or lane.busy < _BUSY):
        # What is in the middle of its first call has not counted it yet.
        return Bottleneck("source", 1.0, next((s for s in last.walk() if s.is_source), last))
    if lane is None or lane.busy < _BUSY or (hand_over > _BUSY and lane.busy < 0.8):
        if hand_over > _BUSY and not _batched(last):
            return Bottleneck("consumer", min(1.0, hand_over), last)
        return Bottleneck("none", 1.0 - waits)
    # Where all processors are in use it is who uses most of them, whichever lane that is in.
    among = seen.lanes if saturated else (lane,)
    parts = [
        (part.seconds, part.stage, part, each)
        for each in among
        for part in each.parts
        if part.stage is not None
    ]
    _, stage, part, lane = max(parts, key=lambda entry: entry[0])
    source = stage.is_source or (part.inner and part.kind in _READING)
    return Bottleneck("source" if source else "stage", lane.busy, stage, saturated=saturated)


def _filled(seen: Measurement, last: Stage) -> Stage | None:
    """Return the shuffle whose buffer must have filled before the first element came."""
    large = (s for s in last.walk() if s.kind == "Shuffle" and (s.number or 0) >= _LARGE_BUFFER)
    shuffle = next(large, None)
    if shuffle is None:
        return None
    if seen.elements:
        # What comes before it made a buffer's worth of elements meanwhile, not just a few.
        usual = 1 / seen.rate if seen.rate else 0.0
        return shuffle if seen.first >= 3 * usual + 0.2 else None
    # Nothing came: has what comes before it begun to fill it, or does anything work at all?
    given = {id(p.stage): p.elements for lane in seen.lanes for p in lane.parts if p.elements}
    if given.get(id(shuffle.inputs[0]), 0) >= (shuffle.number or 0):
        return None
    begun = any(id(stage) in given for stage in shuffle.inputs[0].walk())
    return shuffle if begun or any(lane.busy >= _BUSY for lane in seen.lanes) else None


def judge_service(
    seen: Measurement, workers: Sequence[WorkerUtilization], cores: int, alone: float | None
) -> Bottleneck:
    """Return which part of a tf.data service is the limit, where the consumer waits for it.

    Parameters
    ----------
    seen : Measured
    workers : sequence of WorkerUse
    cores : int
    alone : float, optional
        Processor seconds that one element takes in a process of its own, without a service.
    """
    odd = slow_worker(workers)
    if odd is not None:
        return odd
    used = sum(worker.cpu or 0.0 for worker in workers) + seen.cpu
    saturated = is_busy(used, cores)
    if alone is None:
        # In this process, where they cannot be told apart, the data is handed over in memory.
        apart = any(worker.cpu is not None for worker in workers)
        alone = _typical(seen, used) if apart else used / seen.rate if seen.rate else 0.0
    spent = used / seen.rate if seen.rate else 0.0
    overhead = max(0.0, 1 - alone / spent) if spent else 0.0
    if overhead > 0.5 and used > 0.5:
        return Bottleneck("transfer", overhead, saturated=saturated)
    return Bottleneck("workers", seen.wait_fraction, saturated=saturated)


def is_busy(used: float, cores: int) -> bool:
    """Return True if `used` cores of `cores` leave no time for more work."""
    return used >= _SATURATED * cores


def slow_worker(workers: Sequence[WorkerUtilization]) -> Bottleneck | None:
    """Return the verdict on a worker that does not keep up with the others, None without one.

    A worker is slow if it keeps sending less than the others, or if it sends no more and the others
    wait for it. The second happens in coordinated reads, where workers serve rounds one after the
    other.
    """
    for worker in workers:
        if worker.state in ("hung", "restarting", "failed", "lost"):
            return Bottleneck("workers", 1.0, task=worker.task, state=worker.state)
    ready = [worker for worker in workers if worker.state == "ready" and worker.bytes_per_s]
    for worker in ready:
        # A worker that sends nothing has no share of this data, or has sent all of it.
        others = [each for each in ready if each is not worker]
        if others and (share := max(_lags(worker, others), _holds_up(worker, others))):
            return Bottleneck("workers", share, task=worker.task)
    return None


def _lags(worker: WorkerUtilization, others: Sequence[WorkerUtilization]) -> float:
    """Return by what share a worker sends less than the others; 0 if it does not always do so.

    In the first seconds, and after a short stop of one of them, averages are not reliable. So each
    of the last measurements has to be low.
    """
    usual = [statistics.median(each.rates[-_STEADY:]) for each in others if _is_steady(each)]
    if not usual or not _is_steady(worker):
        return 0.0
    most = _SLOW * statistics.median(usual)
    latest = worker.rates[-_STEADY:]
    if max(latest) >= most:
        return 0.0
    # Empty answers of a worker that has no share of the data are bytes, too.
    if (
        min(latest) <= _NO_SHARE * most
        or (1.0 if worker.working is None else worker.working) < _SLOW
    ):
        return 0.0
    return 1 - statistics.fmean(latest) / statistics.median(usual)


def _holds_up(worker: WorkerUtilization, others: Sequence[WorkerUtilization]) -> float:
    """Return the share of the time that others wait for a worker that sends no more than they."""
    shares = [each.working for each in others if each.working is not None]
    if worker.working is None or len(shares) < len(others) or not _is_steady(worker):
        return 0.0
    usual = statistics.median(each.bytes_per_s or 0.0 for each in others)
    if (worker.bytes_per_s or 0.0) > _AS_MUCH * usual:  # it works for what it sends
        return 0.0
    if worker.working < _WORKS or max(shares) > _WAIT * worker.working:
        return 0.0
    return 1 - max(shares) / worker.working


def _is_steady(worker: WorkerUtilization) -> bool:
    return len(worker.rates) >= _STEADY


def _typical(seen: Measurement, used: float) -> float:
    """Return what an element costs besides its transfer, where nobody has measured it."""
    if not seen.rate:
        return 0.0
    transfer = TRANSFER_PER_BYTE * seen.bytes / seen.elements + TRANSFER_PER_ELEMENT
    return max(0.0, used / seen.rate - transfer)


def _before_service(lane: ThreadCost) -> bool:
    """Whether a lane works behind the service, in this process."""
    return any(
        part.stage is not None and part.stage.kind != "DataService" for part in lane.parts[:1]
    )


_READING = ("TFRecord", "TextLine", "FixedLengthRecord", "FlatMap", "Interleave")


def _stage_of(lane: ThreadCost) -> Stage | None:
    return next((part.stage for part in lane.parts if part.stage is not None), None)


def _busy_of(lanes: tuple[ThreadCost, ...], stage: Stage) -> float:
    """Return how busy the busiest lane is in which `stage` does most."""
    return max(
        (lane.busy for lane in lanes for part in lane.parts[:1] if part.stage is stage),
        default=0.0,
    )


def _batched(last: Stage) -> bool:
    return any("Batch" in stage.kind for stage in last.walk())
