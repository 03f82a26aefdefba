"""Throughput of a stream with live analysis of its bottleneck, against the same without.

One stream through a cluster runs throughout. Every 2 s the analysis is switched on or off.
"""

from __future__ import annotations

import os
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _pairs
import tensorflow as tf

import tfd_notebook as tfd
from tfd_notebook.data.bottleneck.live_limit import LiveLimit

SECONDS = 2.0


def main() -> None:
    rounds = 4 if _pairs.arguments(__doc__).quick else 75
    update = LiveLimit.update
    images = tf.data.Dataset.range(1 << 40).map(
        lambda number: tf.image.random_flip_left_right(tf.zeros([64, 64, 3])), num_parallel_calls=2
    )
    with tfd.Cluster(data_workers=2) as cluster:
        batches = images.batch(32).apply(cluster.distribute("off"))
        with cluster.stream(batches, discard=True).start() as stream:
            stream.wait(elements=200, timeout=60)

            def rate() -> float:
                begun, elements = time.perf_counter(), stream.elements
                time.sleep(SECONDS)
                return (stream.elements - elements) / (time.perf_counter() - begun)

            def explained() -> float:
                LiveLimit.update = update  # type: ignore[method-assign]
                return rate()

            def bare() -> float:
                LiveLimit.update = lambda *arguments: None  # type: ignore[method-assign]
                return rate()

            result = _pairs.measure(explained, bare, rounds)
            LiveLimit.update = update  # type: ignore[method-assign]
            print(stream.limit)
    print(f"with live analysis against without: {result}")
    _pairs.report("explain_cost", result, "batches/s, more is better")


if __name__ == "__main__":
    main()
