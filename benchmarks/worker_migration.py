"""Time from the death of a worker until its closure is done on another worker.

The other side is TensorFlow's coordinator alone. A process can use only one cluster at a time. Each
side is a process with its own cluster, whose agent restarts killed workers. The sides alternate.
The closure takes about 0.5 s, so that it runs on its worker at the kill. Its duration without a
kill is subtracted. The result is the worst delay of each side.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from typing import Any

import _pairs
from _sides import Side

_LOOPS = 60_000
#: Seconds of CPU after which a worker counts as running the closure.
_BUSY = 0.05


class Trial:
    """Two workers and one of the coordinators."""

    def __init__(self, cluster: Any, kind: str) -> None:
        import tensorflow as tf

        self._cluster = cluster
        if kind == "ours":
            self._coordinator = cluster.coordinator()
        else:
            strategy = tf.distribute.ParameterServerStrategy(cluster.resolver)
            self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._loops = tf.constant(_LOOPS, tf.int64)

        @tf.function
        def count(limit: Any) -> Any:
            number = tf.constant(0, tf.int64)
            while number < limit:
                number += 1
            return number

        self._count = count
        self._warm_up()
        self._alone = statistics.median(self._seconds() for _ in range(4))

    def gap(self) -> float:
        """Kill the worker that runs a closure; return the delay in seconds."""
        before = self._used()
        value = self._coordinator.schedule(self._count, args=(self._loops,))
        while not (busy := self._grown(before)):
            time.sleep(0.005)
        began = time.perf_counter()
        os.kill(self._pids()[busy[0]], signal.SIGKILL)
        value.fetch()
        took = time.perf_counter() - began
        self._warm_up()
        # The lower bound keeps the ratio defined if the delay is below the precision.
        return max(took - self._alone, 1e-3)

    def _warm_up(self) -> None:
        """Run closures until both workers are ready and have run some."""
        while len(self._pids()) < 2:
            time.sleep(0.05)
        before = self._used()
        while len(self._grown(before)) < 2:
            for _ in range(2):
                self._coordinator.schedule(self._count, args=(self._loops,))
            self._coordinator.join()

    def _seconds(self) -> float:
        began = time.perf_counter()
        self._coordinator.schedule(self._count, args=(self._loops,)).fetch()
        return time.perf_counter() - began

    def _pids(self) -> dict[str, int]:
        rows = [row for row in self._cluster.snapshot().tasks if row.role == "worker"]
        return {row.task: row.pid or 0 for row in rows if row.state == "ready"}

    def _used(self) -> dict[str, float]:
        import psutil

        times = {name: psutil.Process(pid).cpu_times() for name, pid in self._pids().items()}
        return {name: used.user + used.system for name, used in times.items()}

    def _grown(self, before: dict[str, float]) -> list[str]:
        """Return the workers that used CPU since `before`, the busiest first."""
        grown = {name: used - before.get(name, used) for name, used in self._used().items()}
        return sorted((n for n in grown if grown[n] > _BUSY), key=lambda n: -grown[n])


def child(kind: str) -> None:
    import _training

    import tfd_notebook as tfd

    policy = tfd.Policy(restarts=100)  # more than the kills of all rounds
    with tfd.Cluster(workers=2, ps=1, name=f"migration-{kind}", policy=policy) as cluster:
        trial = Trial(cluster, kind)
        print("ready", flush=True)
        for _ in sys.stdin:
            print(trial.gap(), flush=True)
    _training.end()


def main() -> None:
    parser = _pairs.parser(__doc__)
    parser.add_argument("--child", metavar="KIND", help="run as this side")
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    sides = {"ours": Side(__file__, "ours"), "theirs": Side(__file__, "bare")}
    measurements = {kind: lambda side=side: side.request()[0] for kind, side in sides.items()}
    gaps = _pairs.interleave(measurements, 3 if options.quick else 15)
    for side in sides.values():
        side.close()
    for kind, seconds in gaps.items():
        print(f"{kind}: {', '.join(f'{gap:.2f}' for gap in seconds)} s")
    # The median delay is below the precision.
    ours, theirs = max(gaps["ours"]), max(gaps["theirs"])
    result = _pairs.Result(ours / theirs, ours / theirs, ours / theirs, ours, theirs)
    _pairs.report("worker_migration", result, "seconds at worst")


if __name__ == "__main__":
    main()
