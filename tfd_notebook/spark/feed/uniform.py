"""Python's numbers and numpy's arrays as one array: the paths that nearly all rows take.

Going over a million numbers one by one to see that each is a float costs more than all the rest.
The interpreter's own format, `marshal`, writes them in one pass of C with a letter for the type of
each: what it wrote is read as an array of letters and numbers, and the letters tell whether all are
alike. Where a single one is not, or the format is another, the caller takes the slow path.
"""

from __future__ import annotations

import array
import marshal
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

#: The version of the format in which numbers are binary, and nothing refers to anything before it.
_VERSION = 2
_FLOAT = np.dtype([("letter", "S1"), ("number", "<f8")])
_INT = np.dtype([("letter", "S1"), ("number", "<i4")])


@lru_cache(maxsize=64)
def _row(tuples: bool, length: int, whole: bool) -> np.dtype[Any]:
    """How a list, or a tuple, of so many numbers is written."""
    head = [("kind", "S1"), ("length", "<i4")]
    return np.dtype([*head, ("numbers", _INT if whole else _FLOAT, (length,))])


def matrix(rows: Sequence[Any], length: int) -> np.ndarray[Any, Any] | None:
    """Return rows of `length` floats, or of small ints, as an array; None if they are not.

    Parameters
    ----------
    rows : sequence of list or of tuple
        All of one of the two types, each with `length` > 0 items.

    Returns
    -------
    numpy.ndarray, shape (len(rows), length), float64 or int64
    """
    first = type(rows[0][0])
    if first not in (float, int) or type(rows[0][-1]) is not first:
        return None
    tuples, whole = type(rows[0]) is tuple, first is int
    written = marshal.dumps(rows, _VERSION)  # type: ignore[arg-type]
    kind = _row(tuples, length, whole)
    if len(written) != 5 + kind.itemsize * len(rows):
        return None
    read = np.frombuffer(written, kind, offset=5)
    numbers = read["numbers"]
    letter = b"i" if whole else b"g"
    if (
        (numbers["letter"] != letter).any()
        or (read["kind"] != (b"(" if tuples else b"[")).any()
        or (read["length"] != length).any()
    ):
        return None
    return np.ascontiguousarray(numbers["number"], np.int64 if whole else np.float64)


def floats(values: Sequence[float]) -> np.ndarray[Any, Any]:
    """Return floats as an array of float64."""
    return np.frombuffer(array.array("d", values), np.float64)


def integers(values: Sequence[int]) -> np.ndarray[Any, Any] | None:
    """Return ints as an array of int64; None where one does not fit."""
    try:
        return np.frombuffer(array.array("q", values), np.int64)
    except OverflowError:
        return None


def raw(values: Sequence[np.ndarray[Any, Any]], large: int) -> list[Any]:
    """Return the bytes of arrays as buffers to be sent one after the other.

    Arrays of `large` bytes and more are not copied.
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
