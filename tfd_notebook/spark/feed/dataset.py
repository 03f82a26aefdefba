"""Rows as a tf.data.Dataset: Python yields whole chunks, and TensorFlow splits them into batches.

A Python step per row or per batch would dominate the total time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tfd_notebook.data.consume.observe import load_compat
from tfd_notebook.errors import UsageError
from tfd_notebook.spark import casts

if TYPE_CHECKING:
    from tfd_notebook._compat.tf_data.meter import IteratorMetrics
    from tfd_notebook.spark.feed.datafeed import DataFeed
    from tfd_notebook.spark.feed.encode import Layout

#: Kinds of stages with an element for each element of their input, and the kind of the source.
_ONE_TO_ONE = ("Generator", "Map", "Prefetch")
#: The names or positions of a column and of the columns that contain it, outermost first.
Path: TypeAlias = "tuple[object, ...]"
_FIX = "convert the rows to numbers, arrays of one shape, bytes or text, or use next_batch()"


@dataclass(frozen=True)
class _Rows:
    """The rows of a chunk: where they are, and what was to be done with them.

    Parameters
    ----------
    node : str
    first : int
        Number of the first one among the rows of the node, from 0.
    inferred : bool
        Whether the signature was inferred from the first rows.
    orders : dict
        By the path of a column: the order of its names in the first chunk with names there.
    """

    node: str
    first: int
    inferred: bool
    orders: dict[Path, tuple[str, ...]]

    def place(self, path: Path) -> str:
        """Return the rows and a column of them as the first words of an error."""
        return f"the rows from {self.first}" + (f", column {_text(path)}," if path else "")

    def error(self, path: Path, lost: casts.Lost, spec: Any) -> UsageError:
        """Return the error for a value that the signature cannot hold."""
        row, *parts = lost.at
        path = (*path, *parts)
        place = f"row {self.first + row}" + (f", column {_text(path)}" if path else "")
        origin = "the type of the first rows" if self.inferred else "the type in output_signature"
        return UsageError(
            f"{place}: {lost.text} does not fit {spec.dtype.name}, {origin}",
            task=self.node,
            fix="pass an output_signature= with a type that holds all rows, or use next_batch()",
        )


def as_dataset(feed: DataFeed, batch_size: int, output_signature: Any, drop_remainder: bool) -> Any:
    """Return a dataset; see `DataFeed.as_dataset`."""
    import tensorflow as tf

    inferred = output_signature is None
    if inferred:
        output_signature = _inferred(feed, batch_size)
    batches = tf.nest.map_structure(
        lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), output_signature
    )

    def chunks() -> Iterator[Any]:
        first = feed.rows_read
        while not feed.done_feeding:
            # `rebatch` holds the rows of an unfinished batch.
            held = (feed.rows_read - first) % batch_size
            rows = feed.rows_left(held) if feed.train_mode else 0
            # Yield chunks of large rows as batches, so that `rebatch` does not copy them.
            count = max(rows, batch_size)
            batch = take_rows(feed, count, output_signature, inferred=inferred)
            if batch is not None:
                if feed.readers is not None:
                    feed.readers.produced += 1
                yield batch

    dataset = tf.data.Dataset.from_generator(chunks, output_signature=batches)
    if feed.train_mode:
        return dataset.rebatch(batch_size, drop_remainder=drop_remainder)
    if (compat := load_compat()) is None:
        return dataset
    feed.readers = Readers()
    return compat.WatchedDataset(dataset, feed.readers)


def _inferred(feed: DataFeed, batch_size: int) -> Any:
    """Wait for the first batch, and return a signature that holds its rows."""
    signatures: list[Any] = []
    columns: list[Any] = []
    first = feed.rows_read
    for chunk, start in feed.collect(batch_size):
        arrays = chunk.arrays(start, chunk.count)
        # The error of a later chunk, which names the row, is raised when its rows are read.
        with contextlib.suppress(*[UsageError] if signatures else []):
            own = feed.named(signature(chunk.column.layout, arrays), first)
            columns.append(feed.named(arrays, first))
            signatures.append(own)
        first += chunk.count - start
    if not signatures:
        raise UsageError(
            "no row arrived: the element type of the dataset is unknown",
            task=feed.mgr.node,
            fix="pass output_signature= to as_dataset()",
        )
    return _widened(signatures, columns)


def _widened(signatures: list[Any], columns: list[Any]) -> Any:
    """Return the first signature, with types that hold the values of all columns if any do."""
    first = signatures[0]
    if isinstance(first, dict):
        if any(not isinstance(own, dict) or set(own) != set(first) for own in signatures):
            return first
        return {
            name: _widened([own[name] for own in signatures], [part[name] for part in columns])
            for name in first
        }
    if any(isinstance(own, (tuple, dict)) for own in signatures):
        parts = list(map(_parts, signatures, columns))
        sizes = {len(own) for own, _ in parts}
        if len(sizes) > 1 or 0 in sizes:
            return first
        return tuple(
            _widened([own[at] for own, _ in parts], [part[at] for _, part in parts])
            for at in range(*sizes)
        )
    if len(set(signatures)) == 1 or len({tuple(own.shape) for own in signatures}) > 1:
        return first
    dtype = casts.common([own.dtype.as_numpy_dtype for own in signatures], columns)
    return first if dtype is None else type(first)(first.shape, dtype)


def _parts(own: Any, column: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the signatures and arrays of the parts of a column, none if they have no order."""
    if isinstance(own, tuple):
        return own, column
    if isinstance(own, dict) or not own.shape.rank:
        return (), ()
    part = type(own)(own.shape[1:], own.dtype)
    return [part] * own.shape[0], [column[:, at] for at in range(own.shape[0])]


class Readers:
    """The iterators of this process over a dataset of rows, and over datasets derived from it."""

    def __init__(self) -> None:
        self._meters: list[IteratorMetrics] = []
        #: Number of elements that the dataset has produced.
        self.produced = 0

    def opened(self, meter: IteratorMetrics) -> None:
        """Add an iterator."""
        self._meters.append(meter)

    def ended(self) -> None:
        """Ignore the end of an iterator."""

    def failure(self, error: Any, meter: IteratorMetrics) -> Any:
        """Return the error unchanged."""
        return error

    def waiting(self) -> int | None:
        """Return the thread that waits for rows which this dataset has not received, if any.

        The result is None while a stage of a derived dataset has an element. If a stage changes the
        number of elements, that is unknown, and the result is None, too.
        """
        # Imports TensorFlow.
        from tfd_notebook._compat.tf_data.pipeline_model import stages_of

        for meter in self._meters:
            iterator = meter.iterator()
            if iterator is None or meter.elements != self.produced:
                continue
            if all(stage.kind in _ONE_TO_ONE for stage in stages_of(iterator.dataset).walk()):
                for thread, (_, _, in_function) in list(meter.blocked.items()):
                    if not in_function:
                        return thread
        return None


def take_rows(
    feed: DataFeed,
    count: int,
    signature: Any,
    wait: float | None = None,
    inferred: bool = False,
) -> Any:
    """Return up to `count` rows as arrays that match a signature, or None without rows.

    Wait for the rows, by default without a timeout, else for `wait` seconds.
    """
    parts = [
        fit(arrays, signature, _Rows(feed.mgr.node, first, inferred, feed.orders))
        for first, arrays in feed.parts(count, wait)
    ]
    return concatenate(parts) if parts else None


def signature(layout: Layout, values: Any) -> Any:
    """Return the signature of one row of a column.

    Python's ints become int64. Its floats become float32, or float64 if a whole number would
    change or the range ends. Arrays keep their dtype.

    Parameters
    ----------
    layout : list
    values : numpy.ndarray, or tuple or dict of them
        The arrays of the column.

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
    if name in ("several", "int") and (widened := casts.numbers(values)) is not None:
        kind = "scalar" if any(isinstance(v, np.generic) for v in values.flat) else "python"
        values, layout = widened, [kind, widened.dtype.str]
    if kind in ("python", "number", "array", "scalar"):
        dtype = np.dtype(layout[1])
        shape = layout[2] if kind == "array" else []
        if dtype.kind in "SU":
            return tf.TensorSpec(shape, tf.string)
        if kind == "python" and dtype.kind == "f":
            _, lost = casts.cast(values, np.float32, fractions_only=True)
            return tf.TensorSpec(shape, tf.float32 if lost is None else tf.float64)
        if dtype.kind in "?biufc" and dtype.type not in (np.longdouble, np.clongdouble):
            return tf.TensorSpec(shape, tf.as_dtype(dtype.newbyteorder("=")))
        name = f"{kind} of {dtype}"
    if kind == "fix" and isinstance(values, np.ndarray) and values.ndim > 1:
        part = signature(layout[3], values.reshape(-1, *values.shape[2:]))
        return tf.TensorSpec([layout[2], *part.shape], part.dtype)
    if kind in ("list", "tuple", "dict", "row"):
        if isinstance(values, tuple):
            return tuple(map(signature, layout[2], values))
        return dict(zip(values, map(signature, layout[2], values.values()), strict=True))
    if name in ("NoneType", "several"):
        raise UsageError(
            "some rows have None, or values of several types, at the same position", fix=_FIX
        )
    if name == "ndarray" and len(known := {(v.dtype, v.shape) for v in values.flat}) == 1:
        name = f"array of {known.pop()[0]}"
    if name in ("list", "tuple", "dict", "ndarray"):
        raise UsageError("the rows have several lengths or shapes", fix=_FIX)
    raise UsageError(f"rows of this kind ({name}) cannot become tensors", fix=_FIX)


def fit(arrays: Any, signature: Any, rows: _Rows, path: Path = ()) -> Any:
    """Return the arrays of a chunk in the structure and with the types of a signature.

    Raises
    ------
    UsageError
        The arrays do not match, or a type cannot hold a value.
    """
    if isinstance(signature, dict):
        known = isinstance(arrays, dict) and set(signature) <= set(arrays)
        if known and (not rows.inferred or len(signature) == len(arrays)):
            return {n: fit(arrays[n], s, rows, (*path, n)) for n, s in signature.items()}
    elif isinstance(signature, (tuple, list)):
        if isinstance(arrays, dict):
            names = rows.orders.setdefault(path, tuple(arrays))
            if set(arrays) == set(names):
                arrays = tuple(arrays[name] for name in names)
        elif isinstance(arrays, np.ndarray) and arrays.ndim > 1:
            arrays = tuple(arrays[:, at] for at in range(arrays.shape[1]))
        if isinstance(arrays, tuple) and len(arrays) == len(signature):
            pairs = zip(arrays, signature, strict=True)
            return tuple(fit(a, s, rows, (*path, n)) for n, (a, s) in enumerate(pairs))
    elif isinstance(arrays, np.ndarray):
        return _fit_array(arrays, signature, rows, path)
    elif isinstance(arrays, tuple) and signature.shape[:1].is_compatible_with([len(arrays)]):
        part = type(signature)(signature.shape[1:], signature.dtype)
        fitted = [fit(a, part, rows, (*path, n)) for n, a in enumerate(arrays)]
        return np.stack(fitted, axis=1)
    raise UsageError(
        f"{rows.place(path)} are {_describe(arrays)}, but the signature is {signature}",
        task=rows.node,
        fix="pass the output_signature of one row to as_dataset()",
    )


def _text(path: Path) -> str:
    return ".".join(map(str, path))


def _fit_array(array: np.ndarray[Any, Any], spec: Any, rows: _Rows, path: Path) -> Any:
    if not spec.shape.is_compatible_with(array.shape[1:]):
        raise UsageError(
            f"{rows.place(path)} have the shape {array.shape[1:]}, but the signature is {spec}",
            task=rows.node,
            fix=_FIX,
        )
    dtype = None if spec.dtype.name == "string" else spec.dtype.as_numpy_dtype
    fitted, lost = casts.fit(array, dtype, fractions_only=rows.inferred)
    if lost is not None:
        raise rows.error(path, lost, spec)
    return fitted


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
        return objects(rows())


def objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return values of any types as an array of objects."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


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
        if len({frozenset(part) for part in parts}) > 1:
            raise KeyError
        return {name: concatenate([part[name] for part in parts]) for name in first_part}
    if len({part.dtype.kind for part in parts}) > 1:
        raise TypeError
    if first_part.dtype.kind in "mM" and len({part.dtype for part in parts}) > 1:
        raise TypeError  # a date would become a datetime
    return np.concatenate(parts)
