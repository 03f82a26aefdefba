"""CPU per batch through an in-process cluster, against the bare pipeline and TensorFlow's defaults.

The benchmark compares four cases:

* the plain pipeline;
* ``Cluster(launcher="inprocess")`` with its defaults, without compression and with local transfer;
* the same with ``semantics="same"``, which leaves this pipeline as it is;
* a dispatcher and a worker of this process with the defaults of ``tf.data.experimental.service``.

All of them do the same work in this process. The difference in CPU is the cost of the transfer. The
pipeline augments and batches photographs, with 6 MB per batch. Noise replaces the photographs,
because both are incompressible.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _pairs
import tensorflow as tf

import tfd_notebook as tfd

BATCH, SIDE = 32, 128


def pipeline() -> Any:
    noise = tf.random.Generator.from_seed(1)
    photographs = noise.uniform((64, 160, 160, 3), 0, 256, tf.int32)

    def augment(photograph: Any) -> Any:
        cropped = tf.image.random_crop(photograph, (SIDE, SIDE, 3))
        scaled = tf.image.random_flip_left_right(tf.cast(cropped, tf.float32) / 255.0)
        return tf.image.random_contrast(tf.image.random_brightness(scaled, 0.1), 0.9, 1.1)

    dataset = tf.data.Dataset.from_tensor_slices(tf.cast(photographs, tf.uint8))
    return dataset.repeat().map(augment).batch(BATCH).prefetch(2)


def per_batch(dataset: Any, batches: int) -> Callable[[], float]:
    """Return a measurement: CPU of this process per consumed batch, in milliseconds.

    It includes the prefetch that replaces the consumed batches, and therefore waits for its end.
    """
    iterator = iter(dataset)

    def consume() -> float:
        began = at_rest()
        for _ in range(batches):
            next(iterator)
        return (at_rest() - began) / batches * 1e3

    return consume


def at_rest() -> float:
    """Wait until this process is idle; return its CPU time."""
    used, deadline = time.process_time(), time.monotonic() + 5
    while time.monotonic() < deadline:
        time.sleep(0.05)
        used, before = time.process_time(), used
        if used - before < 0.001:
            break
    return used


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    rounds, batches = (5, 20) if quick else (15, 100)
    service = tf.data.experimental.service
    dispatcher = tfd.Dispatcher()
    _worker = tfd.DataWorker(service.WorkerConfig(dispatcher.address))
    defaults = service.distribute("parallel_epochs", dispatcher.target)
    with tfd.Cluster(data_workers=1, launcher="inprocess") as cluster:
        figures = _pairs.interleave(
            {
                "cluster": per_batch(pipeline().apply(cluster.distribute("off")), batches),
                "same": per_batch(
                    pipeline().apply(cluster.distribute("off", semantics="same")), batches
                ),
                "pipeline": per_batch(pipeline(), batches),
                "defaults": per_batch(pipeline().apply(defaults), batches),
            },
            rounds,
        )
    against = {name: _pairs.compare(figures["cluster"], figures[name]) for name in figures}
    same = _pairs.compare(figures["same"], figures["cluster"])
    print(f"in-process cluster, ms of CPU per batch, against the pipeline: {against['pipeline']}")
    print(f"against TensorFlow's defaults: {against['defaults']}")
    print(f'semantics="same", against the default: {same}')
    unit = "ms of CPU per batch"
    _pairs.report("inprocess_transfer, same", same, unit)
    _pairs.report("inprocess_transfer, against TensorFlow's defaults", against["defaults"], unit)
    _pairs.report("inprocess_transfer", against["pipeline"], unit)
    # The threads of the iterators would crash at the exit, and delay the end of the data worker.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
