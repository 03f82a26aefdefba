"""Conversions of numbers and text that report each value they would change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_PYTHON = (bool, int, float, complex)
#: Order of the kinds of types: each can hold numbers of those before.
_RANKS = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
#: Whole numbers up to this one are exact in float32.
_EXACT_IN_FLOAT32 = 1 << 24


class Lost(NamedTuple):
    """A value that a type cannot hold.

    Parameters
    ----------
    at : tuple of int
        Its position in the array.
    text : str
        The value and its type.
    """

    at: tuple[int, ...]
    text: str


def fit(
    values: np.ndarray[Any, Any], dtype: Any, *, fractions_only: bool = False
) -> tuple[np.ndarray[Any, Any], Lost | None]:
    """Return values for a tensor, and the first of them that it cannot hold.

    Parameters
    ----------
    values : numpy.ndarray
    dtype : numpy.dtype or None
        None for a tensor of strings.
    fractions_only : bool
        As for `cast`.

    Returns
    -------
    numpy.ndarray
    Lost or None
    """
    if dtype is not None:
        fitted, lost = cast(values, dtype, fractions_only=fractions_only)
    elif values.dtype.kind == "S":
        return values, None
    else:
        lost = ~np.reshape(np.fromiter(map(_is_text, values.flat), bool), values.shape)
        fitted = values
    if lost is None or not lost.any():
        return fitted, None
    at = tuple(map(int, np.argwhere(lost)[0]))
    value = values[at]
    kind = type(value).__name__ if values.dtype.kind == "O" else values.dtype.name
    value = value.item() if isinstance(value, np.generic) else value
    if dtype is None and isinstance(value, str):
        kind = "str with a lone surrogate"
    return fitted, Lost(at, f"{value!r:.80} ({kind})")


def cast(
    values: np.ndarray[Any, Any], dtype: Any, *, fractions_only: bool = False
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Return numbers as `dtype`, and which of them it cannot hold.

    Rounding to a narrower floating-point type is not a loss. The end of its range is. All other
    conversions must keep the value.

    Parameters
    ----------
    values : numpy.ndarray
        An array of objects may have numbers of several types. Other values are lost.
    dtype : numpy.dtype
        A type of numbers or booleans, also one of `ml_dtypes`.
    fractions_only : bool
        Whether only numbers below 2**24 may be rounded, and only to float32. Default False.

    Returns
    -------
    numpy.ndarray
    numpy.ndarray of bool, or None
        True for each lost value. None if no value is lost.
    """
    dtype = np.dtype(dtype)
    if values.dtype.kind == "O":
        found = numbers(values)
        if found is None:
            return _cast_each(values, dtype, fractions_only)
        values = found
    elif values.dtype.kind not in "?biufc":
        return np.zeros(values.shape, dtype), np.ones(values.shape, bool)
    if values.dtype.kind == "c" and values.dtype != dtype:
        return _cast_complex(values, dtype, fractions_only)
    is_long = values.dtype.kind in "iu" and values.dtype.itemsize == 8
    if values.dtype == dtype or (np.can_cast(values.dtype, dtype, "safe") and not is_long):
        return values.astype(dtype, copy=False), None
    may_round = not fractions_only or dtype.char in "fF"
    with np.errstate(all="ignore"):
        converted = values.astype(dtype)
        if not _is_float(dtype):
            kept = _is_same(converted, values)
        elif values.dtype.kind in "iu":
            kept = _is_same(converted, values) if fractions_only else np.isfinite(converted)
        elif (
            may_round
            and dtype.itemsize >= 4
            and np.abs(values).max(initial=0.0) < _EXACT_IN_FLOAT32
        ):
            return converted, None  # the usual case; not true for NaN
        else:
            kept = _is_same(converted, values)
            if may_round:
                limit = _EXACT_IN_FLOAT32 if fractions_only else np.inf
                kept |= np.isfinite(converted) & (np.abs(values) < limit)
    return converted, None if kept.all() else ~kept


def numbers(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return an array of objects as numbers of the narrowest type for all, or None.

    The type is int64, float64 or complex128 for Python's numbers. None if a value is not a number,
    or if the type cannot hold one.
    """
    flat = values.ravel().tolist()
    kinds = set(map(type, flat))
    if not all(kind in _PYTHON or issubclass(kind, (np.number, np.bool_)) for kind in kinds):
        return None
    dtype = np.result_type(*kinds)
    if dtype.kind not in "?biufc" or dtype.char in "gG":  # durations, and more than 64 bits
        return None
    try:
        wide = np.fromiter(flat, dtype, len(flat))
    except OverflowError:
        return None
    same = all(a == b or a != a for a, b in zip(flat, wide.tolist(), strict=True))
    return wide.reshape(values.shape) if same else None


def common(dtypes: Sequence[Any], columns: Sequence[np.ndarray[Any, Any]]) -> np.dtype[Any] | None:
    """Return a type that holds the values of several arrays, or None.

    Integers become the floating-point type of other arrays if it holds them.

    Parameters
    ----------
    dtypes : sequence of numpy.dtype
        Own type of each array. It is narrower than the array for floats that may be rounded.
    columns : sequence of numpy.ndarray
    """
    own = list(map(np.dtype, dtypes))
    if any(dtype.kind not in _RANKS for dtype in own):
        return None
    rank = max(_RANKS[dtype.kind] for dtype in own)
    highest = {dtype for dtype in own if _RANKS[dtype.kind] == rank}
    candidates = sorted(highest, key=lambda dtype: (-dtype.itemsize, dtype.kind))
    for candidate in (*candidates, np.result_type(*own)):
        if all(
            (dtype.kind not in "fc" or np.can_cast(dtype, candidate, "safe"))
            and cast(values, candidate, fractions_only=True)[1] is None
            for dtype, values in zip(own, columns, strict=True)
        ):
            return candidate
    return None


def _is_text(value: Any) -> bool:
    """Return True if a value is bytes, or text that UTF-8 can encode."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    return isinstance(value, (str, bytes, bytearray))


def _cast_each(
    values: np.ndarray[Any, Any], dtype: np.dtype[Any], fractions_only: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Convert objects that have no common type of numbers."""
    flat = values.ravel()
    converted, lost = np.zeros(len(flat), dtype), np.ones(len(flat), bool)
    for at in range(len(flat)):
        own = numbers(flat[at : at + 1])
        if own is not None:
            converted[at : at + 1], is_lost = cast(own, dtype, fractions_only=fractions_only)
            lost[at] = is_lost is not None
    converted, lost = converted.reshape(values.shape), lost.reshape(values.shape)
    return converted, lost if lost.any() else None


def _cast_complex(
    values: np.ndarray[Any, Any], dtype: np.dtype[Any], fractions_only: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    part = np.empty(0, dtype).real.dtype
    converted, lost = cast(values.real, part, fractions_only=fractions_only)
    if dtype.kind == "c":
        _, also_lost = cast(values.imag, part, fractions_only=fractions_only)
        with np.errstate(all="ignore"):
            converted = values.astype(dtype)
    else:
        also_lost = values.imag != 0
    parts = [each for each in (lost, also_lost) if each is not None and each.any()]
    return converted, np.logical_or.reduce(parts) if parts else None


def _is_float(dtype: np.dtype[Any]) -> bool:
    # The types of ml_dtypes, such as bfloat16 and int4, have the kind of raw data.
    return dtype.kind in "fc" or (dtype.kind == "V" and bool(np.array(0.5).astype(dtype)))


def _is_same(converted: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> Any:
    """Return where the conversion kept the value."""
    if converted.dtype.kind == "c" and values.dtype.kind != "c":
        converted = converted.real
    same = (converted.astype(values.dtype) == values) | (
        (values != values) & (converted != converted)
    )
    kinds = values.dtype.kind + converted.dtype.kind
    if set(kinds) <= set("iu"):
        return same & ((converted < 0) == (values < 0))
    for integers, floats in ((values, converted), (converted, values)):
        if integers.dtype.kind in "iu" and floats.dtype.kind == "f":
            # The conversion of numbers beyond the range back to integers is not defined.
            bits = 8 * integers.dtype.itemsize - (integers.dtype.kind == "i")
            same &= np.isfinite(floats) & (floats.astype(np.float64) < 2.0**bits)
    return same
