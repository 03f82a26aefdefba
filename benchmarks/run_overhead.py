"""Time of ``cluster.run`` for a training on two workers, against two processes started by hand.

The training is the same: ``MultiWorkerMirroredStrategy``, a dense layer, some hundred steps. Both
sides include the end of the processes. The cluster runs already, as in a notebook; its start is
measured by ``start_cluster.py``. The targets are at most 1.05 for the whole call, and 0.5 for the
time until the function begins on both ranks.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _pairs

import tfd_notebook as tfd

STEPS = 1_000


def train(steps: int) -> float:
    """Train, and return the time at which this function began, in seconds since the epoch."""
    began = time.time()
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = tf.Variable(tf.zeros((512, 10)), aggregation=tf.VariableAggregation.MEAN)

    @tf.function(autograph=False)
    def step(x: Any) -> None:
        def on_replica() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weights - 1.0) ** 2)
            weights.assign_sub(0.01 * tape.gradient(loss, weights))

        strategy.run(on_replica)

    x = tf.random.normal((64, 512))
    for _ in range(steps):
        step(x)
    return began


def by_hand(steps: int) -> tuple[float, float]:
    """Return the seconds until both programs have begun, and until both have ended."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(2)]
    addresses = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    began = time.time()
    programs = []
    for index in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        programs.append(
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(steps)],
                env={**os.environ, "TF_CONFIG": json.dumps(task)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    starts = [float(program.communicate()[0].split()[-1]) for program in programs]
    assert all(program.returncode == 0 for program in programs)
    return max(starts) - began, time.time() - began


def with_run(cluster: tfd.Cluster, steps: int) -> tuple[float, float]:
    """Return the same figures for ``cluster.run``."""
    began = time.time()
    starts = cluster.run(train, steps)
    return max(starts) - began, time.time() - began


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    steps, rounds = (100, 2) if quick else (STEPS, 5)
    with tfd.Cluster(workers=2, name="run") as cluster:
        figures = _pairs.interleave(
            {"ours": lambda: with_run(cluster, steps), "theirs": lambda: by_hand(steps)}, rounds
        )
    for position, name in enumerate(("run_overhead (start)", "run_overhead")):
        ours, theirs = ([pair[position] for pair in figures[side]] for side in ("ours", "theirs"))
        result = _pairs.compare(ours, theirs)
        print(f"{name}: {result}")
        _pairs.report(name, result, "s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        # The first thing that a program by hand does is the import of TensorFlow.
        import tensorflow as tf  # noqa: F401

        print(train(int(sys.argv[2])))
    else:
        main()
