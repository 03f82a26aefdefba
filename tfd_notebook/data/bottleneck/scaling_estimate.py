"""Estimated throughput of a cluster with another number of data workers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

#: Relative uncertainty of the model: cores slow down when all of them are busy.
_MODEL = 0.15
#: Share of waiting below which the consumer is the bottleneck.
_READY = 0.1
#: Share of the cores in use above which the CPU is the bottleneck.
_SATURATED = 0.85
#: Lower bound of a worker's busy share, below which measurements are not reliable.
_LEAST_BUSY = 0.05


@dataclass(frozen=True)
class Forecast:
    """An estimate for one number of data workers.

    Parameters
    ----------
    data_workers : int
    elements_per_s : float
    low, high : float
        Bounds of the estimate.
    because : str
        The bottleneck. ``"workers"`` is their own speed. ``"slow_worker"`` is one worker that the
        consumer waits for. ``"splits"`` is the number of the source's splits. ``"processors"`` are
        the cores of this host. ``"pipeline"`` are the stages between workers and ``"consumer"``.
        ``"failure"`` if an epoch fails with this number.
    """

    data_workers: int
    elements_per_s: float
    low: float
    high: float
    because: str


def forecast(
    counts: Iterable[int],
    *,
    workers: int,
    rates: Sequence[float],
    wait_fraction: float,
    worker_cpu: float,
    consumer_cpu: float,
    cores: int | None,
    behind: bool = False,
    slow: bool = False,
    useful: Callable[[int], int] = lambda count: count,
    fails: Callable[[int], object] = lambda count: False,
) -> list[Forecast]:
    """Return an estimate for each of `counts`.

    Throughput grows in proportion to the number of workers. It stops growing when the shared cores
    are in use or the consumer no longer waits.

    Parameters
    ----------
    counts : iterable of int
    workers : int
        Current number of data workers, at least 1.
    rates : sequence of float
        Elements per second in the last seconds, one value each.
    wait_fraction : float
        Share of the time that the consumer waits now, 0 to 1.
    worker_cpu, consumer_cpu : float
        Cores in use now, by all workers and by the consumer's process.
    cores : int, optional
        Cores shared by workers and consumer. None if new workers run on additional hosts.
    behind : bool
        Whether the current bottleneck is after the workers. Default false.
    slow : bool
        Whether the consumer waits for one worker, which more workers do not change. Default false.
    useful : callable
        Returns how many of a number of workers can work at the same time. Default: all.
    fails : callable
        Returns a true value if an epoch fails with a number of workers. Default: never.
    """
    rate = statistics.fmean(rates)
    noise = statistics.stdev(rates) / rate / len(rates) ** 0.5 if len(rates) > 1 and rate else 0.0
    used = worker_cpu + consumer_cpu
    forecasts = []
    # Workers that are held up by saturated cores or by a slow consumer can do more.
    held_up = behind or wait_fraction < _READY or (cores is not None and used >= _SATURATED * cores)
    present = useful(workers)
    busy = min(1.0, max(worker_cpu / present, _LEAST_BUSY)) if held_up else 1.0
    for count in counts:
        if fails(count):
            forecasts.append(Forecast(count, 0.0, 0.0, 0.0, "failure"))
            continue
        bottleneck = "workers" if useful(count) == count else "splits"
        # First, because it is the cause among equal limits.
        limits = {"slow_worker": rate} if slow else {}
        limits[bottleneck] = rate * useful(count) / (present * busy)
        if cores is not None and used > 0:
            limits["processors"] = rate * max(1.0, cores / used)
        limits["consumer"] = rate / max(1 - wait_fraction, 1e-3)
        if behind:
            limits["pipeline"] = rate
        because = min(limits, key=limits.__getitem__)
        estimate = rate if count == workers else limits[because]
        # The uncertainty of the model only applies to other numbers of workers.
        spread = noise + _MODEL * (0 if count == workers else 1)
        forecasts.append(
            Forecast(
                count, estimate, estimate * max(0.0, 1 - spread), estimate * (1 + spread), because
            )
        )
    return forecasts
