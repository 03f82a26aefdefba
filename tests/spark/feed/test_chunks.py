"""Encoding of rows as chunks, the size of chunks, and the memory that chunks use."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from tfd_notebook.errors import UsageError
from tfd_notebook.spark.feed import chunks
from tfd_notebook.spark.feed.chunks import Chunk, pack, packed
from tfd_notebook.spark.feed.datafeed import DataFeed

pyspark_types = pytest.importorskip("pyspark.sql.types")
Row = pyspark_types.Row
Point = collections.namedtuple("Point", "x y")
Ordered = collections.namedtuple("Ordered", "a b")
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
    assert [_exactly(row) for row in restored] == [_exactly(row) for row in rows]
    # Parts of a chunk give the same rows.
    parts = [row for at in range(len(rows)) for row in chunk.rows(at, at + 1)]
    assert [_exactly(row) for row in parts] == [_exactly(row) for row in rows]


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


def _exactly(value: Any) -> Any:
    """Return a value that is equal only if type and value are equal."""
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, repr(value.tolist()))
    if isinstance(value, (list, tuple)):
        fields = getattr(value, "__fields__", None)
        return (type(value).__name__, fields, [_exactly(part) for part in value])
    if isinstance(value, dict):
        return ("dict", [(_exactly(k), _exactly(v)) for k, v in value.items()])
    return (type(value), repr(value))


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.dates(),
    st.datetimes(),
    st.decimals(allow_nan=False),
    st.sampled_from(Color),
    numpy_st.arrays(
        st.sampled_from(["i1", ">i4", "u8", "f2", "f4", "f8", "?", "c8", "M8[D]", "U2", "S3"]),
        st.sampled_from([(), (0,), (2,), (2, 2)]),
    ),
    numpy_st.from_dtype(np.dtype("f4")),
    numpy_st.from_dtype(np.dtype("u8")),
    st.timedeltas(),
    st.binary(max_size=3).map(bytearray),
    st.datetimes(timezones=st.just(UTC)),
    st.sampled_from([b"x" * 50_000, b"y" * 50_000]),
)
VALUES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", 1]), parts, max_size=3),
        parts.map(lambda part: Row(a=part, b=1)),
        st.tuples(parts, parts).map(lambda pair: Point(*pair)),
    ),
    max_leaves=4,
)


def of_one_kind(example: Any) -> st.SearchStrategy[Any]:
    """Return values that resemble `example`, so that they share a column."""
    if isinstance(example, (list, tuple)) and type(example) in (list, tuple):
        parts = st.tuples(*map(of_one_kind, example))
        return parts.map(list) if isinstance(example, list) else parts
    if isinstance(example, dict):
        return st.fixed_dictionaries({key: of_one_kind(part) for key, part in example.items()})
    if type(example) is int:
        return st.integers(-(2**65), 2**65) | st.sampled_from([Color.RED, True])
    return st.floats(width=32) | st.just(example) if type(example) is float else st.just(example)


def similar(example: Any) -> st.SearchStrategy[Any]:
    """Return values like `example`, whose keys have another order or are missing, and None."""
    if isinstance(example, (list, tuple)) and type(example) in (list, tuple):
        parts = st.tuples(*map(similar, example))
        return parts.map(list) if isinstance(example, list) else parts
    if isinstance(example, dict):
        pairs = [st.tuples(st.just(key), similar(part)) for key, part in example.items()]
        whole = st.tuples(*pairs).flatmap(st.permutations).map(dict)
        return whole | whole.map(lambda row: dict(list(row.items())[1:]))
    return of_one_kind(example) | st.none() if type(example) in (int, str) else of_one_kind(example)


class Chunks:
    """Chunks instead of an inbox."""

    node = "worker:0"

    def __init__(self, chunks: list[list[Any]]) -> None:
        self._chunks = [received(rows) for rows in chunks]

    def next_chunk(self, name: str) -> Any:
        return (SimpleNamespace(infer=False), self._chunks.pop(0)) if self._chunks else None

    def wait_for_chunk(self, name: str, timeout: float) -> bool:
        return True

    def count_rows(self, source: Any, count: int) -> None: ...

    def acknowledge(self, source: Any) -> None: ...


def row_of(arrays: Any, at: int) -> Any:
    """Return a row of arrays."""
    if isinstance(arrays, dict):
        return {name: row_of(part, at) for name, part in arrays.items()}
    return arrays[at] if isinstance(arrays, np.ndarray) else tuple(row_of(a, at) for a in arrays)


def assert_kept(sent: Any, got: Any) -> None:
    """Fail if a value differs from its counterpart in arrays."""
    if isinstance(sent, (np.ndarray, np.generic)) and isinstance(got, (np.ndarray, np.generic)):
        # Arrays of one kind are joined, of integers for example.
        assert (sent.dtype.kind, sent.shape) == (got.dtype.kind, got.shape)
        assert repr(sent.tolist()) == repr(got.astype(sent.dtype).tolist())
    elif type(sent) is type(got) and not isinstance(sent, (list, tuple, dict)):
        assert _exactly(sent) == _exactly(got)
    elif isinstance(got, dict):
        names = chunks.by_name(sent)
        assert names is not None
        assert set(names) == set(got)
        for name in got:
            assert_kept(names[name], got[name])
    elif isinstance(got, (list, tuple)) or (isinstance(got, np.ndarray) and got.ndim):
        for part, own in zip(sent, got, strict=True):
            assert_kept(part, own)
    else:
        assert _exactly(sent) == _exactly(got.item())


#: Chunks of similar rows and of any rows.
CHUNKS = st.lists(
    st.lists(VALUES, min_size=1, max_size=3), min_size=1, max_size=3
) | VALUES.flatmap(
    lambda one: st.lists(st.lists(similar(one), min_size=1, max_size=3), min_size=1, max_size=4)
)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(VALUES, min_size=1, max_size=5)
    | VALUES.flatmap(lambda one: st.lists(of_one_kind(one), min_size=1, max_size=5))
)
def test_random_rows_are_restored(rows: list[Any]) -> None:
    chunk = received(rows)
    for start in range(len(rows)):
        restored = chunk.rows(start, len(rows))
        assert [_exactly(row) for row in restored] == [_exactly(row) for row in rows[start:]]
        assert len(chunk.rows(0, start)) == start


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(CHUNKS, st.integers(1, 5))
def test_random_rows_in_random_chunks_arrive_unchanged(parts: list[Any], size: int) -> None:
    rows = list(itertools.chain.from_iterable(parts))
    feed, arrived = DataFeed(Chunks(parts)), []
    while not feed.should_stop():
        arrived += feed.next_batch(size)
    assert list(map(_exactly, arrived)) == list(map(_exactly, rows))
    feed, at = DataFeed(Chunks(parts)), 0
    while at < len(rows):
        arrays = feed.next_numpy(size)
        for number in range(min(size, len(rows) - at)):
            assert_kept(rows[at + number], row_of(arrays, number))
        at += size


def _mapped(row: Any) -> Any:
    """Return the values of the columns a and b, or None if a row does not have them."""
    names = chunks.by_name(row)
    if names is not None:
        return [names["a"], names["b"]] if {"a", "b"} <= set(names) else None
    is_sequence = isinstance(row, (list, tuple)) or (isinstance(row, np.ndarray) and row.ndim > 0)
    return list(row) if is_sequence and len(row) == 2 else None


PAIRS = st.tuples(LEAVES, LEAVES).flatmap(
    lambda pair: st.sampled_from(
        [
            pair,
            list(pair),
            {"a": pair[0], "b": pair[1]},
            {"b": pair[1], "c": 0, "a": pair[0]},
            Row(b=pair[1], a=pair[0]),
            Ordered(*pair),
            pair[:1],
            (*pair, 0),
            {"a": pair[0]},
        ]
    )
)
PAIRS_IN_CHUNKS = st.lists(st.lists(PAIRS, min_size=1, max_size=3), min_size=1, max_size=3)
SIMILAR_PAIRS = st.tuples(LEAVES, LEAVES).flatmap(
    lambda pair: st.lists(
        st.lists(similar(pair) | similar({"b": pair[1], "a": pair[0]}), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    )
)


@pytest.mark.parametrize("method", ["next_batch", "next_numpy"])
def test_columns_of_random_rows_arrive_unchanged_or_a_row_is_named(method: str) -> None:
    @hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
    @hypothesis.given(PAIRS_IN_CHUNKS | SIMILAR_PAIRS)
    def check(parts: list[Any]) -> None:
        rows = list(itertools.chain.from_iterable(parts))
        expected = list(map(_mapped, rows))
        feed = DataFeed(Chunks(parts), input_mapping={"b": "y", "a": "x"})
        if None in expected:
            # Rows of a chunk whose columns have other names are read in the order of the first.
            with pytest.raises(UsageError, match=r"row \d+"):
                getattr(feed, method)(len(rows))
            return
        batch = getattr(feed, method)(len(rows))
        for number, (x, y) in enumerate(expected):
            for sent, column in ((x, batch["x"]), (y, batch["y"])):
                if method == "next_batch":
                    assert _exactly(sent) == _exactly(column[number])
                else:
                    assert_kept(sent, row_of(column, number))

    check()


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
