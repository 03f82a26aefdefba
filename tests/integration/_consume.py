"""One function for the three consumers of a notebook: a loop, `model.fit` and a stream."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import tfd_notebook as tfd

KINDS = ("for", "fit", "stream")
#: `consume` counts all elements from this number upwards as one.
MAX_NUMBERS = 10_000


class Enough(Exception):
    """Raised by `on_batch` to end the read."""


def consume(
    kind: str,
    cluster: tfd.Cluster,
    dataset: Any,
    on_batch: Callable[[int], None] = lambda number: None,
) -> Counter[int]:
    """Read a dataset of batches of numbers to its end; return the count of each number.

    `on_batch` is called after each batch with the number of batches. It may raise `Enough`.
    """
    return {"for": _loop, "fit": _fit, "stream": _stream}[kind](cluster, dataset, on_batch)


def _loop(cluster: tfd.Cluster, dataset: Any, on_batch: Callable[[int], None]) -> Counter[int]:
    counts: Counter[int] = Counter()
    with contextlib.suppress(Enough):
        for number, batch in enumerate(dataset, 1):
            counts.update(batch.numpy().tolist())
            on_batch(number)
    return counts


def _stream(cluster: tfd.Cluster, dataset: Any, on_batch: Callable[[int], None]) -> Counter[int]:
    with cluster.stream(dataset, discard=False) as stream:
        return _loop(cluster, stream, on_batch)


class _Counts(keras.Model):
    """Model whose training step counts the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = tf.Variable(tf.zeros([MAX_NUMBERS], tf.int64), trainable=False)

    def train_step(self, numbers: Any) -> dict[str, Any]:
        self.counts.scatter_add(
            tf.IndexedSlices(tf.ones_like(numbers), tf.minimum(numbers, MAX_NUMBERS - 1))
        )
        return {"batches": tf.constant(1.0)}


class _CallOnBatch(keras.callbacks.Callback):
    def __init__(self, on_batch: Callable[[int], None]) -> None:
        super().__init__()
        self._on_batch = on_batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._on_batch(batch + 1)


def _fit(cluster: tfd.Cluster, dataset: Any, on_batch: Callable[[int], None]) -> Counter[int]:
    model = _Counts()
    model.compile(jit_compile=False)
    with contextlib.suppress(Enough):
        model.fit(cluster.observe(dataset), verbose=0, callbacks=[_CallOnBatch(on_batch)])
    counts = model.counts.numpy().tolist()
    return Counter({number: count for number, count in enumerate(counts) if count})
