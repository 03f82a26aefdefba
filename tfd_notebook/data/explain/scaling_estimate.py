"""What a cluster would deliver with another number of data workers, from what it costs now."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

#: Relative uncertainty of the model itself: processors slow down when all of them work.
_MODEL = 0.15
#: Share of waiting below which the consumer sets the pace.
_READY = 0.1
#: Share of the processors at which they set it.
_SATURATED = 0.85
#: A worker that seems to do less than this is not known to do anything.
_LEAST_BUSY = 0.05


@dataclass(frozen=True)
class Forecast:
    """An estimate for so many data workers.

    Parameters
    ----------
    data_workers : int
    elements_per_s : float
    low, high : float
        Between which it should be.
    because : {"workers", "splits", "processors", "consumer", "pipeline"}
        What sets it: the workers' own pace, the number of the source's splits, this machine's
        processors, the consumer, or what comes between the workers and the consumer.
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
    useful: Callable[[int], int] = lambda count: count,
) -> list[Forecast]:
    """Return an estimate for each of `counts`.

    Workers that keep up today deliver in proportion to their number, until the processors that
    they share are in use, or the consumer has no time left to wait.

    Parameters
    ----------
    counts : iterable of int
    workers : int
        How many there are now, at least 1.
    rates : sequence of float
        Elements per second in the last seconds, one figure each.
    wait_fraction : float
        Share of its time that the consumer waits now, 0 to 1.
    worker_cpu, consumer_cpu : float
        Processors in use now, by all workers and by the consumer's process.
    cores : int, optional
        Processors that workers and consumer share; None where new workers bring their own.
    behind : bool
        Whether what limits the consumer now comes after the workers. Default false.
    useful : callable
        Returns how many of a number of workers can work at the same time. Default: all.
    """
    rate = statistics.fmean(rates)
    noise = statistics.stdev(rates) / rate / len(rates) ** 0.5 if len(rates) > 1 and rate else 0.0
    used = worker_cpu + consumer_cpu
    found = []
    # What holds workers up now, the processors or a slow consumer, leaves them time to do more.
    held_up = behind or wait_fraction < _READY or (cores is not None and used >= _SATURATED * cores)
    present = useful(workers)
    busy = min(1.0, max(worker_cpu / present, _LEAST_BUSY)) if held_up else 1.0
    for count in counts:
        set_by = "workers" if useful(count) == count else "splits"
        limits = {set_by: rate * useful(count) / (present * busy)}
        if cores is not None and used > 0:
            limits["processors"] = rate * max(1.0, cores / used)
        limits["consumer"] = rate / max(1 - wait_fraction, 1e-3)
        if behind:
            limits["pipeline"] = rate
        because = min(limits, key=limits.__getitem__)
        estimate = rate if count == workers else limits[because]
        # The further away, the less is known.
        spread = noise + _MODEL * (0 if count == workers else 1)
        found.append(
            Forecast(
                count, estimate, estimate * max(0.0, 1 - spread), estimate * (1 + spread), because
            )
        )
    return found
