"""A worker killed to its closure done elsewhere: ours, and TensorFlow's coordinator alone.

The closure counts for about half a second, so that it is on its worker when that is killed; what
another run of it takes, undisturbed, is taken off.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import Any

import _pairs
import _training
import tensorflow as tf

import tfd_notebook as tfd


@tf.function
def count(limit: Any) -> Any:
    number = tf.constant(0, tf.int64)
    while number < limit:
        number += 1
    return number


def main() -> None:
    rounds = 2 if _pairs.arguments(__doc__).quick else 15
    loops = tf.constant(60_000, tf.int64)
    policy = tfd.Policy(restarts=100)  # one that dies so often would be given up
    with tfd.Cluster(workers=2, ps=1, name="migration", policy=policy) as cluster:
        ours = cluster.coordinator()

        def seconds() -> float:
            began = time.perf_counter()
            ours.schedule(count, args=(loops,)).fetch()
            return time.perf_counter() - began

        for _ in range(4):
            seconds()
        alone = statistics.median(seconds() for _ in range(4))
        gaps = []
        for _ in range(rounds):
            ours.pause_worker(1)
            value = ours.schedule(count, args=(loops,))
            while not ours.values.counts()["running"]:
                time.sleep(0.001)
            row = cluster.snapshot().task("worker:0")
            assert row is not None
            ours.resume_worker(1)
            began = time.perf_counter()
            os.kill(row.pid or 0, signal.SIGKILL)
            value.fetch()
            gaps.append(max(0.0, time.perf_counter() - began - alone))
            while str(cluster.snapshot().task("worker:0").state) != "ready":
                time.sleep(0.05)
            ours.pause_worker(1)
            seconds()  # on the worker that is back
            ours.resume_worker(1)
        print(f"gaps: {', '.join(f'{gap:.2f}' for gap in gaps)} s, a closure takes {alone:.2f} s")
        worst, middle = max(gaps), statistics.median(gaps)
        print(
            f"worker_migration: ratio {middle:.3f} "
            f"(A {middle:.4g}, B 1, seconds at most; worst {worst:.2f})"
        )
    _training.end()


if __name__ == "__main__":
    main()
