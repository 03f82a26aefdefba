"""Results of ranks as JSON, and back."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from tfd_notebook.errors import UsageError
from tfd_notebook.net import plain_values


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**80),
        1.5,
        float("-inf"),
        "ü\n",
        b"\xff",
        [1, (2, [3])],
        {"a": {1: 2}, (3, 4): {5}},
        frozenset({"x"}),
        {"array": [1]},
    ],
)
def test_values_keep_their_types(value: Any) -> None:
    packed = json.loads(json.dumps(plain_values.pack(value), allow_nan=False))
    result = plain_values.unpack(packed)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "<f4", ">i8", "complex64", "longdouble", "S3", "U2", "S0", "U0"),
        *("datetime64[s]", "datetime64[25us]", "timedelta64[D]", "timedelta64"),
    ],
)
def test_arrays_keep_dtype_and_shape(dtype: str) -> None:
    array = np.zeros((2, 0, 3), dtype)
    result = plain_values.unpack(plain_values.pack(array))
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    assert plain_values.unpack(plain_values.pack(np.float32(0.5))) == np.float32(0.5)
    text = np.array(["\U0010ffff", "e"], ">U3")
    assert (plain_values.unpack(plain_values.pack(text)) == text).all()


@pytest.mark.parametrize("value", [object(), [lambda: 0], np.array([object()]), 1 + 2j])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="cannot be returned"):
        plain_values.pack(value)


def test_deep_value_is_refused() -> None:
    value: Any = 0
    for _ in range(100):
        value = [value]
    with pytest.raises(UsageError, match="levels"):
        plain_values.pack(value)


SHARED: Any = [0] * 100
for _ in range(6):
    SHARED = [SHARED] * 100


@pytest.mark.parametrize(
    "value",
    [
        np.broadcast_to(np.int8(0), (3_000_000_000,)),
        [np.zeros(300), np.zeros(300)],
        [b"x" * 2000, b"x" * 2000],
        {"a": "x" * 3000, "b": "x" * 3000},
        SHARED,
        np.broadcast_to(np.array(None), (1_000_000_000,)),
        "\x00" * 1000,
    ],
    ids=["array", "arrays", "bytes", "text", "items", "objects", "escapes"],
)
def test_large_value_is_refused_before_it_is_copied(value: Any) -> None:
    """The first array takes no memory, but its copy would take 3 GB."""
    with pytest.raises(UsageError, match=r"MB, the limit is 0.005 MB") as caught:
        plain_values.pack(value, limit=5000)
    assert "return the path" in str(caught.value.fix)


@pytest.mark.parametrize(
    "packed",
    [
        {"array": ["O", [1], base64.b64encode(b"x" * 8).decode()]},
        {"array": ["<f4", [3], base64.b64encode(b"x" * 4).decode()]},
        {"array": ["<f4", [1], "?"]},
        {"array": ["i4,(", [1], "AAAAAA=="]},
        {"array": ["(1,)i4", [1], "AAAAAA=="]},
        {"array": ["9" * 5000, [1], "AAAAAA=="]},
        {"array": [["a", "<f4"], [1], "AAAAAA=="]},
        {"array": ["<U1", [1], base64.b64encode(b"\xff" * 4).decode()]},
        {"array": [">U1", [1], base64.b64encode(b"\xff" * 4).decode()]},
        {"code": "x"},
        {"a": 1, "b": 2},
        {},
    ],
)
def test_invalid_json_is_refused(packed: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        plain_values.unpack(packed)
