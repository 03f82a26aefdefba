"""Decoding of received columns to rows and arrays."""

from __future__ import annotations

import abc
import ctypes
import datetime
import functools
import math
import pickle
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.spark.feed.encode import Layout


class Column(abc.ABC):
    """A received column: values by position.

    Parameters
    ----------
    layout : list
    count : int
        Number of values.
    buffers : iterator of memoryview
        Buffers of the chunk, in the order in which they were appended.
    """

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        self.layout = layout

    @abc.abstractmethod
    def rows(self, start: int, stop: int) -> list[Any]:
        """Return these values as Python values."""

    def by_name(self, start: int, stop: int) -> dict[str, list[Any]] | None:
        """Return the parts of these values by name, or None without common and distinct names."""
        return None

    def arrays(self, start: int, stop: int) -> Any:
        """Return these values as a NumPy array, or as a tuple or dict of arrays.

        Rows with several columns of the same name become a tuple.
        """
        objects = np.empty(stop - start, object)
        objects[:] = self.rows(start, stop)
        return objects


class _Array(Column):
    """NumPy arrays of one shape, NumPy scalars, or Python numbers."""

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        buffer, dtype = next(buffers), np.dtype(layout[1])
        shape = (count, *layout[2]) if len(layout) > 2 else (count,)
        self._values = (
            np.frombuffer(buffer, dtype, math.prod(shape)).reshape(shape)
            if dtype.itemsize  # 0 for text of length 0
            else np.zeros(shape, dtype)
        )

    def rows(self, start: int, stop: int) -> list[Any]:
        values = self._values[start:stop]
        if self.layout[0] in ("python", "number"):
            numbers: list[Any] = values.tolist()
            return numbers
        if self.layout[0] == "array" and values.ndim == 1:
            # The values are arrays without dimensions; iteration would return scalars.
            return [values[at, ...] for at in range(len(values))]
        return list(values)

    def arrays(self, start: int, stop: int) -> Any:
        return self._values[start:stop]


class _Bytes(Column):
    """Bytes or text, from one buffer and the end of each value in it."""

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        self._ends = np.frombuffer(next(buffers), np.int64)
        self._data = next(buffers)

    def rows(self, start: int, stop: int) -> list[Any]:
        ends = self._ends[start:stop].tolist()
        begins = [int(self._ends[start - 1]) if start else 0, *ends]
        spans = (self._data[a:b] for a, b in zip(begins, ends, strict=False))
        return (
            [str(span, "utf-8") for span in spans]
            if self.layout[0] == "str"
            else [*map(bytes, spans)]
        )


class _Fixed(Column):
    """Lists or tuples of one length, with one column for all parts."""

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        self._length = int(layout[2])
        self._parts = decode(layout[3], count * self._length, buffers)

    def rows(self, start: int, stop: int) -> list[Any]:
        length = self._length
        flat = self._parts.rows(start * length, stop * length)
        if self.layout[1] == "list":
            return [flat[at : at + length] for at in range(0, len(flat), length)]
        return list(zip(*[iter(flat)] * length, strict=True))

    def arrays(self, start: int, stop: int) -> Any:
        length = self._length
        parts = self._parts.arrays(start * length, stop * length)
        if isinstance(parts, np.ndarray):
            return parts.reshape(stop - start, length, *parts.shape[1:])
        return super().arrays(start, stop)


class _Columns(Column):
    """Lists, tuples, dicts or Rows with one column per part."""

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        self._kind, self._names = layout[0], layout[1]
        self._columns = [decode(part, count, buffers) for part in layout[2]]

    def rows(self, start: int, stop: int) -> list[Any]:
        rows = zip(*(column.rows(start, stop) for column in self._columns), strict=True)
        if self._kind == "row":
            return [compat_pyspark.named_row(row, self._names) for row in rows]
        if self._kind == "dict":
            return [dict(zip(self._names, row, strict=True)) for row in rows]
        return list(map(list, rows)) if self._kind == "list" else list(rows)

    def by_name(self, start: int, stop: int) -> dict[str, list[Any]] | None:
        if self._names is None or len(set(self._names)) < len(self._columns):
            return None
        parts = (column.rows(start, stop) for column in self._columns)
        return dict(zip(self._names, parts, strict=True))

    def arrays(self, start: int, stop: int) -> Any:
        arrays = [column.arrays(start, stop) for column in self._columns]
        if self._names is None or len(set(self._names)) < len(arrays):
            return tuple(arrays)  # a dict would lose columns with the same name
        return dict(zip(self._names, arrays, strict=True))


class _Pickled(Column):
    """Values of any type; the layout names the type if it is the same for all."""

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        data, separate = next(buffers), list(islice(buffers, layout[2]))
        # The channel is authenticated; see `encode`.
        self._values: list[Any] = pickle.loads(data, buffers=separate)  # noqa: S301

    def rows(self, start: int, stop: int) -> list[Any]:
        return self._values[start:stop]

    def arrays(self, start: int, stop: int) -> Any:
        rows = self._values[start:stop]
        kinds = set(map(type, rows))
        if kinds == {datetime.date}:
            return np.array(rows, "M8[D]")
        # NumPy has neither time zones nor the second hour 2 at the end of summer time.
        if kinds == {datetime.datetime} and not any(value.tzinfo or value.fold for value in rows):
            return np.array(rows, "M8[us]")
        return super().arrays(start, stop)


_COLUMNS: dict[str, type[Column]] = {
    "python": _Array,
    "number": _Array,
    "array": _Array,
    "scalar": _Array,
    "str": _Bytes,
    "bytes": _Bytes,
    "fix": _Fixed,
    "list": _Columns,
    "tuple": _Columns,
    "dict": _Columns,
    "row": _Columns,
    "pickle": _Pickled,
}


def decode(layout: Layout, count: int, buffers: Iterator[memoryview]) -> Column:
    """Return the column of `count` values that `layout` describes, over `buffers`."""
    return _COLUMNS[layout[0]](layout, count, buffers)


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
#: Allocations up to this size use the heap, which is reused. 32 MiB is the maximum in glibc.
_HEAP_LIMIT = 32 << 20
#: Bytes of free memory that stay at the end of the heap, and bytes by which it grows.
_HEAP_FREE = 256 << 20
_HEAP_GROWTH = 16 << 20


def aligned_buffer(size: int) -> np.ndarray[Any, Any]:
    """Return `size` bytes, not initialized, aligned to 64 bytes for use by TensorFlow."""
    buffer = np.empty(size + 64, np.uint8)
    begin = -buffer.__array_interface__["data"][0] % 64
    return buffer[begin : begin + size]


@functools.cache
def reuse_large_buffers() -> bool:
    """Keep the memory of large rows in this process; return True if the C library supports it."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    settings = (
        (_MMAP_THRESHOLD, _HEAP_LIMIT),
        (_TRIM_THRESHOLD, _HEAP_FREE),
        (_TOP_PAD, _HEAP_GROWTH),
    )
    return all(mallopt(name, value) for name, value in settings)
