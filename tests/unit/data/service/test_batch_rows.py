"""Functions that join the rows of a batch, so that its members matter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfd_notebook.data.service import changes as reports
from tfd_notebook.data.service import graph_inspection, row_ops

D = tf.data.Dataset


def changes(dataset: Any, mode: str) -> list[reports.Change]:
    return graph_inspection.examine(dataset).semantics.changes(mode, 2)


def numbers() -> Any:
    return D.range(9)


def grouped(reduce: Callable[[Any], Any]) -> Any:
    return numbers().group_by_window(lambda x: x % 2, lambda _, group: reduce(group), 2)


def images() -> Any:
    return D.from_tensor_slices(np.zeros((8, 4, 4, 3), np.float32)).batch(3)


def lines() -> Any:
    return D.from_tensor_slices(["a b", "b"]).batch(2)


def padded() -> Any:
    return numbers().map(tf.range).padded_batch(2)


@tf.function
def next_of(rows: Any) -> Any:
    return rows[:-1], rows[1:]


def captured(values: Any) -> Callable[[Any], Any]:
    tensor = tf.constant(values, tf.int64)
    return lambda rows: rows * tensor


#: Batches, and a function that joins their rows.
JOINING_ROWS: dict[str, Callable[[], Any]] = {
    "sequences": lambda: numbers().batch(4).map(lambda rows: (rows[:-1], rows[1:])),
    "endless sequences": lambda: (
        numbers().repeat().batch(4, drop_remainder=True).map(lambda rows: (rows[:-1], rows[1:]))
    ),
    "later": lambda: numbers().batch(4).prefetch(1).map(lambda x: x + 1).repeat(2).map(next_of),
    "parallel": lambda: numbers().batch(4, num_parallel_calls=2).map(next_of, num_parallel_calls=2),
    "sum": lambda: numbers().batch(4).map(tf.reduce_sum),
    "sum of padded rows": lambda: padded().map(lambda rows: tf.reduce_sum(rows, 0)),
    "number of padded parts": lambda: padded().map(lambda rows: tf.zeros(tf.shape(rows)[1])),
    "size of padded rows": lambda: padded().map(tf.size),
    "last axis": lambda: numbers().batch(4).map(lambda rows: tf.reduce_sum(rows, -1)),
    "differences": lambda: numbers().batch(4).map(lambda rows: rows[:, None] - rows),
    "by position": lambda: numbers().batch(4).map(lambda rows: rows * [1, 2, 3, 4]),
    "by captured position": lambda: numbers().batch(4).map(captured([1, 2, 3, 4])),
    "more axes": lambda: numbers().batch(4).map(captured([[1], [2]])),
    "all pairs": lambda: numbers().batch(4).map(lambda rows: rows[:, None] - rows[None, :]),
    "reversed": lambda: numbers().batch(4).map(lambda rows: (rows, rows[::-1])),
    "rolled": lambda: numbers().batch(4).map(lambda rows: (rows, tf.roll(rows, 1, 0))),
    "gathered": lambda: numbers().batch(4).map(lambda rows: tf.gather(rows, [0])),
    "joined": lambda: numbers().batch(4).map(lambda rows: tf.concat([rows, rows + 1], 0)),
    "reshaped": lambda: numbers().batch(4).map(lambda rows: tf.reshape(rows, [-1, 2])),
    "flat": lambda: images().map(lambda rows: tf.reshape(rows, [-1])),
    "transposed": lambda: images().map(lambda rows: tf.transpose(rows, [1, 0, 2, 3])),
    "mixup": lambda: images().map(lambda rows: rows + tf.random.shuffle(rows)),
    "normalized by the batch": lambda: images().map(lambda rows: rows - tf.reduce_mean(rows)),
    "product": lambda: images().map(
        lambda rows: tf.matmul(rows[:, :, 0, 0], rows[:, :, 0, 0], transpose_a=True)
    ),
    "label": lambda: (
        D.from_tensor_slices(([1, 2], [3, 4])).batch(2).map(lambda x, y: (x, tf.reduce_max(y)))
    ),
    "branch": lambda: numbers().batch(4).map(lambda rows: rows * tf.cond(rows[0] > 3, ten, ten)),
    "filter": lambda: numbers().batch(4).filter(lambda rows: tf.reduce_any(rows > 3)),
    "windows": lambda: (
        numbers()
        .batch(4)
        .flat_map(lambda rows: D.from_tensor_slices(rows).window(2).flat_map(lambda w: w.batch(2)))
    ),
    "number": lambda: numbers().batch(4).flat_map(lambda rows: D.range(rows[0])),
    "python": lambda: (
        numbers().batch(4).map(lambda rows: tf.numpy_function(lambda v: v[1:], [rows], tf.int64))
    ),
    "rebatched": lambda: numbers().batch(4).unbatch().batch(2).rebatch(3).map(next_of),
    "groups": lambda: grouped(lambda group: group.batch(2)).map(next_of),
    "inside of groups": lambda: grouped(lambda group: group.batch(2).map(next_of)),
}


def matrix() -> Any:
    return D.from_tensor_slices(np.zeros((8, 5), np.float32)).batch(3)


def reading(function: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: matrix().map(function)


#: Functions of the rows of a matrix that join them.
JOINING_MATRIX: dict[str, Callable[[Any], Any]] = {
    "cumsum": tf.cumsum,
    "roll": lambda x: tf.roll(x, [1, 1], [1, 0]),
    "einsum of columns": lambda x: tf.einsum("bi,bj->ij", x, x),
    "einsum of pairs": lambda x: tf.einsum("bi,ci->bc", x, x),
    "columns of an einsum": lambda x: tf.einsum("bi,ij->bj", x, tf.ones([5, 3]))[:, 0] * x[:, :3],
    "columns of a split": lambda x: tf.split(x, [2, 3], axis=1)[0][:, 0] * x[:, :3],
    "einsum transposed": lambda x: tf.einsum("bi->ib", x),
    "scan": lambda x: tf.scan(lambda total, row: total + row, x),
    "fold": lambda x: tf.foldl(lambda total, row: total + row, x),
    "map_fn of columns": lambda x: tf.map_fn(tf.reduce_sum, tf.transpose(x)),
    "map_fn of the next row": lambda x: tf.map_fn(
        lambda i: tf.gather(x, (i + 1) % 3), tf.range(3), fn_output_signature=tf.float32
    ),
    "map_fn of numbered rows": lambda x: tf.map_fn(
        lambda i: tf.reduce_sum(tf.gather(x, tf.range(i))),
        tf.range(tf.shape(x)[0]),
        fn_output_signature=tf.float32,
    ),
    "map_fn with the first row": lambda x: tf.map_fn(lambda row: row - x[0], x),
    "map_fn with all rows": lambda x: tf.map_fn(lambda row: tf.reduce_mean(row - x), x),
    "vectorized_map with all rows": lambda x: tf.vectorized_map(
        lambda row: row - tf.reduce_mean(x), x
    ),
    "loop": lambda x: tf.while_loop(
        lambda i, _: i < 3, lambda i, y: (i + 1, tf.roll(y, 1, 0)), [0, x]
    )[1],
    "loop over the sum": lambda x: tf.while_loop(
        lambda i, _: i < 3, lambda i, y: (i + 1, y + tf.gather(x, i)), [0, tf.zeros(5)]
    )[1],
    "last rows first": lambda x: tf.gather(x, tf.shape(x)[0] - 1 - tf.range(tf.shape(x)[0])),
    "rows in the second axis": lambda x: tf.gather(x, tf.range(tf.shape(x)[0])[None])[0, ::-1],
    "mask": lambda x: tf.boolean_mask(x, x[:, 0] > 0),
    "size of a mask": lambda x: tf.zeros(tf.shape(tf.boolean_mask(x, x[:, 0] > 0))),
    "places": lambda x: tf.where(x > 0),
    "sequence mask": lambda x: tf.sequence_mask(tf.cast(x[:, 0], tf.int32)),
    "norm": tf.nn.l2_normalize,
    "softmax": lambda x: tf.nn.softmax(x, axis=0),
    "folded": lambda x: tf.reshape(x, [tf.shape(x)[0] * 5]),
    "folded sums": lambda x: tf.reduce_sum(tf.reshape(x, [-1, 5, 1]), [0, 2]),
    "unequal fold": lambda x: tf.reshape(tf.reshape(x, [-1, 1]), [-1, 3]),
    "resized": lambda x: tf.reshape(
        tf.image.resize(tf.reshape(x, [-1, 5, 1, 1]), [2, 1]), [-1, 3, 1]
    ),
    "split": lambda x: tf.split(tf.ensure_shape(x, [3, 5]), 3, axis=0)[1],
    "batch normalization": lambda x: keras.ops.normalize(x, axis=0),
    "counts": lambda x: tf.math.bincount(tf.cast(x, tf.int32), axis=-1),
    "counts up to": lambda x: tf.math.bincount(tf.cast(x, tf.int32), axis=-1, maxlength=9),
    "counts from": lambda x: tf.math.bincount(tf.cast(x, tf.int32), axis=-1, minlength=2),
    "counts of all": lambda x: tf.math.bincount(tf.cast(x[:, 0], tf.int32), maxlength=9),
    "limits": lambda x: tf.minimum(tf.maximum(tf.reduce_max(x), 3), 4),
    "first rows": lambda x: tf.strided_slice(x, [0, 0], [2, 5], [1, 1]),
    "rows without the first": lambda x: tf.strided_slice(x, [1, 0], tf.shape(x), [1, 1]),
    "frames of columns": lambda x: tf.signal.frame(x, 2, 1, axis=0),
    "solution": lambda x: tf.linalg.solve(x[:, :3] + tf.eye(3), x[:, :1]),
    "bytes": lambda x: tf.bitcast(tf.cast(x[:, 0], tf.uint16)[:2], tf.uint32),
    "contrast": lambda x: tf.raw_ops.AdjustContrastv2(images=x[..., None], contrast_factor=2.0),
    "colors": lambda x: tf.image.rgb_to_hsv(tf.ensure_shape(x[:, 0], [3])),
    "product of ranks": lambda x: tf.matmul(x[:, None, :2, None], x[:, None, :3]),
    "product with a constant": lambda x: tf.matmul(x[:, :2, None], tf.ones([5, 1, 1, 3])),
    "constant of more axes": lambda x: tf.matmul(tf.ones([5, 1, 1, 3]), x[:, :3, None]),
    "triangular solution": lambda x: tf.linalg.triangular_solve(
        x[:, None, :1, None] + 1, x[:, :1, None]
    ),
    "einsum of ranks": lambda x: tf.einsum("...ij,...jk->...ik", x[:, None, :, None], x[:, None]),
    "broadcast": lambda x: tf.broadcast_to(x[:, 0], [5, tf.shape(x)[0]]),
    "filter": lambda x: tf.nn.conv2d(tf.ones([3, 9, 9, 1]), x[..., None, None], 1, "SAME"),
    "bias": lambda x: tf.raw_ops.BiasAdd(value=tf.ones([5, 3]), bias=x[:3, 0]),
    "band": lambda x: tf.linalg.diag(tf.ensure_shape(x, [3, 5]), k=(-1, 1)),
    "range of the batch": lambda x: tf.raw_ops.QuantizeAndDequantizeV2(
        input=x, input_min=0.0, input_max=1.0
    ),
}
JOINING_ROWS |= {f"matrix, {name}": reading(each) for name, each in JOINING_MATRIX.items()}


def ten() -> Any:
    return tf.constant(10, tf.int64)


@pytest.mark.parametrize("name", JOINING_ROWS)
def test_function_that_joins_rows_of_batches_has_a_warning(name: str) -> None:
    pipeline = graph_inspection.examine(JOINING_ROWS[name]()).semantics
    for mode in ("DYNAMIC", "FILE"):
        found = [each for each in pipeline.changes(mode, 2) if each.kind == "neighbors"]
        assert found
        assert not any(change.refused for change in found)
        assert "can join elements of a batch" in found[0].what
        assert reports.steps(found).startswith(("shuffle before", "use one batch"))
        assert not pipeline.keeps_elements(mode)
    for mode in ("DATA", "OFF"):
        assert "neighbors" not in {each.kind for each in pipeline.changes(mode, 2)}


def layer_of(layer: Any) -> Callable[[], Any]:
    return lambda: images().map(lambda rows: layer(rows, training=True))


#: Batches, and a function that treats each row separately.
SEPARATE_ROWS: dict[str, Callable[[], Any]] = {
    "none": lambda: numbers().batch(4),
    "arithmetic": lambda: numbers().batch(4).map(lambda rows: tf.cast(rows, tf.float32) / 255 - 1),
    "normalize": lambda: images().map(
        lambda rows: (rows - [0.1, 0.2, 0.3]) / tf.ones([1, 1, 1, 3])
    ),
    "standardize": lambda: images().map(tf.image.per_image_standardization),
    "flip": lambda: images().map(tf.image.random_flip_left_right),
    "brightness": lambda: images().map(lambda rows: tf.image.random_brightness(rows, 0.1)),
    "contrast": lambda: images().map(lambda rows: tf.image.random_contrast(rows, 0.5, 1.5)),
    "resize": lambda: images().map(lambda rows: tf.image.resize(rows, [2, 2])),
    "crop": lambda: images().map(lambda rows: tf.image.central_crop(rows, 0.5)),
    "keras flip": layer_of(keras.layers.RandomFlip()),
    "keras rotation": layer_of(keras.layers.RandomRotation(0.1)),
    "keras zoom": layer_of(keras.layers.RandomZoom(0.1)),
    "keras contrast": layer_of(keras.layers.RandomContrast(0.1)),
    "keras rescaling": layer_of(keras.layers.Rescaling(1 / 255)),
    "keras resizing": lambda: images().map(keras.layers.Resizing(2, 2)),
    "keras crop": lambda: images().map(keras.layers.CenterCrop(2, 2)),
    "keras normalization": lambda: images().map(keras.layers.Normalization(mean=0, variance=1)),
    "one hot": lambda: numbers().batch(4).map(lambda rows: (rows, tf.one_hot(rows, 3))),
    "axes": lambda: images().map(lambda rows: rows[:, :2, ..., tf.newaxis, 0]),
    "shift in a row": lambda: padded().map(lambda rows: (rows[:, :-1], rows[:, 1:])),
    "number of padded rows": lambda: padded().map(lambda rows: tf.zeros(tf.shape(rows)[0])),
    "sum of a row": lambda: padded().map(lambda rows: tf.reduce_sum(rows, -1)),
    "flat": lambda: images().map(lambda rows: tf.reshape(rows, [-1, 48])),
    "flat by shape": lambda: images().map(lambda rows: tf.reshape(rows, [tf.shape(rows)[0], -1])),
    "last axis": lambda: images().map(lambda rows: tf.concat([rows, rows], -1)),
    "stack": lambda: numbers().batch(4).map(lambda rows: tf.stack([rows, rows], -1)),
    "squeeze": lambda: images().map(lambda rows: tf.squeeze(rows[..., :1], -1)),
    "table": lambda: numbers().batch(4).map(lambda rows: tf.gather(tf.range(20), rows)),
    "captured number": lambda: numbers().batch(4).map(captured(3)),
    "captured columns": lambda: numbers().batch(4).map(lambda x: captured([1, 2])(x[:, None])),
    "captured row": lambda: numbers().batch(4).map(lambda x: captured([[1, 2]])(x[:, None])),
    "ones": lambda: numbers().batch(4).map(lambda rows: rows * [2, 2, 2, 2]),
    "weights": lambda: images().map(lambda rows: tf.matmul(rows[:, :, 0, 0], tf.ones([4, 2]))),
    "pad": lambda: images().map(lambda rows: tf.pad(rows, [[0, 0], [1, 1], [1, 1], [0, 0]])),
    "sizes": lambda: images().map(lambda rows: (rows, tf.shape(rows)[0])),
    "full": lambda: numbers().batch(4).filter(lambda rows: tf.size(rows) == 4),
    "one row": lambda: numbers().batch(1).map(tf.reduce_sum),
    "one row, padded": lambda: numbers().padded_batch(1, ()).map(tf.reduce_sum),
    "dict": lambda: D.from_tensor_slices({"a": [1, 2], "b": [3, 4]}).batch(2).map(lambda x: x["a"]),
    "unbatch": lambda: numbers().batch(4).unbatch().map(lambda x: tf.reduce_sum(x)),
    "slices": lambda: numbers().batch(4).flat_map(D.from_tensor_slices).map(tf.reduce_sum),
    "inside": lambda: numbers().flat_map(lambda x: D.range(x).batch(4)).map(tf.reduce_sum),
    "shuffled": lambda: numbers().shuffle(3).batch(4).map(tf.reduce_sum),
    "one source": lambda: D.from_tensors(range(9)).unbatch().batch(4).map(tf.reduce_sum),
    "ragged": lambda: numbers().map(tf.range).ragged_batch(2).map(lambda rows: rows + 1),
    "groups": lambda: grouped(lambda group: group.padded_batch(2)).map(lambda rows: rows + 1),
}


#: Functions of a batch of images that treat each of them separately.
SEPARATE_IMAGES: dict[str, Callable[[Any], Any]] = {
    "gray": tf.image.rgb_to_grayscale,
    "gray in a function": tf.function(tf.image.rgb_to_grayscale),
    "colors": lambda x: tf.image.grayscale_to_rgb(x[..., :1]),
    "yuv": tf.image.rgb_to_yuv,
    "map_fn": lambda x: tf.map_fn(lambda row: tf.image.flip_left_right(row) / 2, x),
    "map_fn sum": lambda x: tf.map_fn(tf.reduce_sum, x),
    "map_fn of several": lambda x: tf.map_fn(lambda p: (p[0] * 2, p[1]), (x, x[:, 0])),
    "vectorized_map": lambda x: tf.vectorized_map(lambda row: row - tf.reduce_mean(row), x),
    "einsum": lambda x: tf.einsum("bijc,cd->bijd", x, tf.ones([3, 2])),
    "einsum of two": lambda x: tf.einsum("bijc,bikc->bjk", x, x),
    "tensordot": lambda x: tf.tensordot(x, tf.ones([3, 2]), 1),
    "columns by a mask": lambda x: tf.boolean_mask(x, [True, False, True, True], axis=1),
    "mask": lambda x: tf.where(x > 0, x, 0.0) * tf.cast(x < 1, tf.float32),
    "roll": lambda x: tf.roll(x, 1, axis=-2),
    "split": lambda x: tf.split(x, 2, axis=1),
    "split by sizes": lambda x: tf.split(x, [1, 3], axis=2),
    "repeat": lambda x: tf.repeat(x, 2, axis=1),
    "edges": tf.image.sobel_edges,
    "crop or pad": lambda x: tf.image.resize_with_crop_or_pad(x, 2, 8),
    "blocks": lambda x: tf.nn.space_to_depth(x, 2),
    "inverse": lambda x: tf.linalg.inv(x[..., 0]),
    "spectrum": lambda x: tf.abs(tf.signal.rfft(x[..., 0])),
    "shape": lambda x: tf.reshape(x, tf.concat([tf.shape(x)[:1], [48]], 0)),
    "folded and back": lambda x: tf.reshape(
        tf.matmul(tf.reshape(x, [-1, 3]), tf.ones([3, 2])), [-1, 4, 4, 2]
    ),
    "weights": lambda x: tf.linalg.matmul(tf.reshape(x, [-1, 48]), tf.ones([48, 2])),
    "norm": lambda x: tf.nn.l2_normalize(x, axis=-1),
    "frames": lambda x: tf.signal.frame(tf.reshape(x, [-1, 48]), 8, 4),
    "local normalization": tf.nn.local_response_normalization,
    "quantized": lambda x: tf.quantization.fake_quant_with_min_max_vars(x, 0.0, 1.0),
    "bits": lambda x: tf.bitcast(x, tf.int32),
    "pooled": lambda x: tf.nn.max_pool3d(x[..., None], 2, 1, "SAME"),
    "determinant": lambda x: tf.linalg.det(x[..., 0]),
    "solution": lambda x: tf.linalg.solve(x[..., 0], x[..., 1]),
    "cross": lambda x: tf.linalg.cross(x, x + 1),
    "contrast": lambda x: tf.image.adjust_contrast(x, 2.0),
    "hue": lambda x: tf.image.adjust_hue(x, 0.1),
    "product of a constant": lambda x: tf.matmul(tf.ones([2, 4]), x[..., 0]),
    "product with a constant": lambda x: tf.matmul(x, tf.ones([3, 2])),
    "product of two": lambda x: tf.matmul(x[..., 0], x[..., 1]),
    "triangular solution": lambda x: tf.linalg.triangular_solve(x[..., 0] + 1, x[..., 1]),
    "einsum of last axes": lambda x: tf.einsum("...ij,jk->...ik", x, tf.ones([3, 2])) - x[..., :2],
    "einsum of other axes": lambda x: (
        tf.einsum("bi...->b...i", x) + tf.reduce_sum(x, [1, 2, 3])[:, None, None, None]
    ),
    "broadcast": lambda x: tf.broadcast_to(x[..., :1], tf.shape(x)),
    "bits of numbers": lambda x: tf.bitcast(tf.reduce_sum(x, [1, 2, 3]), tf.int32),
    "bytes of numbers": lambda x: tf.bitcast(tf.reduce_sum(x, [1, 2, 3]), tf.uint8),
    "quantized to a range": lambda x: tf.quantization.quantize_and_dequantize_v2(
        x, 0.0, 1.0, range_given=True
    ),
    "padded": lambda x: tf.image.resize_with_pad(x, 3, 5),
    "vectorized_map in reverse": lambda x: tf.vectorized_map(lambda row: tf.reverse(row, [0]), x),
    "diagonals": lambda x: tf.linalg.diag(x),
    "band": lambda x: tf.linalg.diag(x, k=(-1, 2)),
    "short-time spectrum": lambda x: tf.signal.stft(tf.reshape(x, [-1, 48]), 8, 4),
    "keras cropped": keras.layers.Resizing(2, 3, crop_to_aspect_ratio=True),
    "keras random crop": keras.layers.RandomCrop(2, 2),
}
#: The same for the rows of a matrix, and for text.
SEPARATE_MATRIX: dict[str, Callable[[Any], Any]] = {
    "several categories": keras.layers.CategoryEncoding(9, "multi_hot"),
    "counts": keras.layers.CategoryEncoding(9, "count"),
    "places in a row": lambda x: tf.searchsorted(
        tf.tile([[1.0, 5.0]], [tf.shape(x)[0], 1]), x, side="right"
    ),
    "solution of a constant": lambda x: (
        tf.linalg.triangular_solve(tf.eye(5), x[..., None]) - x[..., None]
    ),
    "after a constant": lambda x: tf.concat([tf.ones([tf.shape(x)[0], 1]), x], 1),
    "shift": lambda x: (x[:, :-1], x[:, 1:]),
    "best": lambda x: tf.math.top_k(x, 2),
}
SEPARATE_TEXT: dict[str, Callable[[Any], Any]] = {
    "lookup": keras.layers.StringLookup(vocabulary=["a", "b"]),
    "words": keras.layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=4),
    "word pairs": keras.layers.TextVectorization(
        vocabulary=["a", "a b"], ngrams=2, output_sequence_length=4
    ),
    "several words": keras.layers.TextVectorization(vocabulary=["a", "b"], output_mode="multi_hot"),
    "counted words": keras.layers.TextVectorization(vocabulary=["a", "b"], output_mode="count"),
    "weighted words": keras.layers.TextVectorization(
        vocabulary=["a", "b"], idf_weights=[1.0, 2.0], output_mode="tf_idf"
    ),
    "csv": lambda x: tf.io.decode_csv(tf.strings.regex_replace(x, "^.*$", "1,2"), [0.0, 0.0]),
    "bytes": tf.strings.bytes_split,
    "characters": lambda x: tf.strings.unicode_decode(x, "UTF-8"),
    "split": tf.strings.split,
    "hash": lambda x: tf.strings.to_hash_bucket_fast(tf.strings.lower(x), 9),
}
SEPARATE = {"images": SEPARATE_IMAGES, "matrix": SEPARATE_MATRIX, "text": SEPARATE_TEXT}
SOURCES: dict[str, Callable[[], Any]] = {"images": images, "matrix": matrix, "text": lines}
SEPARATE_ROWS |= {
    f"{kind}, {name}": (lambda kind=kind, each=each: SOURCES[kind]().map(each))
    for kind, functions in SEPARATE.items()
    for name, each in functions.items()
}
SEPARATE_ROWS |= {
    "sequence mask": lambda: numbers().batch(4).map(lambda rows: tf.sequence_mask(rows, 9)),
    "word pairs of any number": lambda: lines().map(
        keras.layers.TextVectorization(vocabulary=["a", "a b"], ngrams=2)
    ),
    "categories": lambda: numbers().batch(4).map(keras.layers.CategoryEncoding(9, "one_hot")),
    "static": lambda: (
        D.from_tensor_slices(np.zeros((8, 4, 4, 3), np.float32))
        .repeat()
        .batch(4, drop_remainder=True)
        .map(tf.image.rgb_to_grayscale)
    ),
}


@pytest.mark.parametrize("name", SEPARATE_ROWS)
def test_function_on_separate_rows_of_batches_has_no_warning(name: str) -> None:
    found = changes(SEPARATE_ROWS[name](), "DYNAMIC")
    assert {change.kind for change in found} <= {"grouping", "random"}


RANDOM = np.random.default_rng(1)
ROWS: dict[str, Any] = {
    "images": tf.constant(RANDOM.random((4, 4, 4, 3)), tf.float32),
    "matrix": tf.constant(RANDOM.random((3, 5)) * 9, tf.float32),
    "text": tf.constant(["a b", "b", "B c a b", ""]),
}


def values_of(value: Any) -> list[Any]:
    """Return the values of a result."""
    return [
        each.to_list() if isinstance(each, tf.RaggedTensor) else each.numpy()
        for each in tf.nest.flatten(value)
    ]


def is_separate(function: Callable[[Any], Any], rows: Any) -> bool:
    """Return True if a function gives each row the same result in any batch."""
    together = values_of(function(rows))
    for batches in ((rows[:1], rows[1:]), (rows[:2], rows[2:])):
        try:
            apart = [values_of(function(each)) for each in batches]
        except (ValueError, tf.errors.InvalidArgumentError):
            return False
        for whole, *parts in zip(together, *apart, strict=True):
            if isinstance(whole, list):
                if whole != [row for part in parts for row in part]:
                    return False
                continue
            shapes = {np.shape(part)[1:] for part in parts}
            if not np.ndim(whole) or len(shapes) > 1:
                return False
            joined = np.concatenate(parts)
            if joined.shape != whole.shape:
                return False
            if whole.dtype.kind in "fc":
                if not np.allclose(whole, joined, rtol=1e-3, atol=1e-5, equal_nan=True):
                    return False
            elif (whole != joined).any():
                return False
    return True


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in SEPARATE for name in SEPARATE[kind] if "random" not in name],
)
def test_function_gives_a_row_the_same_result_in_any_batch(kind: str, name: str) -> None:
    assert is_separate(SEPARATE[kind][name], ROWS[kind])


#: Ops whose inputs are not all tensors of the same shape.
_OTHER_INPUTS = (
    "AddN AdjustHue AdjustSaturation AvgPool AvgPool3D BiasAdd BroadcastTo Bucketize Cast "
    "CheckNumerics Conv2D Conv3D DecodeBase64 DecodeCSV DecodeCompressed DecodePaddedRaw DecodeRaw "
    "DepthToSpace DepthwiseConv2dNative Dilation2D EnsureShape ExtractImagePatches "
    "FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel ImageProjectiveTransformV2 "
    "ImageProjectiveTransformV3 LookupTableFind LookupTableFindV2 MaxPool MaxPool3D ParseExample "
    "ParseExampleV2 QuantizeAndDequantizeV2 QuantizeAndDequantizeV4 RegexFullMatch RegexReplace "
    "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor ScaleAndTranslate Select "
    "SelectV2 SpaceToDepth StaticRegexFullMatch StaticRegexReplace StringJoin StringToHashBucket "
    "StringToHashBucketFast StringToHashBucketStrong Substr UnicodeTranscode"
)


@pytest.mark.parametrize("op", sorted(row_ops.ELEMENTWISE - set(_OTHER_INPUTS.split())))
def test_elementwise_op_gives_a_row_the_same_result_in_any_batch(op: str) -> None:
    function = getattr(tf.raw_ops, op)
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.default is each.empty]
    examined = 0
    for kind in (tf.float32, tf.int32, tf.bool, tf.string, tf.complex64):
        numbers = tf.cast(ROWS["images"] * 9, tf.int32)
        rows = tf.strings.as_string(numbers) if kind == tf.string else tf.cast(numbers, kind)
        try:
            function(**dict.fromkeys(names, rows))
        except (TypeError, ValueError, tf.errors.OpError):
            continue  # another type
        examined += 1
        assert is_separate(lambda part: function(**dict.fromkeys(names, part)), rows)
    assert examined


#: Functions that change the number of rows, without a change of their numbers.
UNJOINED = ("folded", "mask", "size of a mask")


@pytest.mark.parametrize("name", [each for each in JOINING_MATRIX if each not in UNJOINED])
def test_function_that_joins_rows_gives_a_row_another_result_in_another_batch(name: str) -> None:
    assert not is_separate(JOINING_MATRIX[name], ROWS["matrix"])


@pytest.mark.parametrize(
    "create", [lambda: numbers().batch(2), lambda: numbers().repeat().batch(2, True)]
)
def test_other_members_of_batches_are_no_elements_of_the_dataset(
    create: Callable[[], Any],
) -> None:
    pipeline = graph_inspection.examine(create()).semantics
    assert not pipeline.keeps_elements("DYNAMIC")
    assert not pipeline.keeps_elements("FILE")
    for mode in ("OFF", "DATA", "FILE_OR_DATA"):
        assert pipeline.keeps_elements(mode)
