"""Elements per second of a pipeline bound by Python, from two child workers and locally.

Each element takes about 5 ms of pure Python in a ``tf.numpy_function``. Because of the GIL, a
process runs one such function at a time, independently of ``num_parallel_calls``. Two data workers
are two processes.

The elements are sent in batches of 8, as recommended for small elements. Single elements cost the
consumer about 1 ms each. The line before the last has this figure. The line before that compares
``semantics="same"``, which leaves this pipeline as it is, with the default.
"""

from __future__ import annotations

import os
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _pairs
import psutil
import tensorflow as tf

import tfd_notebook as tfd

BATCH = 8
UNIT = "elements/s, more is better"


def steps_of(milliseconds: float) -> int:
    """Return the number of steps of `work` that take this time on this machine."""
    steps = 100_000
    seconds = min(timeit.repeat(lambda: work(0, steps), number=1, repeat=10))
    return round(steps * milliseconds / 1e3 / seconds)


def work(x: int, steps: int) -> int:
    total = int(x)
    for step in range(steps):
        total += step & 3
    return total


def pipeline(steps: int) -> Any:
    def preprocess(x: Any) -> Any:
        return work(x, steps)

    return tf.data.Dataset.range(1 << 40).map(
        lambda x: tf.numpy_function(preprocess, [x], tf.int64), num_parallel_calls=tf.data.AUTOTUNE
    )


def per_second(
    dataset: Any, elements: int, processes: list[psutil.Process], batch: int
) -> Callable[[], float]:
    """Return a measurement of elements per second, which starts with empty buffers."""

    def consume() -> float:
        iterator = iter(dataset)  # a new iterator has no buffered elements
        for _ in range(64 // batch):
            next(iterator)
        began = time.perf_counter()
        for _ in range(elements // batch):
            next(iterator)
        rate = elements / (time.perf_counter() - began)
        del iterator
        rest(processes)
        return rate

    return consume


def rest(processes: list[psutil.Process]) -> None:
    """Wait until all `processes` are idle, so that they do not disturb the next measurement."""
    used, deadline = 0.0, time.monotonic() + 10
    while time.monotonic() < deadline:
        times = [process.cpu_times() for process in processes]
        used, before = sum(t.user + t.system for t in times), used
        if used - before < 0.02:
            break
        time.sleep(0.2)


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    rounds, elements = (3, 150) if quick else (15, 400)
    steps = steps_of(milliseconds=5)
    with tfd.Cluster(data_workers=2) as cluster:
        single = pipeline(steps)
        batches = single.batch(BATCH)
        processes = [psutil.Process(task.pid) for task in cluster.tasks] + [psutil.Process()]
        measurements = {
            f"{where}, {what}": per_second(read, elements, processes, size)
            for what, dataset, size in (("batches", batches, BATCH), ("single", single, 1))
            for where, read in (
                ("cluster", dataset.apply(cluster.distribute("off"))),
                ("local", dataset),
            )
        }
        same = batches.apply(cluster.distribute("off", semantics="same"))
        measurements["same"] = per_second(same, elements, processes, BATCH)
        figures = _pairs.interleave(measurements, rounds)
    results = {
        what: _pairs.compare(figures[f"cluster, {what}"], figures[f"local, {what}"])
        for what in ("single", "batches")
    }
    for what, result in results.items():
        print(f"two data workers against a local pipeline with AUTOTUNE, {what}: {result}")
    same_result = _pairs.compare(figures["same"], figures["cluster, batches"])
    _pairs.report("python_heavy, same", same_result, UNIT)
    _pairs.report("python_heavy (one at a time)", results["single"], UNIT)
    _pairs.report("python_heavy", results["batches"], UNIT)
    # The threads of the local iterator would crash at the interpreter's exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
