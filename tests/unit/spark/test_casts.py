"""Conversions of numbers: a value is kept, rounded where this is allowed, or reported."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from tfd_notebook.spark.casts import cast, numbers

TYPES = ("?", "i1", "u1", "i2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
#: The types to which fractions may be rounded.
SINGLE = (np.float32, np.complex64)
EDGES = [0, 1, -1, 257, 2049, 65520, 2**24 + 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
EDGES += [-(2**63), 0.5, 0.1, 1e-8, 1e300]


def exact(value: Any) -> Any:
    """Return a value that compares exactly, also between types."""
    value = value.item()
    if isinstance(value, complex):
        return (_exact_real(value.real), _exact_real(value.imag))
    return (_exact_real(value), 0)


def _exact_real(value: Any) -> Any:
    return Fraction(value) if math.isfinite(value) else str(value)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(TYPES)))
    elements = numpy_st.from_dtype(dtype)
    fitting = [dtype.type(edge) for edge in EDGES if _fits(edge, dtype)]
    return draw(numpy_st.arrays(dtype, 3, elements=elements | st.sampled_from(fitting)))


def _fits(edge: Any, dtype: np.dtype[Any]) -> bool:
    with np.errstate(all="ignore"):
        try:
            return bool(np.isfinite(dtype.type(edge)))
        except OverflowError:
            return False


def _is_rounded(value: Any, converted: Any, fractions_only: bool) -> bool:
    """Return True if the parts that differ may be rounded."""
    (real, imaginary), (new_real, new_imaginary) = exact(value), exact(converted)
    if converted.dtype.kind != "c" and imaginary != 0:
        return False
    if fractions_only and value.dtype.kind not in "fc":
        return False
    return all(
        before == after
        or (
            not (isinstance(before, str) or isinstance(after, str))
            and not (fractions_only and (abs(before) >= 2**24 or converted.dtype not in SINGLE))
        )
        for before, after in ((real, new_real), (imaginary, new_imaginary))
    )


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(arrays(), st.sampled_from(TYPES), st.booleans())
def test_a_value_is_kept_rounded_or_reported(
    values: np.ndarray[Any, Any], name: str, fractions_only: bool
) -> None:
    dtype = np.dtype(name)
    with np.errstate(all="ignore"):
        converted, lost = cast(values, dtype, fractions_only=fractions_only)
    assert converted.dtype == dtype
    for at, value in enumerate(values):
        is_lost = lost is not None and bool(lost[at])
        if exact(value) == exact(converted[at]):
            assert not is_lost
            continue
        is_rounded = dtype.kind in "fc" and _is_rounded(value, converted[at], fractions_only)
        assert is_lost is not is_rounded


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2.5, True], "f8"),
        ([True, 2], "i8"),
        ([1, 2j], "c16"),
        ([np.int8(1), np.float32(0.5)], "f4"),
        ([2**53 + 1, 0.5], None),
        ([2**70], None),
        ([1, None], None),
        (["1"], None),
        ([np.timedelta64(1, "s"), 1], None),
    ],
)
def test_the_common_type_holds_all_numbers(values: list[Any], dtype: str | None) -> None:
    objects = np.empty(len(values), object)
    objects[:] = values
    found = numbers(objects)
    assert (found is None) == (dtype is None)
    if found is not None:
        assert found.dtype == np.dtype(dtype)
        assert found.tolist() == values


def test_objects_without_a_common_type_are_cast_one_by_one() -> None:
    objects = np.array([2**53 + 1, 0.5, None, 2**70], object)
    converted, lost = cast(objects, np.int64)
    assert lost is not None
    assert lost.tolist() == [False, True, True, True]
    assert converted[0] == 2**53 + 1


@pytest.mark.parametrize(
    ("name", "value", "is_kept", "is_rounded"),
    [
        ("bfloat16", 256.0, True, False),
        ("bfloat16", 257.0, False, True),
        ("bfloat16", 257, False, True),
        ("bfloat16", 1e-50, False, True),
        ("bfloat16", 3.4e39, False, False),
        ("bfloat16", math.inf, True, False),
        ("bfloat16", math.nan, True, False),
        ("float16", 1e-8, False, True),
        ("float16", 65520.0, False, False),
        ("float16", -math.inf, True, False),
        ("float16", math.nan, True, False),
        ("float8_e4m3fn", math.inf, False, False),  # this type has NaN only
        ("float8_e4m3fn", 1000.0, False, False),
        ("float8_e4m3fn", 17.0, False, True),
    ],
)
def test_narrow_floats_round_only_if_all_numbers_may_be_rounded(
    name: str, value: float, is_kept: bool, is_rounded: bool
) -> None:
    dtype = getattr(ml_dtypes, name, name)
    for fractions_only in (True, False):
        _, lost = cast(np.array([value]), dtype, fractions_only=fractions_only)
        assert (lost is None) == (is_kept or (is_rounded and not fractions_only))
