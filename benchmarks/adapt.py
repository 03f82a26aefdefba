"""Adaptive data workers against the best fixed number, on a bursty load.

Each side reads the same elements with a separate cluster. A burst reads as fast as possible. The
consumer then needs 10 % of the largest number of data workers for a while. Each side has one burst
per round, because every burst begins with the smallest number. An element takes a data
worker 100 ms without computing, so the number of cores has little influence. A burst demands more
than the largest number delivers, so the best fixed number is the largest one.

adapt
    Seconds in which the consumer waited, ``cluster.adapt(1, 4)`` against 4 data workers. The
    target is at most 1.1.
adapt (worker-seconds)
    The sum of the seconds that data workers were requested. The target is at most 0.7.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _pairs
import tensorflow as tf

import tfd_notebook as tfd
from tfd_notebook.model.events import WorkersAdapted
from tfd_notebook.model.spec import Role

MAXIMUM = 4
ELEMENT_SECONDS = 0.1
#: Elements of a burst: 40 s with the largest number of data workers.
BURST = 1600
#: Elements and seconds for each of the time between bursts: 60 s.
QUIET, QUIET_SECONDS = 240, 0.25


def elements() -> Any:
    """Return the dataset. Its function is sent to the data workers."""
    seconds = ELEMENT_SECONDS

    def wait(number: Any) -> Any:
        import time

        time.sleep(seconds)
        return number

    numbers = tf.data.Dataset.range(1000).repeat()
    return numbers.map(lambda n: tf.ensure_shape(tf.numpy_function(wait, [n], tf.int64), ()))


def read(iterator: Iterator[Any], count: int, seconds: float) -> float:
    """Read `count` elements with `seconds` of work for each, and return the seconds of waiting."""
    waited = 0.0
    for _ in range(count):
        began = time.perf_counter()
        next(iterator)
        waited += time.perf_counter() - began
        if seconds:
            time.sleep(seconds)
    return waited


def side(adaptive: bool) -> tuple[float, float]:
    """Return the seconds of waiting and the worker-seconds of one side."""
    with tfd.Cluster(data_workers=1 if adaptive else MAXIMUM, name="adapt") as cluster:
        iterator = iter(elements().apply(cluster.distribute("dynamic")))
        if adaptive:
            cluster.adapt(1, MAXIMUM)
        read(iterator, QUIET // 6, QUIET_SECONDS)  # warm-up
        workers = cluster.snapshot().planned[Role.DATA_WORKER]
        began = time.time()
        waited = read(iterator, BURST, 0.0)
        waited += read(iterator, QUIET, QUIET_SECONDS)
        ended = time.time()
        decisions = [e for e in cluster.snapshot().events if isinstance(e, WorkersAdapted)]
        used, at = 0.0, began
        for decision in decisions:
            if began < decision.time < ended:
                used += workers * (decision.time - at)
                workers, at = decision.after, decision.time
        used += workers * (ended - at)
        for decision in decisions:
            print(
                f"  {decision.time - began:6.1f} s: {decision.before} → {decision.after}, "
                f"{decision.reason}"
            )
    kind = "adaptive" if adaptive else "fixed"
    print(f"{kind}: waited {waited:.1f} s, {used:.0f} worker-seconds", flush=True)
    return waited, used


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    figures = _pairs.interleave(
        {"ours": lambda: side(True), "theirs": lambda: side(False)},
        2 if quick else 4,
        warm_up=0,
    )
    for name, index, unit in (("adapt", 0, "s"), ("adapt (worker-seconds)", 1, "s")):
        result = _pairs.compare(
            [figure[index] for figure in figures["ours"]],
            [figure[index] for figure in figures["theirs"]],
        )
        print(f"{name}: {result}")
        _pairs.report(name, result, unit)


if __name__ == "__main__":
    main()
