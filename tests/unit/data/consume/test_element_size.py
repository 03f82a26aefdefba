"""Bytes of elements of each kind."""

import numpy as np
import pytest
import tensorflow as tf

from tfd_notebook._compat.tf_data.elements import static_bytes
from tfd_notebook.data.consume.element_size import element_bytes

Dataset = tf.data.Dataset
Optional = tf.experimental.Optional
RAGGED = tf.RaggedTensor.from_row_lengths(tf.zeros([9]), [4, 5])  # 36 bytes and 3 row splits
STRINGS = tf.constant([b"", b"four", b"x" * 1000])


@pytest.mark.parametrize(
    ("element", "size"),
    [
        (tf.zeros([2, 3]), 24),
        (tf.zeros([0, 3]), 0),
        (tf.zeros([5], tf.bfloat16), 10),
        ((tf.constant(1, tf.int64), None), 8),
        ({"a": tf.constant(1), "b": (tf.constant(True), [tf.zeros([4], tf.uint8)])}, 9),
    ],
)
def test_element_of_static_size(element, size):
    dataset = Dataset.from_tensors(0).map(lambda _: element)
    assert static_bytes(dataset.element_spec) == size
    assert element_bytes(next(iter(dataset))) == size


@pytest.mark.parametrize(
    ("element", "size"),
    [
        (STRINGS, 3 * 24 + 1004),
        (tf.constant(b"one"), 24 + 3),
        (RAGGED, 36 + 24),
        (tf.ragged.constant([["a"], ["bc", "d"]]), 3 * 24 + 4 + 24),
        (tf.sparse.from_dense([[1, 0], [0, 2]]), 2 * (4 + 16) + 16),
        (Optional.from_value(RAGGED), 36 + 24),
        (Optional.from_value({"a": STRINGS, "b": RAGGED}), 3 * 24 + 1004 + 36 + 24),
        (Optional.from_value(Optional.from_value(tf.zeros([5]))), 20),
        (Optional.empty(tf.TensorSpec([5])), 0),
        ({"a": STRINGS, "b": (RAGGED, tf.zeros([5]))}, 3 * 24 + 1004 + 36 + 24 + 20),
    ],
)
def test_element_of_varying_size(element, size):
    dataset = Dataset.from_tensors(element)
    assert static_bytes(dataset.element_spec) is None
    assert element_bytes(next(iter(dataset))) == size


def test_dense_tensor_of_varying_shape():
    dataset = Dataset.range(3).map(lambda n: tf.zeros([n, 2]))
    assert static_bytes(dataset.element_spec) is None
    assert [element_bytes(element) for element in dataset] == [0, 8, 16]


def test_size_of_a_batch_is_the_size_of_its_arrays():
    batch = next(iter(Dataset.range(100).map(lambda i: {"x": i, "y": tf.fill([7], 1.0)}).batch(9)))
    assert element_bytes(batch) == sum(np.asarray(array).nbytes for array in batch.values())


def test_size_of_an_array_is_the_size_of_its_tensors():
    dataset = Dataset.range(3).map(
        lambda i: {"a": i, "b": tf.TensorArray(tf.int64, 1).unstack([i])}
    )
    assert static_bytes(dataset.element_spec) is None
    assert [element_bytes(element) for element in dataset] == [16] * 3


def test_opaque_element_has_no_size():
    dataset = Dataset.range(4).window(2)
    assert static_bytes(dataset.element_spec) is None
    assert element_bytes(next(iter(dataset))) is None
