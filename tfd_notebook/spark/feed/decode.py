"""Decoding of received columns to rows and arrays."""

from __future__ import annotations

import abc
import ctypes
import datetime
import decimal
import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.spark.feed.encode import EPOCH, Layout


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
        self.count = count
        self.layout = layout

    @abc.abstractmethod
    def rows(self, start: int, stop: int) -> list[Any]:
        """Return these values as Python values."""

    def arrays(self, start: int, stop: int) -> Any:
        """Return these values as a NumPy array, or as a tuple or dict of arrays."""
        objects = np.empty(stop - start, object)
        objects[:] = self.rows(start, stop)
        return objects


class _Nothing(Column):
    def rows(self, start: int, stop: int) -> list[Any]:
        return [None] * (stop - start)


class _Numbers(Column):
    """Python numbers."""

    _DTYPES: ClassVar[dict[str, Any]] = {
        "bool": np.bool_,
        "int": np.int64,
        "float": np.float64,
        "complex": np.complex128,
    }

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        self._values: Any = np.frombuffer(next(buffers), self._DTYPES[layout[0]])

    def rows(self, start: int, stop: int) -> list[Any]:
        values: list[Any] = self._values[start:stop].tolist()
        return values

    def arrays(self, start: int, stop: int) -> Any:
        return self._values[start:stop]

    def nested(self, start: int, stop: int, length: int) -> list[Any]:
        """Return lists of `length` values each."""
        part: list[Any] = self._values[start * length : stop * length].reshape(-1, length).tolist()
        return part


class _Typed(_Numbers):
    """Python numbers with a dtype for arrays."""

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        Column.__init__(self, layout, count, buffers)
        self._values = np.frombuffer(next(buffers), layout[1])


class _Days(_Numbers):
    _DTYPES: ClassVar[dict[str, Any]] = {"date": np.int64, "datetime": np.int64}

    def rows(self, start: int, stop: int) -> list[Any]:
        numbers = self._values[start:stop].tolist()
        if self.layout[0] == "date":
            return list(map(datetime.date.fromordinal, numbers))
        return [EPOCH + datetime.timedelta(microseconds=number) for number in numbers]

    def arrays(self, start: int, stop: int) -> Any:
        if self.layout[0] == "date":
            days = self._values[start:stop] - EPOCH.toordinal()
            return days.astype("datetime64[D]")
        return self._values[start:stop].view("datetime64[us]")


class _Bytes(Column):
    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        self._ends = np.frombuffer(next(buffers), np.int64)
        self._data = next(buffers)

    def _spans(self, start: int, stop: int) -> Iterator[memoryview]:
        ends = self._ends[start:stop].tolist()
        begins = [int(self._ends[start - 1]) if start else 0, *ends]
        data = self._data
        return (data[a:b] for a, b in zip(begins, ends, strict=False))

    def rows(self, start: int, stop: int) -> list[Any]:
        kind = bytearray if self.layout[0] == "bytearray" else bytes
        return list(map(kind, self._spans(start, stop)))


class _Text(_Bytes):
    def rows(self, start: int, stop: int) -> list[Any]:
        return [str(span, "utf-8", "surrogatepass") for span in self._spans(start, stop)]


class _Parsed(Column):
    """Values sent as text."""

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        self._text = decode(layout[1], count, buffers)

    def rows(self, start: int, stop: int) -> list[Any]:
        kind: Callable[[str], Any] = int if self.layout[0] == "big" else decimal.Decimal
        return list(map(kind, self._text.rows(start, stop)))


class _Fixed(Column):
    """Lists or tuples of one length, with one column for all parts."""

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        self._list, self._length = layout[1] == "list", int(layout[2])
        self._parts = decode(layout[3], count * self._length, buffers)

    def rows(self, start: int, stop: int) -> list[Any]:
        length = self._length
        if not length:
            return [[] if self._list else () for _ in range(stop - start)]
        if self._list and isinstance(self._parts, _Numbers):
            return self._parts.nested(start, stop, length)
        flat = self._parts.rows(start * length, stop * length)
        if self._list:
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
            names = self._names
            if not names:
                return [{} for _ in range(stop - start)]
            return [dict(zip(names, row, strict=True)) for row in rows]
        return list(map(list, rows)) if self._names == "list" else list(rows)

    def arrays(self, start: int, stop: int) -> Any:
        arrays = [column.arrays(start, stop) for column in self._columns]
        if self._kind == "seq":
            return tuple(arrays)
        return dict(zip(self._names, arrays, strict=True))


class _Varying(Column):
    """Lists or tuples of several lengths, or dicts with several sets of keys."""

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        is_map = layout[0] == "map"
        self._kind = "dict" if is_map else layout[1]
        lengths = decode(layout[1] if is_map else layout[2], count, buffers).arrays(0, count)
        self._ends = np.cumsum(lengths)
        total = int(self._ends[-1]) if count else 0
        self._parts = [decode(part, total, buffers) for part in layout[2 if is_map else 3 :]]

    def _span(self, start: int, stop: int) -> tuple[list[int], list[int], int, int]:
        first = int(self._ends[start - 1]) if start else 0
        ends = (self._ends[start:stop] - first).tolist()
        return [0, *ends][:-1], ends, first, first + (ends[-1] if ends else 0)

    def rows(self, start: int, stop: int) -> list[Any]:
        begins, ends, first, last = self._span(start, stop)
        flat = self._parts[0].rows(first, last)
        if self._kind == "dict":
            flat = list(zip(flat, self._parts[1].rows(first, last), strict=True))
        pieces = [flat[a:b] for a, b in zip(begins, ends, strict=True)]
        if self._kind == "list":
            return pieces
        return list(map(tuple if self._kind == "tuple" else dict, pieces))


class _Array(Column):
    """NumPy arrays of one shape, or NumPy scalars."""

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        shape = layout[2] if layout[0] == "array" else ()
        self._values = _typed(next(buffers), layout[1], (count, *shape))

    def rows(self, start: int, stop: int) -> list[Any]:
        values = self._values
        if self.layout[0] == "array" and values.ndim == 1:
            # The values are arrays without dimensions; iteration would return scalars.
            return [values[at, ...] for at in range(start, stop)]
        return list(values[start:stop])

    def arrays(self, start: int, stop: int) -> Any:
        return self._values[start:stop]


class _Arrays(Column):
    """NumPy arrays of several shapes."""

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        self._shapes = np.frombuffer(next(buffers), np.int64).reshape(count, layout[2])
        self._ends = np.cumsum(self._shapes.prod(axis=1))
        self._values = _typed(next(buffers), layout[1], (int(self._ends[-1]) if count else 0,))

    def rows(self, start: int, stop: int) -> list[Any]:
        ends = self._ends[start:stop].tolist()
        begins = [int(self._ends[start - 1]) if start else 0, *ends]
        shapes = self._shapes[start:stop].tolist()
        return [
            self._values[a:b].reshape(shape)
            for a, b, shape in zip(begins, ends, shapes, strict=False)
        ]


def _typed(buffer: memoryview, dtype: str, shape: tuple[int, ...]) -> Any:
    kind = np.dtype(dtype)
    if not kind.itemsize:  # a string dtype of length 0
        return np.zeros(shape, kind)
    return np.frombuffer(buffer, kind).reshape(shape)


class _Union(Column):
    """Values of several types."""

    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        self._turns = np.frombuffer(next(buffers), np.uint8)
        self._columns = [decode(part, size, buffers) for size, part in layout[1]]

    def rows(self, start: int, stop: int) -> list[Any]:
        before, turns = self._turns[:start], self._turns[start:stop]
        following = []
        for turn, column in enumerate(self._columns):
            first = int(np.count_nonzero(before == turn))
            following.append(
                iter(column.rows(first, first + int(np.count_nonzero(turns == turn)))).__next__
            )
        return [following[turn]() for turn in turns.tolist()]


class _Pickled(Column):
    def __init__(self, layout: Layout, count: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(layout, count, buffers)
        # The channel is authenticated; see `encode`.
        self._values: list[Any] = pickle.loads(next(buffers))  # noqa: S301

    def rows(self, start: int, stop: int) -> list[Any]:
        return self._values[start:stop]


_COLUMNS: dict[str, type[Column]] = {
    "none": _Nothing,
    "bool": _Numbers,
    "int": _Numbers,
    "float": _Numbers,
    "complex": _Numbers,
    "number": _Typed,
    "big": _Parsed,
    "decimal": _Parsed,
    "str": _Text,
    "bytes": _Bytes,
    "bytearray": _Bytes,
    "date": _Days,
    "datetime": _Days,
    "fix": _Fixed,
    "seq": _Columns,
    "dict": _Columns,
    "row": _Columns,
    "var": _Varying,
    "map": _Varying,
    "array": _Array,
    "scalar": _Array,
    "arrays": _Arrays,
    "union": _Union,
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
