"""Time of the check of a pipeline with 30 operations, against its serialization by TensorFlow.

The check examines the dataset and lists its changes, as ``cluster.distribute("dynamic")`` does
before it sends a dataset. It includes a serialization. All of ``distribute`` also lists the changes
with a second data worker, and records the variables. Each check starts without earlier results.
The functions of the pipeline have layers, a lookup table, conditions and loops.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _pairs
import tensorflow as tf

import tfd_notebook as tfd
from tfd_notebook._compat.tf_data import graph
from tfd_notebook.data.service import captured_state, validation
from tfd_notebook.data.service.graph_inspection import examine
from tfd_notebook.data.service.semantics import Semantics

OPERATIONS = 30
MODE, WORKERS = "DYNAMIC", 4
MAX_MS = 20
TITLES = {"all": "semantics_check, all of distribute", "check": "semantics_check"}


def pipeline() -> Any:
    """Return a dataset with `OPERATIONS` operations."""
    layers = tf.keras.Sequential([tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(2)])
    layers.build((None, 48))
    keys = tf.constant(["even", "odd"])
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(keys, tf.constant([0, 1])), default_value=-1
    )

    def image(number: Any) -> Any:
        pixels = tf.random.stateless_uniform((40, 40, 3), tf.stack([number, 1]))
        cropped = tf.image.random_crop(tf.image.random_flip_left_right(pixels), (32, 32, 3))
        return tf.image.random_contrast(tf.image.random_brightness(cropped, 0.1), 0.9, 1.1)

    def features(image: Any) -> Any:
        mean, variance = tf.nn.moments(image, [0, 1], keepdims=True)
        small = tf.image.resize((image - mean) / tf.sqrt(variance + 1e-3), (4, 4))
        return layers(tf.reshape(small, (1, 48)))[0]

    def label(number: Any) -> Any:
        word = tf.cond(number % 2 == 0, lambda: keys[0], lambda: keys[1])
        return {"number": number, "label": table.lookup(word)}

    def tokens(number: Any) -> Any:
        text = tf.strings.join([tf.strings.as_string(number), "of a text"], " ")
        ids = tf.strings.to_hash_bucket_fast(tf.strings.split(text), 1000)
        while tf.size(ids) < 8:
            ids = tf.repeat(ids, 2)
        return ids

    def joined(pair: Any, text: Any) -> Any:
        (pixels, parts), words = pair, tf.cast(text, tf.float32)
        return tf.concat([pixels, words[:2] / tf.reduce_max(words)], 0), parts["label"]

    auto = tf.data.AUTOTUNE
    numbers = tf.data.Dataset.range(10_000).shuffle(100).filter(lambda number: number >= 0)
    numbers = numbers.interleave(
        lambda number: tf.data.Dataset.range(number, number + 4).map(lambda each: each * 2),
        cycle_length=4,
        num_parallel_calls=2,
    )
    images = numbers.map(image, num_parallel_calls=auto).map(features, auto).take(5_000)
    labels = tf.data.Dataset.range(20_000).map(label).cache().skip(10).shuffle(50)
    texts = tf.data.Dataset.from_tensor_slices(tf.range(5_000)).map(tokens).shuffle(50)
    pairs = tf.data.Dataset.zip(tf.data.Dataset.zip(images, labels), texts).map(joined, auto)
    pairs = pairs.filter(lambda pixels, label: label >= 0).batch(8).unbatch().repeat(2)
    pairs = pairs.shuffle(100).enumerate().map(lambda number, pair: pair).batch(16)
    return pairs.map(lambda pixels, label: (pixels * 2, label))


def check(dataset: Any) -> Semantics:
    """Return the operations of `dataset`, after a list of their changes."""
    semantics = examine(dataset).semantics
    semantics.changes(MODE, WORKERS)
    return semantics


def check_all(dataset: Any) -> None:
    """Check `dataset` as all of ``distribute`` does."""
    semantics = check(dataset)
    captured_state.states_of(dataset, semantics)
    validation.refused_later(semantics, MODE, "checked")
    validation.keeps_workers(semantics, MODE, "checked")
    for mode in ("OFF", MODE):
        semantics.keeps_elements(mode)


def milliseconds(work: Callable[[Any], object], dataset: Any) -> Callable[[], float]:
    """Return a measurement of the time of `work`."""

    def measure() -> float:
        began = time.perf_counter()
        work(dataset)
        return (time.perf_counter() - began) * 1e3

    return measure


def main() -> None:
    rounds = 5 if _pairs.arguments(__doc__).quick else 75
    _ = tfd.Policy  # the first use, which records the lines of datasets
    dataset = pipeline()
    assert len(check(dataset).ops) == OPERATIONS, check(dataset).ops
    work = {"check": check, "all": check_all, "serialization": graph.serialized}
    figures = _pairs.interleave(
        {name: milliseconds(do, dataset) for name, do in work.items()}, rounds
    )
    for name, title in TITLES.items():
        result = _pairs.compare(figures[name], figures["serialization"])
        _pairs.report(f"{title}, against the serialization", result, "ms")
        limit = result.ours / MAX_MS
        print(f"{title}: ratio {limit:.3f} (A {result.ours:.4g}, B {MAX_MS}, ms)", flush=True)


if __name__ == "__main__":
    main()
