"""Fast conversion of Python numbers and NumPy arrays to one array, for the most common rows.

A Python loop that checks the type of every number would dominate the total time. `marshal` writes
numbers in C, each with a letter for its type. Its output is read as an array of letters and
numbers, and the letters show whether all types are equal. If one differs, or the format is
different, the caller uses the slow path.
"""

from __future__ import annotations

import array
import marshal
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

#: Version of the marshal format with binary numbers and without back references.
_VERSION = 2
_FLOAT = np.dtype([("letter", "S1"), ("number", "<f8")])
_INT = np.dtype([("letter", "S1"), ("number", "<i4")])


@lru_cache(maxsize=64)
def _row(tuples: bool, length: int, integral: bool) -> np.dtype[Any]:
    """Return the dtype of a marshalled list or tuple with `length` numbers."""
    head = [("kind", "S1"), ("length", "<i4")]
    return np.dtype([*head, ("numbers", _INT if integral else _FLOAT, (length,))])


def matrix(rows: Sequence[Any], length: int) -> np.ndarray[Any, Any] | None:
    """Return rows of `length` floats or of `length` small ints as an array, else None.

    Parameters
    ----------
    rows : sequence of list or of tuple
        All lists or all tuples, each with `length` > 0 items.

    Returns
    -------
    numpy.ndarray, shape (len(rows), length), float64 or int64
    """
    first = type(rows[0][0])
    if first not in (float, int) or type(rows[0][-1]) is not first:
        return None
    tuples, integral = type(rows[0]) is tuple, first is int
    written = marshal.dumps(rows, _VERSION)  # type: ignore[arg-type]
    kind = _row(tuples, length, integral)
    if len(written) != 5 + kind.itemsize * len(rows):
        return None
    read = np.frombuffer(written, kind, offset=5)
    numbers = read["numbers"]
    letter = b"i" if integral else b"g"
    if (
        (numbers["letter"] != letter).any()
        or (read["kind"] != (b"(" if tuples else b"[")).any()
        or (read["length"] != length).any()
    ):
        return None
    return np.ascontiguousarray(numbers["number"], np.int64 if integral else np.float64)


def floats(values: Sequence[float]) -> np.ndarray[Any, Any]:
    """Return floats as a float64 array."""
    return np.frombuffer(array.array("d", values), np.float64)


def integers(values: Sequence[int]) -> np.ndarray[Any, Any] | None:
    """Return ints as an int64 array, or None if one does not fit."""
    try:
        return np.frombuffer(array.array("q", values), np.int64)
    except OverflowError:
        return None


def raw(values: Sequence[np.ndarray[Any, Any]], large: int) -> list[Any]:
    """Return the bytes of arrays as fragments of a buffer.

    Arrays of at least `large` bytes are not copied.
    """
    first = values[0]
    if not first.nbytes:
        return [b""]
    if first.nbytes >= large:
        return [_bytes(value) for value in values]
    try:
        return [b"".join(values)]  # type: ignore[arg-type]
    except (BufferError, ValueError, TypeError):  # not contiguous, or dates
        return [b"".join([_bytes(value) for value in values])]


def _bytes(value: np.ndarray[Any, Any]) -> memoryview:
    flat: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return memoryview(flat)
