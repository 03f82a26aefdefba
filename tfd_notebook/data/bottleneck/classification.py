"""Classification of a pipeline's bottleneck from measurements, as pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfd_notebook._compat.tf_data.pipeline_model import Stage
from tfd_notebook.data.bottleneck.cost_model import LaneCost
from tfd_notebook.model.snapshot import JUDGED_REPLIES

if TYPE_CHECKING:
    from tfd_notebook.data.bottleneck.cost_model import Measurement
    from tfd_notebook.data.bottleneck.usage import Delivery, WorkerUtilization

#: Share of waiting below which the data keeps up with the consumer.
_MAX_WAIT_FRACTION = 0.1
#: Share of busy time below which a lane is not a bottleneck.
_BUSY = 0.5
#: Share of the cores in use above which the CPU is saturated.
_SATURATED = 0.85
#: Cores below which a data worker does not compute, but sleeps or waits.
_COMPUTING = 0.1
#: Share of the time with a contended GIL above which Python is the bottleneck.
_GIL_CONTENTION = 0.4
#: Seconds that passing one element to Python takes.
_TRANSFER_SECONDS = 100e-6
#: Share of the time until the first element above which filling a buffer is the bottleneck.
_FILLING = 0.3
#: Number of elements below which the time to fill a buffer is negligible.
_LARGE_BUFFER = 50

#: A worker is slow if it sends less than this share of the others' rate.
_SLOW = 0.5
#: Number of measurements, about one per second, in which it must be slow.
_STEADY = 3
#: Share of that threshold below which it has no share of the data.
_NO_SHARE = 0.02
#: Share of the time above which a worker counts as always busy.
_ALWAYS_BUSY = 0.9
#: Share of that worker's busy time below which other workers wait for it.
_MAX_PEER_BUSY_SHARE = 0.7
#: Factor up to which a worker's rate counts as equal to that of the others.
_EQUAL_RATE_FACTOR = 1.4
#: Number of late replies, beyond those of the others, of a worker that stops again and again. One
#: that has stopped once replies late once.
_MORE_LATE_REPLIES = 2
#: CPU seconds, in workers and consumer together, that a gRPC transfer takes.
TRANSFER_PER_BYTE = 4e-9
TRANSFER_PER_ELEMENT = 300e-6


@dataclass(frozen=True)
class Bottleneck:
    """The classified bottleneck of a pipeline.

    Parameters
    ----------
    kind : str
        One of `tfd_notebook.model.limit.DATA_KINDS`.
    share : float
        Share of the time that it takes.
    stage : Stage, optional
    task : str
        The task, if the bottleneck is one.
    state : str
        State of the task, if that is the cause.
    saturated : bool
        Whether all cores are in use, and it needs them.
    """

    kind: str
    share: float
    stage: Stage | None = None
    task: str = ""
    state: str = ""
    saturated: bool = False

    @property
    def name(self) -> str:
        """The display name of the stage or task."""
        if self.stage is not None:
            return self.stage.name
        return f"{self.task} ({self.state})" if self.state else self.task


def judge(measurement: Measurement, last: Stage, cores: int, has_consumer: bool) -> Bottleneck:
    """Return the bottleneck of a pipeline that runs in this process."""
    waits = measurement.wait_fraction
    if has_consumer and waits < _MAX_WAIT_FRACTION:
        return Bottleneck("consumer", 1.0 - waits)
    shuffle = _filled_shuffle(measurement, last)
    filling = (
        measurement.first / (measurement.first + measurement.seconds)
        if measurement.elements
        else 1.0
    )
    if shuffle is not None and filling > _FILLING:
        return Bottleneck("stage", filling, shuffle)
    if any(s.kind == "DataService" for s in last.walk()):
        # The lanes of this process, after the service.
        own = (
            lane
            for lane in measurement.lanes
            if lane.parts and lane.parts[0].stage and lane.parts[0].stage.kind != "DataService"
        )
        lane = next(own, None)
        if lane is None or lane.busy < _SATURATED:
            return Bottleneck("workers", waits)
    saturated = measurement.cpu >= _SATURATED * cores
    python = [s for s in last.walk() if s.python]
    if python and measurement.locked > _GIL_CONTENTION and not saturated:
        stage = max(python, key=lambda s: _busy_of(measurement.lanes, s))
        if _busy_of(measurement.lanes, stage) >= _BUSY:
            return Bottleneck("python", max(measurement.locked, 0.0), stage)
    copy = next((s for s in last.walk() if s.kind == "CopyToDevice"), None)
    if copy is not None:
        return Bottleneck("device_copy", waits, copy)
    transfer = measurement.rate * _TRANSFER_SECONDS
    lane = next((lane for lane in measurement.lanes if any(p.stage for p in lane.parts)), None)
    if not measurement.elements and measurement.silent is not None:
        return Bottleneck("stage", 1.0, measurement.silent)
    if not measurement.elements and (lane is None or lane.busy < _BUSY):
        # A stage in its first call has not counted an element yet.
        return Bottleneck("source", 1.0, next((s for s in last.walk() if s.is_source), last))
    if lane is None or lane.busy < _BUSY or (transfer > _BUSY and lane.busy < 0.8):
        if transfer > _BUSY and not any("Batch" in stage.kind for stage in last.walk()):
            return Bottleneck("consumer", min(1.0, transfer), last)
        return Bottleneck("none", 1.0 - waits)
    # With all cores in use, the bottleneck is the largest user of them in any lane.
    among = measurement.lanes if saturated else (lane,)
    parts = [
        (part.seconds, part.stage, part, each)
        for each in among
        for part in each.parts
        if part.stage is not None
    ]
    _, stage, part, lane = max(parts, key=lambda entry: entry[0])
    source = stage.is_source or (part.inner and part.kind in _READING)
    return Bottleneck("source" if source else "stage", lane.busy, stage, saturated=saturated)


def _filled_shuffle(measurement: Measurement, last: Stage) -> Stage | None:
    """Return the shuffle stage whose buffer was filled before the first element, if any."""
    large = (s for s in last.walk() if s.kind == "Shuffle" and (s.number or 0) >= _LARGE_BUFFER)
    shuffle = next(large, None)
    if shuffle is None:
        return None
    if measurement.elements:
        # Its input produced a whole buffer in that time, not only a few elements.
        usual = 1 / measurement.rate if measurement.rate else 0.0
        return shuffle if measurement.first >= 3 * usual + 0.2 else None
    # No element yet: has its input begun to fill the buffer, or is any lane busy?
    produced = {
        id(p.stage): p.elements for lane in measurement.lanes for p in lane.parts if p.elements
    }
    if produced.get(id(shuffle.inputs[0]), 0) >= (shuffle.number or 0):
        return None
    begun = any(id(stage) in produced for stage in shuffle.inputs[0].walk())
    return shuffle if begun or any(lane.busy >= _BUSY for lane in measurement.lanes) else None


def judge_service(
    measurement: Measurement,
    workers: Sequence[WorkerUtilization],
    cores: int,
    alone: float | None,
    delivery: Delivery | None,
) -> Bottleneck:
    """Return the part of a tf.data service for which the consumer waits.

    Parameters
    ----------
    measurement : Measurement
    workers : sequence of WorkerUtilization
    cores : int
    alone : float, optional
        CPU seconds that one element takes in a separate process without a service.
    delivery : Delivery, optional
        Parameters of the dataset.
    """
    slow = slow_worker(workers, delivery)
    if slow is not None:
        return slow
    used = sum(worker.cpu or 0.0 for worker in workers) + measurement.cpu
    saturated = is_busy(used, cores) and needs_cores(workers, measurement.cpu)
    if alone is None:
        # Workers in this process have no separate CPU time. They pass the data in memory.
        separate = any(worker.cpu is not None for worker in workers)
        if separate:
            alone = _estimated_cost(measurement, used)
        else:
            alone = used / measurement.rate if measurement.rate else 0.0
    spent = used / measurement.rate if measurement.rate else 0.0
    overhead = max(0.0, 1 - alone / spent) if spent else 0.0
    if overhead > 0.5 and used > 0.5:
        return Bottleneck("transfer", overhead, saturated=saturated)
    return Bottleneck("workers", measurement.wait_fraction, saturated=saturated)


def is_busy(used: float, cores: int) -> bool:
    """Return True if the use of `used` of `cores` cores leaves no time for more work."""
    return used >= _SATURATED * cores


def needs_cores(workers: Sequence[WorkerUtilization], cpu: float) -> bool:
    """Return True if a data worker computes. One that sleeps or waits needs no free core.

    `cpu` is the number of cores that this process uses, and its data workers if it has some.
    """
    used = (worker.cpu for worker in workers if worker.cpu is not None)
    return max(used, default=cpu / max(1, len(workers))) >= _COMPUTING


def slow_worker(
    workers: Sequence[WorkerUtilization], delivery: Delivery | None
) -> Bottleneck | None:
    """Return a worker that is slower than the others as the bottleneck, or None.

    A worker is slow if it always sends less than the others. Another sign is that they wait
    for it. This happens in coordinated reads, in which workers serve rounds one after the other.
    The third sign is that it replies late again and again. With both, it sends no more than they.

    Rates are not compared if the source has fewer splits than there are workers. A slow worker that
    has a split is then not found. Its rate can equal that of a worker without one.
    """
    for worker in workers:
        if worker.state in ("hung", "restarting", "failed", "lost"):
            return Bottleneck("workers", 1.0, task=worker.task, state=worker.state)
    shared = None if delivery is None else delivery.shared
    if shared is not None and shared.count < len(workers):
        return None
    # A worker that sends nothing has no share of this data, or has sent all of it. If it replies
    # late, it may not have been measured.
    ready = [
        worker
        for worker in workers
        if worker.state == "ready" and (worker.bytes_per_s or worker.late)
    ]
    for worker in ready:
        others = [each for each in ready if each is not worker]
        signs = (_rate_deficit, _waiting_share, _late_share)
        if others and (share := max(sign(worker, others) for sign in signs)):
            return Bottleneck("workers", share, task=worker.task)
    return None


def _rate_deficit(worker: WorkerUtilization, others: Sequence[WorkerUtilization]) -> float:
    """Return the share by which a worker's rate is below that of the others, or 0.

    Averages are not reliable in the first seconds and after a short pause of a worker. Therefore
    each of the last measurements must be low.
    """
    usual = [rate for rate in map(_steady_rate, others) if rate is not None]
    if not usual or not _is_steady(worker):
        return 0.0
    most = _SLOW * statistics.median(usual)
    latest = worker.rates[-_STEADY:]
    if max(latest) >= most:
        return 0.0
    # Empty answers of a worker without a share of the data also count as bytes. Between two
    # batches a slow worker sends no more than these, but it works.
    if min(latest) <= _NO_SHARE * most if worker.working is None else worker.working < _SLOW:
        return 0.0
    return 1 - statistics.fmean(latest) / statistics.median(usual)


def _waiting_share(worker: WorkerUtilization, others: Sequence[WorkerUtilization]) -> float:
    """Return the share of the time that others wait for a worker that sends no more than they."""
    shares = [each.working for each in others if each.working is not None]
    if worker.working is None or len(shares) < len(others) or not _is_steady(worker):
        return 0.0
    # Not their averages, because a worker that replies late is measured at other times.
    usual = statistics.median(statistics.median(each.rates[-_STEADY:] or (0,)) for each in others)
    # It may be busy because it sends more.
    if statistics.median(worker.rates[-_STEADY:]) > _EQUAL_RATE_FACTOR * usual:
        return 0.0
    if worker.working < _ALWAYS_BUSY or max(shares) > _MAX_PEER_BUSY_SHARE * worker.working:
        return 0.0
    return 1 - max(shares) / worker.working


def _late_share(worker: WorkerUtilization, others: Sequence[WorkerUtilization]) -> float:
    """Return the share of late replies of a worker that stops again and again, or 0.

    On an overloaded host, the other workers reply late, too.
    """
    usual = statistics.median(each.late for each in others)
    sent = statistics.median(each.bytes_per_s or 0.0 for each in others)
    # It may reply late because it sends more.
    if (worker.bytes_per_s or 0.0) > _EQUAL_RATE_FACTOR * sent:
        return 0.0
    return worker.late / JUDGED_REPLIES if worker.late - usual >= _MORE_LATE_REPLIES else 0.0


def _steady_rate(worker: WorkerUtilization) -> float | None:
    """Return the median of the last rates, or None if it did not send data in all that time."""
    latest = worker.rates[-_STEADY:]
    if not _is_steady(worker):
        return None
    median = statistics.median(latest)
    return median if min(latest) >= _NO_SHARE * median else None


def _is_steady(worker: WorkerUtilization) -> bool:
    return len(worker.rates) >= _STEADY


def _estimated_cost(measurement: Measurement, used: float) -> float:
    """Return the estimated CPU seconds of an element without its transfer."""
    if not measurement.rate:
        return 0.0
    size = measurement.bytes / measurement.elements
    transfer = TRANSFER_PER_BYTE * size + TRANSFER_PER_ELEMENT
    return max(0.0, used / measurement.rate - transfer)


_READING = ("TFRecord", "TextLine", "FixedLengthRecord", "FlatMap", "Interleave")


def _busy_of(lanes: tuple[LaneCost, ...], stage: Stage) -> float:
    """Return the busy share of the busiest lane in which `stage` works most."""
    return max(
        (lane.busy for lane in lanes for part in lane.parts[:1] if part.stage is stage),
        default=0.0,
    )
