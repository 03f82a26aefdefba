"""Rows as a tf.data.Dataset: Python yields whole chunks, and TensorFlow splits them into batches.

A Python step per row or per batch would dominate the total time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfd_notebook.errors import UsageError

if TYPE_CHECKING:
    from tfd_notebook.spark.feed.datafeed import DataFeed
    from tfd_notebook.spark.feed.encode import Layout

_FIX = "convert the rows to numbers, arrays of one shape, bytes or text, or use next_batch()"


def as_dataset(feed: DataFeed, batch_size: int, output_signature: Any, drop_remainder: bool) -> Any:
    """Return a dataset; see `DataFeed.as_dataset`."""
    import tensorflow as tf

    if output_signature is None:
        chunk = feed.first_chunk()
        if chunk is None:
            raise UsageError(
                "no row arrived: the element type of the dataset is unknown",
                task=feed.mgr.node,
                fix="pass output_signature= to as_dataset()",
            )
        output_signature = name_columns(feed.input_tensors, signature(chunk.column.layout))
    batches = tf.nest.map_structure(
        lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), output_signature
    )

    def chunks() -> Iterator[Any]:
        while not feed.done_feeding:
            rows = feed.rows_left() if feed.train_mode else 0
            # Yield chunks of large rows as batches, so that `rebatch` does not copy them.
            batch = take_rows(feed, max(rows, batch_size), output_signature)
            if batch is not None:
                yield batch

    dataset = tf.data.Dataset.from_generator(chunks, output_signature=batches)
    if feed.train_mode:
        return dataset.rebatch(batch_size, drop_remainder=drop_remainder)
    return dataset


def take_rows(feed: DataFeed, count: int, signature: Any, wait: float | None = None) -> Any:
    """Return up to `count` rows as arrays that match a signature, or None without rows.

    Wait for the rows, by default without a timeout, else for `wait` seconds.
    """
    parts = [
        fit(name_columns(feed.input_tensors, arrays), signature)
        for arrays in feed.parts(count, wait)
    ]
    return concatenate(parts) if parts else None


def signature(layout: Layout) -> Any:
    """Return the signature of one row with this layout.

    Python's floats become float32 and its ints int64; arrays keep their dtype.

    Raises
    ------
    UsageError
        Such rows cannot become tensors.
    """
    import tensorflow as tf

    kind = layout[0]
    name = layout[1] if kind == "pickle" else kind
    if name in ("str", "bytes", "bytearray"):
        return tf.TensorSpec([], tf.string)
    if kind in ("python", "number", "array", "scalar"):
        dtype = np.dtype(layout[1])
        shape = layout[2] if kind == "array" else []
        if dtype.kind in "SU":
            return tf.TensorSpec(shape, tf.string)
        if kind == "python" and dtype.kind == "f":
            return tf.TensorSpec(shape, tf.float32)
        if dtype.kind in "?biufc":
            return tf.TensorSpec(shape, tf.as_dtype(dtype.newbyteorder("=")))
    if kind == "fix":
        part = signature(layout[3])
        if isinstance(part, tf.TensorSpec):
            return tf.TensorSpec([layout[2], *part.shape], part.dtype)
    if kind in ("list", "tuple"):
        return tuple(map(signature, layout[2]))
    if kind in ("dict", "row"):
        return dict(zip(layout[1], map(signature, layout[2]), strict=True))
    if name in ("NoneType", "several"):
        raise UsageError(
            "some rows have None, or values of several types, at the same position", fix=_FIX
        )
    if name in ("list", "tuple", "dict", "ndarray"):
        raise UsageError("the rows have several lengths or shapes", fix=_FIX)
    raise UsageError(f"rows of this kind ({name}) cannot become tensors", fix=_FIX)


def name_columns(tensors: Sequence[str] | None, parts: Any) -> Any:
    """Return the columns by the names of tensors, if there is an ``input_mapping``."""
    if tensors is None:
        return parts
    if isinstance(parts, np.ndarray):
        parts = [parts[:, at] for at in range(parts.shape[1])]
    elif not isinstance(parts, (tuple, list, dict)):  # one signature for all columns
        parts = [type(parts)(parts.shape[1:], parts.dtype)] * len(tensors)
    values = parts.values() if isinstance(parts, dict) else parts
    return dict(zip(tensors, values, strict=True))


def fit(arrays: Any, signature: Any) -> Any:
    """Return the arrays of a chunk in the structure and with the types of a signature.

    Raises
    ------
    UsageError
        The arrays do not match.
    """
    if isinstance(signature, dict):
        if isinstance(arrays, dict) and set(signature) <= set(arrays):
            return {name: fit(arrays[name], spec) for name, spec in signature.items()}
    elif isinstance(signature, (tuple, list)):
        if isinstance(arrays, dict):
            arrays = tuple(arrays.values())
        elif isinstance(arrays, np.ndarray) and arrays.ndim > 1:
            arrays = tuple(arrays[:, at] for at in range(arrays.shape[1]))
        if isinstance(arrays, tuple) and len(arrays) == len(signature):
            return tuple(fit(a, spec) for a, spec in zip(arrays, signature, strict=True))
    else:
        if isinstance(arrays, tuple) and all(isinstance(part, np.ndarray) for part in arrays):
            arrays = np.stack(arrays, axis=1)
        if isinstance(arrays, np.ndarray):
            return _cast(arrays, signature)
    raise UsageError(
        f"the rows are {_describe(arrays)}, but the signature is {signature}",
        fix="pass the output_signature of one row to as_dataset()",
    )


def _cast(array: np.ndarray[Any, Any], spec: Any) -> np.ndarray[Any, Any]:
    if not spec.shape.is_compatible_with(array.shape[1:]):
        raise UsageError(
            f"the rows have shape {array.shape[1:]}, but the signature is {spec}", fix=_FIX
        )
    if spec.dtype.name == "string":
        if array.dtype.kind in "OSU":
            return array
    elif array.dtype.kind != "O":
        return array.astype(spec.dtype.as_numpy_dtype, copy=False)
    raise UsageError(f"rows are {_describe(array)}, but the signature is {spec}", fix=_FIX)


def _describe(arrays: Any) -> str:
    if isinstance(arrays, np.ndarray):
        if arrays.dtype == object and len(arrays):
            return f"of type {type(arrays.flat[0]).__name__}"
        return f"of {arrays.dtype} with the shape {arrays.shape[1:]}"
    if isinstance(arrays, dict):
        return f"dicts of {', '.join(map(str, arrays))}"
    return f"tuples of {len(arrays)} ({'; '.join(map(_describe, arrays))})"


def join_chunks(parts: list[Any], rows: Callable[[], list[Any]]) -> Any:
    """Concatenate arrays of several chunks; return an array of objects if they are not alike."""
    if len(parts) == 1:
        return parts[0]
    try:
        return concatenate(parts)
    except (KeyError, TypeError, ValueError):
        items = rows()
        objects = np.empty(len(items), object)
        objects[:] = items
        return objects


def concatenate(parts: list[Any]) -> Any:
    """Concatenate arrays, or tuples or dicts of arrays.

    Raises
    ------
    KeyError, TypeError, ValueError
        The structures or types differ.
    """
    first_part = parts[0]
    if len(parts) == 1:
        return first_part
    if len({type(part) for part in parts}) > 1:
        raise TypeError
    if isinstance(first_part, tuple):
        return tuple(concatenate(list(column)) for column in zip(*parts, strict=True))
    if isinstance(first_part, dict):
        return {name: concatenate([part[name] for part in parts]) for name in first_part}
    if len({part.dtype.kind for part in parts}) > 1:
        raise TypeError
    return np.concatenate(parts)
