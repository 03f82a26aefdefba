"""Random rows of every kind arrive unchanged, or an error names a row."""

from __future__ import annotations

import collections
import itertools
import re
import tempfile
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from tests.spark._feeding import fed_inbox
from tests.spark.feed.test_chunks import UTC, Color, Point, Row, exactly, received
from tfd_notebook.errors import UsageError
from tfd_notebook.spark.feed import chunks
from tfd_notebook.spark.feed.datafeed import DataFeed

pytestmark = pytest.mark.integration

Ordered = collections.namedtuple("Ordered", "a b")

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
        assert exactly(sent) == exactly(got)
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
        assert exactly(sent) == exactly(got.item())


#: Chunks of similar rows and of any rows.
CHUNKS = st.lists(
    st.lists(VALUES, min_size=1, max_size=3), min_size=1, max_size=3
) | VALUES.flatmap(
    lambda one: st.lists(st.lists(similar(one), min_size=1, max_size=3), min_size=1, max_size=4)
)


def like(example: Any) -> st.SearchStrategy[Any]:
    """Return values that a tensor of `example` may hold, and numbers that need a wider type."""
    if isinstance(example, Row):
        names = example.__fields__
        return st.tuples(*map(like, example)).map(
            lambda parts: Row(**dict(zip(names, parts, strict=True)))
        )
    if isinstance(example, (list, tuple)):
        return st.tuples(*map(like, example)).map(type(example))
    if isinstance(example, dict):
        pairs = [st.tuples(st.just(key), like(part)) for key, part in example.items()]
        return st.tuples(*pairs).flatmap(lambda own: st.sampled_from([own, own[::-1]])).map(dict)
    if isinstance(example, np.ndarray):
        return numpy_st.arrays(st.sampled_from(["i1", "i4", "f2", "f4", "f8"]), example.shape)
    if isinstance(example, (str, bytes)):
        return st.just(example) | (
            st.text(max_size=3) if isinstance(example, str) else st.binary(max_size=3)
        )
    return st.just(example) | st.one_of(
        st.integers(-3, 3),
        st.floats(width=32),
        st.sampled_from([True, 2**24 + 1, 0.1, 2j, np.float32(2049), np.float32(1e-8)]),
    )


#: Chunks of rows of which most become tensors.
TENSORS = st.recursive(
    st.sampled_from([1, 0.5, True, np.uint8(200), np.float16(0.5), np.float32(0.5)])
    | st.sampled_from([np.ones((2, 2), "i4"), np.ones((2, 2), "f2"), "a", b"a"]),
    lambda parts: (
        st.lists(parts, min_size=1, max_size=3)
        | st.tuples(parts, parts)
        | st.fixed_dictionaries({"a": parts, "b": parts})
        | st.tuples(parts, parts).map(lambda pair: Row(a=pair[0], b=pair[1]))
    ),
    max_leaves=3,
).flatmap(lambda one: st.lists(st.lists(like(one), min_size=1, max_size=3), min_size=1, max_size=4))


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(VALUES, min_size=1, max_size=5)
    | VALUES.flatmap(lambda one: st.lists(of_one_kind(one), min_size=1, max_size=5))
)
def test_random_rows_are_restored(rows: list[Any]) -> None:
    chunk = received(rows)
    for start in range(len(rows)):
        restored = chunk.rows(start, len(rows))
        assert [exactly(row) for row in restored] == [exactly(row) for row in rows[start:]]
        assert len(chunk.rows(0, start)) == start


def read_batch(feed: DataFeed, rows: list[Any], size: int) -> None:
    arrived = []
    while not feed.should_stop():
        arrived += feed.next_batch(size)
    assert list(map(exactly, arrived)) == list(map(exactly, rows))


def read_numpy(feed: DataFeed, rows: list[Any], size: int) -> None:
    for at in range(0, len(rows), size):
        arrays = feed.next_numpy(size)
        for number, row in enumerate(rows[at : at + size]):
            assert_kept(row, row_of(arrays, number))


def read_dataset(feed: DataFeed, rows: list[Any], size: int) -> None:
    batches = feed.as_dataset(size).as_numpy_iterator()
    orders: dict[Any, tuple[str, ...]] = {}
    for at in range(0, len(rows), size):
        batch = next(batches)
        for number, row in enumerate(rows[at : at + size]):
            assert_tensor(row, row_of(batch, number), orders)
    assert next(batches, None) is None


def assert_tensor(sent: Any, got: Any, orders: dict[Any, Any], path: Any = ()) -> None:
    """Fail if a value differs from its tensor. Only fractions of Python may be rounded."""
    names = chunks.by_name(sent)
    if isinstance(got, dict):
        assert names is not None
        assert set(names) == set(got)
        for name, part in got.items():
            assert_tensor(names[name], part, orders, (*path, name))
    elif names is not None or isinstance(sent, (list, tuple)):
        if names is not None:  # the keys have the order of the first row
            order = orders.setdefault(path, tuple(names))
            sent = [names[name] for name in order]
        for at, (part, own) in enumerate(zip(sent, got, strict=True)):
            assert_tensor(part, own, orders, (*path, at))
    elif isinstance(sent, np.ndarray):
        assert sent.shape == np.shape(got)
        for part, own in zip(sent.flat, np.ravel(got), strict=True):
            assert_tensor(part, own, orders, path)
    elif isinstance(sent, (str, bytes, bytearray)):
        assert got == (sent.encode() if isinstance(sent, str) else sent)
    elif type(sent) is float and got.dtype == np.float32 and abs(sent) < 2**24:
        assert got == np.float32(sent)
    else:
        value = sent.item() if isinstance(sent, np.generic) else sent
        assert got.item() == value or (value != value and got.item() != got.item())


#: Functions that read all rows and compare them, and the least number of examples that arrive.
READERS: dict[str, tuple[Any, int]] = {
    "next_batch": (read_batch, 100),
    "next_numpy": (read_numpy, 100),
    "as_dataset": (read_dataset, 35),
}


@pytest.mark.parametrize("method", READERS)
def test_random_rows_in_random_chunks_arrive_unchanged_or_raise(method: str) -> None:
    read, least = READERS[method]
    arrived = []

    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
    @hypothesis.given(CHUNKS | TENSORS, st.integers(1, 5))
    @hypothesis.example([[np.float16(0.5)], [np.float32(2049)]], 1)
    @hypothesis.example([[np.ones(2, "f2")], [np.ones(2, "f2"), np.full(2, 0.1)]], 1)
    def check(parts: list[Any], size: int) -> None:
        with tempfile.TemporaryDirectory() as directory, fed_inbox(directory, *parts) as inbox:
            feed = DataFeed(inbox)
            try:
                read(feed, list(itertools.chain.from_iterable(parts)), size)
            except UsageError:
                assert method == "as_dataset"
                return
            except tf.errors.OpError as error:
                assert "UsageError" in str(error)  # noqa: PT017
                assert re.search(r"rows? (from )?\d+", str(error))  # noqa: PT017
                return
        arrived.append(parts)

    check()
    assert len(arrived) >= least


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
        with tempfile.TemporaryDirectory() as directory, fed_inbox(directory, *parts) as inbox:
            feed = DataFeed(inbox, input_mapping={"b": "y", "a": "x"})
            if None in expected:
                # Rows of a chunk whose columns have other names are read in the first order.
                with pytest.raises(UsageError, match=r"row \d+"):
                    getattr(feed, method)(len(rows))
                return
            batch = getattr(feed, method)(len(rows))
        for number, (x, y) in enumerate(expected):
            for sent, column in ((x, batch["x"]), (y, batch["y"])):
                if method == "next_batch":
                    assert exactly(sent) == exactly(column[number])
                else:
                    assert_kept(sent, row_of(column, number))

    check()
