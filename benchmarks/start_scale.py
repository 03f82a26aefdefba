"""Time per task to start a cluster and to publish its state, for many tasks against few.

Each figure is the time divided by the number of tasks. The target is at most 1.2: costs grow
linearly with the number of tasks.

fake
    ``tfd.Cluster(data_workers=255, launcher="fake")`` against 15, in this process. It measures the
    code of the kernel.
snapshot
    A snapshot after a change of one task, as the hub encodes it for a view, with the same clusters.
data workers
    ``tfd.Cluster(data_workers=64)`` against 16, after a cluster whose start imported TensorFlow.
"""

from __future__ import annotations

import os
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _pairs

import tfd_notebook as tfd
from tfd_notebook.bus.snapshot_feed import SnapshotFeed

MANY, FEW = 255, 15
MANY_REAL, FEW_REAL = 64, 16
_SNAPSHOTS = 50


def start(data_workers: int, launcher: str = "local") -> float:
    """Return the milliseconds per task until all tasks are ready."""
    began = time.perf_counter()
    with tfd.Cluster(data_workers=data_workers, launcher=launcher) as cluster:
        seconds = time.perf_counter() - began
        tasks = cluster.tasks
        assert len(tasks) == data_workers + 1
        assert all(task.state == "ready" for task in tasks)
    return 1000 * seconds / len(tasks)


def snapshots(data_workers: int) -> float:
    """Return the milliseconds per task of a snapshot and its patch."""
    with tfd.Cluster(data_workers=data_workers, launcher="fake") as cluster:
        feed = SnapshotFeed()
        feed.full([cluster.snapshot()])
        began = time.perf_counter()
        for _ in range(_SNAPSHOTS):
            cluster.restart("data_worker:3")
            assert feed.patch([cluster.snapshot()])
        seconds = time.perf_counter() - began
    return 1000 * seconds / _SNAPSHOTS / (data_workers + 1)


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    rounds = 3 if quick else 15
    result = _pairs.measure(lambda: snapshots(MANY), lambda: snapshots(FEW), rounds)
    print(f"snapshot: {result}")
    _pairs.report("start_scale (snapshot)", result, "ms per task")
    result = _pairs.measure(lambda: start(MANY, "fake"), lambda: start(FEW, "fake"), rounds)
    print(f"fake: {result}")
    _pairs.report("start_scale (fake)", result, "ms per task")
    result = _pairs.measure(lambda: start(MANY_REAL), lambda: start(FEW_REAL), 2 if quick else 5)
    print(f"data workers: {result}")
    _pairs.report("start_scale", result, "ms per task")


if __name__ == "__main__":
    main()
