"""``tfd demo``: the main job without a browser.

Two photographs are cropped, augmented and batched by data workers; a small network learns from
which one a crop comes; a stream runs while workers are added and one is killed; the same once more
with the servers inside this process. Live progress and the final tables go to the terminal.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import tfd_notebook as tfd
from tfd_notebook import views
from tfd_notebook.errors import TfdError, Unsupported

CROP = 64
BATCH = 32


def main(batches: int = 24) -> int:
    """Run the demonstration; return the exit status.

    Parameters
    ----------
    batches : int
        How many batches of 32 crops the network is trained on.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    began = time.monotonic()
    photographs = _photographs()
    _say("Starting a dispatcher and one data worker (child processes) ...")
    with tfd.Cluster(data_workers=1, name="demo") as cluster:
        _say(f"ready after {time.monotonic() - began:.1f} s\n")
        _train(cluster, crops(photographs, batches))
        _stream(cluster, crops(photographs, None))
        _say("\n" + views.text(cluster.snapshot()))
    _say("\nThe same with the servers inside this process:")
    with tfd.Cluster(data_workers=2, name="demo-inprocess", launcher="inprocess") as cluster:
        _train(cluster, crops(photographs, batches))
        _say("\n" + views.text(cluster.snapshot()))
    _say(f"\nDone in {time.monotonic() - began:.0f} s; nothing is left running.")
    return 0


def crops(photographs: tuple[str, ...], batches: int | None) -> Any:
    """Return a dataset of random crops and the index of the photograph they come from.

    Parameters
    ----------
    photographs : tuple of str
        Paths of JPEG files.
    batches : int, optional
        How many batches; None for ever.

    Returns
    -------
    tf.data.Dataset
        Pairs of float32 ``(32, 64, 64, 3)`` in 0 to 1 and int64 ``(32,)``.
    """
    import tensorflow as tf

    paths = tf.constant(photographs)

    def crop(index: Any) -> tuple[Any, Any]:
        label = index % len(photographs)
        image = tf.io.decode_jpeg(tf.io.read_file(paths[label]))
        image = tf.image.random_crop(image, (CROP, CROP, 3))
        image = tf.image.random_flip_left_right(tf.cast(image, tf.float32) / 255.0)
        return tf.image.random_brightness(image, 0.2), label

    count = None if batches is None else batches * BATCH
    numbers = tf.data.Dataset.counter() if count is None else tf.data.Dataset.range(count)
    return numbers.map(crop, num_parallel_calls=2).batch(BATCH)


def _photographs() -> tuple[str, ...]:
    try:
        from sklearn.datasets import load_sample_images
    except ImportError:
        raise Unsupported(
            "the demonstration takes its photographs from scikit-learn",
            fix='pip install "tfd-notebook[demo]"',
        ) from None
    return tuple(load_sample_images().filenames)


def _network() -> Any:
    import keras

    network = keras.Sequential(
        [
            keras.layers.Input((CROP, CROP, 3)),
            keras.layers.Conv2D(8, 5, strides=3, activation="relu"),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2),
        ]
    )
    network.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def _train(cluster: tfd.Cluster, dataset: Any) -> None:
    dataset = dataset.apply(cluster.distribute(processing_mode="dynamic"))
    progress = _Progress(cluster, "train")
    unsubscribe = cluster.subscribe(progress)
    try:
        history = _network().fit(cluster.observe(dataset, name="train"), verbose=0)
    finally:
        unsubscribe()
        progress.end()
    accuracy = history.history["accuracy"][-1]
    _say(f"one epoch of model.fit: accuracy {accuracy:.2f}")


def _stream(cluster: tfd.Cluster, dataset: Any) -> None:
    dataset = dataset.apply(cluster.distribute(processing_mode="off"))
    with cluster.stream(dataset, name="background").start() as stream:
        progress = _Progress(cluster, "background")
        unsubscribe = cluster.subscribe(progress)
        try:
            stream.wait(elements=20, timeout=60)
            progress.end()
            _say("scaling from 1 to 4 data workers ...")
            cluster.scale(data_workers=4)
            stream.wait(elements=stream.elements + 60, timeout=60)
            progress.end()
            victim = "data_worker:0"
            _say(f"killing {victim} (pid {cluster.kill(victim)}) ...")
            stream.wait(elements=stream.elements + 60, timeout=60)
        finally:
            unsubscribe()
            progress.end()
        seen = cluster.snapshot().task(victim)
        assert seen is not None
        _say(f"{victim} is {seen.state} again (pid {seen.pid}); the stream went on")


class _Progress:
    """One line that shows how a consumer gets on; redrawn on a terminal."""

    def __init__(self, cluster: tfd.Cluster, consumer: str) -> None:
        self._consumer = consumer
        self._shown = ""

    def __call__(self, snapshot: Any) -> None:
        row = next((row for row in snapshot.streams if row.name == self._consumer), None)
        if row is None or not row.elements:
            return
        waits = "" if row.wait_fraction is None else f", waits {row.wait_fraction:.0%} of the time"
        line = f"  {row.name}: {row.elements} batches, {row.elements_per_s:.0f}/s{waits}"
        if sys.stdout.isatty():
            sys.stdout.write(f"\r\x1b[K{line}")
            sys.stdout.flush()
        self._shown = line

    def end(self) -> None:
        if self._shown:
            start = "\r\x1b[K" if sys.stdout.isatty() else ""
            sys.stdout.write(f"{start}{self._shown}\n")
            self._shown = ""


def _say(text: str) -> None:
    print(text, flush=True)


__all__ = ["crops", "main"]

if __name__ == "__main__":
    try:
        sys.exit(main())
    except TfdError as error:
        sys.exit(f"tfd demo: {error}")
