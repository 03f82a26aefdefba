"""Encoding of rows as chunks, the size of chunks, and the memory that chunks use."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfd_notebook.spark.feed.chunks import Chunk, pack, packed

pyspark_types = pytest.importorskip("pyspark.sql.types")
Row = pyspark_types.Row
Point = collections.namedtuple("Point", "x y")
Color = enum.IntEnum("Color", "RED GREEN")
UTC = datetime.timezone.utc

ROWS: dict[str, list[Any]] = {
    "floats": [[1.5, float("inf")], [3.0, -0.0]],
    "float": [1.5, 2.0, 3.25],
    "floats and an int": [[1.0, 2.0], [3.0, 4]],
    "floats and a bool": [(1.0, 2.0, 3.0), (True, 1.0, 2.0)],
    "floats of numpy among others": [(0.1, np.float64(2), 1.0)] * 2,
    "ints": [(1, 2), (3, -4)],
    "ints of several sizes": [(1, 2**40), (3, -(2**63))],
    "members of an enumeration": [[1, Color.RED, 2], [Color.RED, 3, 4]],
    "huge ints": [2**70, -(2**90), 1],
    "an int": [7, 0, -1],
    "bool": [True, False],
    "bools and ints": [[True, 1], [False, 2]],
    "complex": [1 + 2j, 3j],
    "text": ["a", "", "ü€😀", "\ud800"],
    "bytes": [b"", b"abc", bytes(range(256))],
    "large bytes": [bytes([n]) * 100_000 for n in range(12)],
    "bytearray": [bytearray(b"x"), bytearray()],
    "None": [None, None],
    "None among others": [None, 1, "a", None, 2.5],
    "None in a tuple": [(1, None), (2, 3.0)],
    "alternating types": ["x", 1, "y", 2, None, b"z", 1.0],
    "array": [np.arange(6, dtype=np.uint8).reshape(2, 3)] * 3,
    "large array": [np.full((200, 300), n, np.float32) for n in range(3)],
    "array in Fortran's order": [np.array([[1, 2], [3, 4]], order="F")],
    "part of an array": [np.arange(10)[::2], np.arange(10)[1::2]],
    "arrays of several shapes": [np.ones(2), np.ones(3), np.ones(0)],
    "arrays of several types": [np.ones(2), np.ones(2, np.int8)],
    "array without dimensions": [np.array(3.0), np.array(4.0)],
    "empty arrays": [np.zeros((0, 3), np.float32)] * 2,
    "array of the other byte order": [np.array([1, 2], ">i4")],
    "array of text": [np.array(["ab", "c"]), np.array(["xy", "z"])],
    "array of dates": [np.array(["2020-01-01"], "M8[D]")],
    "array of objects": [np.array([None, 1], object)],
    "numpy scalars": [np.float32(2), np.float32(3)],
    "a numpy date": [np.datetime64("2020-01-01")],
    "image and label": [(np.ones((2, 2), np.uint8), 3), (np.zeros((2, 2), np.uint8), 4)],
    "two arrays": [(np.ones(2), np.ones(3))] * 2,
    "empty lists": [[], []],
    "empty tuples": [(), ()],
    "lists of several lengths": [[], [1], [1, 2]],
    "tuples of several lengths": [(), ("a",), ("a", 2)],
    "tuples of one length with other types": [(1, "a", b"b", 2.0, None)] * 3,
    "long lists of several types": [[1.0, None] * 50] * 2,
    "nested": [((1, 2), [3.0, [4, (5,)]])] * 2,
    "nested with several lengths": [[[1], [3, 4]], [[5, 6], [7]]],
    "nested and empty": [[[], []], [[], []]],
    "dict": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}],
    "dicts of several keys": [{"a": 1}, {"b": 2.0, "c": None}, {}],
    "dict with keys of other types": [{1: 2, (3,): 4}],
    "empty dicts": [{}, {}],
    "order of keys": [{"a": 1, "b": 2}, {"b": 3, "a": 4}],
    "Row": [Row(a=1, b="x"), Row(a=2, b=None)],
    "Rows of several fields": [Row(a=1), Row(b=1)],
    "Row within a Row": [Row(a=Row(b=[1, 2]), c=2.0)] * 2,
    "date": [datetime.date(2020, 2, 29), datetime.date.min],
    "datetime": [datetime.datetime(2020, 1, 1, 3, 4, 5, 6), datetime.datetime.max],
    "datetime with a zone": [datetime.datetime(2020, 1, 1, tzinfo=UTC)],
    "duration": [datetime.timedelta(1, 2, 3)],
    "decimal": [decimal.Decimal("1.20"), decimal.Decimal("-1E+3")],
    "set": [{1, 2}],
    "namedtuple": [Point(1, 2), Point(3, 4)],
    "path": [Path("a")],
}


def received(rows: list[Any]) -> Chunk:
    """Return `rows` as a node receives them: header as JSON and a buffer with the body."""
    packed_rows = pack(rows)
    body = bytearray(b"".join(packed_rows.body))
    assert len(body) == packed_rows.size
    return Chunk(json.loads(json.dumps(packed_rows.header)), memoryview(body))


@pytest.mark.parametrize("kind", ROWS)
def test_rows_are_restored(kind: str) -> None:
    rows = ROWS[kind]
    chunk = received(rows)
    restored = chunk.rows(0, chunk.count)
    assert [exactly(row) for row in restored] == [exactly(row) for row in rows]
    # Parts of a chunk give the same rows.
    parts = [row for at in range(len(rows)) for row in chunk.rows(at, at + 1)]
    assert [exactly(row) for row in parts] == [exactly(row) for row in rows]


@pytest.mark.parametrize("kind", ROWS)
def test_arrays_hold_the_rows(kind: str) -> None:
    rows = ROWS[kind]
    arrays = received(rows).arrays(0, len(rows))
    while not isinstance(arrays, np.ndarray):
        arrays = list(arrays.values() if isinstance(arrays, dict) else arrays)
        if not arrays:
            return
        arrays = arrays[0]
    assert len(arrays) == len(rows)


def exactly(value: Any) -> Any:
    """Return a value that is equal only if type and value are equal."""
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, repr(value.tolist()))
    if isinstance(value, (list, tuple)):
        fields = getattr(value, "__fields__", None)
        return (type(value).__name__, fields, [exactly(part) for part in value])
    if isinstance(value, dict):
        return ("dict", [(exactly(k), exactly(v)) for k, v in value.items()])
    return (type(value), repr(value))


def test_numbers_arrays_and_large_bytes_are_not_pickled() -> None:
    plain = {kind for kind, rows in ROWS.items() if "pickle" not in json.dumps(pack(rows).header)}
    assert plain == {
        *("floats", "float", "ints", "ints of several sizes", "an int", "bool", "complex"),
        *("bools and ints", "nested", "Row within a Row"),
        *("array", "large array", "array in Fortran's order", "part of an array", "two arrays"),
        *("array without dimensions", "array of the other byte order", "array of dates"),
        *("array of text", "empty arrays", "numpy scalars", "a numpy date", "image and label"),
        *("floats of numpy among others", "large bytes"),
    }


def test_chunks_have_about_a_mebibyte() -> None:
    rows = [bytes(150_000) for _ in range(40)] + [[float(n)] * 10 for n in range(100_000)]
    chunks = list(packed(rows))
    assert sum(chunk.count for chunk in chunks) == len(rows)
    assert max(chunk.size for chunk in chunks) < 2 << 20
    assert len(chunks) < 25


def test_chunks_stay_small_if_rows_become_larger() -> None:
    rows = [b"x"] * 5000 + [bytes(1 << 20)] * 20 + [b"y"] * 10
    chunks = list(packed(iter(rows)))
    assert sum(chunk.count for chunk in chunks) == len(rows)
    assert max(chunk.size for chunk in chunks) < 3 << 20


def test_a_row_larger_than_a_chunk_gets_its_own_chunk() -> None:
    assert [chunk.count for chunk in packed([bytes(5 << 20)] * 3)] == [1, 1, 1]


def test_slow_rows_do_not_wait_for_a_full_chunk() -> None:
    def rows() -> Iterator[int]:
        for number in range(40):
            time.sleep(0.02)
            yield number

    chunks = list(packed(rows(), linger=0.1))
    assert len(chunks) > 2
    assert sum(chunk.count for chunk in chunks) == 40


def test_large_values_are_not_copied_before_they_are_sent() -> None:
    value = bytes(1 << 20)
    assert any(part.obj is value for part in pack([value]).body)
    array = np.zeros(1 << 20, np.uint8)
    for rows in ([array], [array, array[1:]], [{"a": array, "b": None}, {"a": array}]):
        parts = [np.frombuffer(part, np.uint8) for part in pack(rows).body if part]
        assert any(np.shares_memory(part, array) for part in parts)
