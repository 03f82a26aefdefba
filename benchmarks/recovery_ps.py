"""Time from the death of a parameter server to the first closure after the recovery.

A is ``cluster.recover``. B is a new cluster, strategy, coordinator and model, as required without
it. Both start after all imports.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from typing import Any

import _pairs
import _training
import tensorflow as tf

import tfd_notebook as tfd


def build(coordinator: Any) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(weights=tf.Variable(tf.zeros([1_000, 100])))


def first(coordinator: Any, checkpoint: Any) -> None:
    @tf.function
    def step() -> Any:
        checkpoint.weights.assign_add(tf.ones([1_000, 100]))
        return tf.reduce_sum(checkpoint.weights)

    coordinator.schedule(step).fetch()


def main() -> None:
    rounds = 2 if _pairs.arguments(__doc__).quick else 5
    directory = tempfile.mkdtemp(prefix="tfd-bench-")
    cluster = tfd.Cluster(workers=2, ps=1, name="recovery-0")
    coordinator = cluster.coordinator()
    with coordinator.strategy.scope():
        checkpoint = build(coordinator)
    first(coordinator, checkpoint)
    saved = checkpoint.save(f"{directory}/ck")
    ours, theirs = [], []
    for number in range(1, rounds + 1):
        built: list[Any] = []

        def again(coordinator: Any, built: list[Any] = built) -> Any:
            built.append(build(coordinator))
            return built[0]

        began = time.perf_counter()
        cluster.kill("ps:0")
        coordinator = cluster.recover(saved, again)
        first(coordinator, built[0])
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        cluster.kill("ps:0")
        cluster.stop()
        cluster = tfd.Cluster(workers=2, ps=1, name=f"recovery-{number}")
        coordinator = cluster.coordinator()
        with coordinator.strategy.scope():
            checkpoint = build(coordinator)
        checkpoint.restore(saved)
        first(coordinator, checkpoint)
        theirs.append(time.perf_counter() - began)
    cluster.stop()
    shutil.rmtree(directory)
    result = _pairs.compare(ours, theirs)
    print(f"recovery of a parameter server: {result}; worst {max(ours):.2f} s")
    _pairs.report("recovery_ps", result, "seconds to the first closure")
    _training.end()


if __name__ == "__main__":
    main()
