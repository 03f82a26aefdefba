"""Results of inference as Arrow columns: each value is kept, or an error names its place."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from tests.spark._feeding import SECRET
from tfd_notebook.errors import UsageError
from tfd_notebook.spark.feed.arrow import infer_batches, record_batch
from tfd_notebook.spark.feed.chunks import Chunk, by_name, pack
from tfd_notebook.spark.feed.datafeed import DataFeed
from tfd_notebook.spark.feed.inbox import Inbox
from tfd_notebook.spark.feed.sender import InboxAddress

Row = pytest.importorskip("pyspark.sql.types").Row
Point = collections.namedtuple("Point", "b a")

NOON = datetime.datetime(2020, 1, 2, 12, 30)
DAY = NOON.date()
HERE = NOON.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=5)))


class Nanoseconds(datetime.datetime):
    """A datetime with a part that microseconds cannot hold, as of pandas."""

    nanosecond = 1


def received(rows: list[Any]) -> Chunk:
    packed = pack(rows)
    body = memoryview(bytearray(b"".join(packed.body)))
    return Chunk(json.loads(json.dumps(packed.header)), body)


def columns(rows: list[Any], **kinds: Any) -> dict[str, list[Any]]:
    schema = pa.schema(list(kinds.items()))
    result: dict[str, list[Any]] = record_batch(received(rows), schema).to_pydict()
    return result


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (decimal.Decimal("2.5"), pa.int64()),
        (fractions.Fraction(1, 2), pa.int32()),
        (2.5, pa.int64()),
        (np.float32(2.5), pa.int8()),
        (float("nan"), pa.int64()),
        (1e300, pa.float32()),
        (NOON, pa.date32()),
        (HERE, pa.timestamp("us")),
        (HERE.replace(hour=0, minute=0), pa.date32()),
        (1.5, pa.timestamp("us")),
        (5, pa.timestamp("us", "UTC")),
        (DAY, pa.timestamp("us", "UTC")),
        (np.datetime64(NOON), pa.timestamp("us", "UTC")),
        (5, pa.date32()),
        (True, pa.date32()),
        (1.5, pa.duration("us")),
        (5, pa.time64("us")),
        (Nanoseconds(2020, 1, 2), pa.timestamp("us")),
        ("ab", pa.list_(pa.string())),
        (b"ab", pa.list_(pa.int64())),
        ({"a": 1}, pa.list_(pa.string())),
        ({1, 2}, pa.list_(pa.int64())),
        ([("a", 1)], pa.map_(pa.string(), pa.int64())),
        (5, pa.struct({"a": pa.int64()})),
        ("1", pa.int64()),
        (2**63, pa.int64()),
        ("1", pa.float64()),
        (2**53 + 1, pa.float64()),
        (np.uint64(2**64 - 1), pa.float64()),
        (np.array(2**64 - 1, np.uint64), pa.float64()),
        (np.datetime64(5, "ns"), pa.int32()),
        (np.timedelta64(5, "ns"), pa.int64()),
        (np.timedelta64(5, "ns"), pa.float64()),
        (decimal.Decimal("1.234"), pa.decimal128(10, 2)),
        (2.5, pa.decimal128(10, 2)),
        (5, pa.string()),
        (b"\xff", pa.string()),
        (5, pa.binary()),
        (2, pa.bool_()),
        (1, pa.null()),
    ],
)
def test_a_value_that_the_type_cannot_hold_is_named(value: Any, kind: pa.DataType) -> None:
    for rows, schema in (
        ([(1, None), (2, value)], kind),
        ([(1, [None]), (2, [value])], pa.list_(kind)),
    ):
        with pytest.raises(UsageError, match=r"row 1, column y: .* does not fit"):
            columns(rows, x=pa.int64(), y=schema)


PAIR = pa.struct({"a": pa.int64(), "b": pa.int64()})
PAIR_WITHOUT_NULLS = pa.struct([pa.field(name, pa.int64(), nullable=False) for name in "ab"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 1, "b": 2, "c": 3}, "has the names a, b, c instead of a, b"),
        ({"a": 1}, "has the names a instead of a, b"),
        (Row(a=1, c=2), "has the names a, c instead of a, b"),
        ((1, 2, 3), "has 3 values instead of 2 (a, b)"),
        ([1], "has 1 values instead of 2 (a, b)"),
    ],
)
def test_no_part_of_a_struct_or_row_is_dropped(value: Any, message: str) -> None:
    kind = type(value).__name__
    for rows, schema in (
        ([(1, (2, 3)), (1, value)], {"x": pa.int64(), "y": PAIR}),
        ([(1, [(2, 3)]), (1, [value])], {"x": pa.int64(), "y": pa.list_(PAIR)}),
    ):
        place = re.escape("row 1, column y: ")
        with pytest.raises(UsageError, match=f"{place}.*{re.escape(f'({kind}) {message}')}"):
            columns(rows, **schema)
    for rows in ([(2, 3), value], [value, (2, 3)]):
        place = re.escape(f"row {rows.index(value)}: ")
        with pytest.raises(UsageError, match=f"{place}.*{re.escape(f'({kind}) {message}')}"):
            columns(rows, a=pa.int64(), b=pa.int64())


@pytest.mark.parametrize("value", [{"b": 2, "a": 1}, Row(b=2, a=1), Point(2, 1)])
def test_parts_with_names_are_stored_by_name(value: Any) -> None:
    assert columns([(1, 2), value], a=pa.int64(), b=pa.int64()) == {"a": [1, 1], "b": [2, 2]}
    assert columns([value, value], a=pa.int64(), b=pa.int64()) == {"a": [1, 1], "b": [2, 2]}
    assert columns([(0, value)], x=pa.int64(), y=PAIR)["y"] == [{"a": 1, "b": 2}]


@pytest.mark.parametrize("value", ["ab", 5, None, {1, 2}])
def test_a_result_that_is_not_a_row_is_named(value: Any) -> None:
    with pytest.raises(UsageError, match=r"row 1: .* is not a row of 2 values \(a, b\)"):
        columns([("x", "y"), value], a=pa.string(), b=pa.string())


def test_a_result_of_one_column_is_its_value() -> None:
    assert columns([5, (6,), {"y": 7}], y=pa.int64()) == {"y": [5, 6, 7]}
    assert columns([[5], ([6],)], y=pa.list_(pa.int64())) == {"y": [[5], [6]]}
    with pytest.raises(UsageError, match=r"row 1: .* has the names z instead of y"):
        columns([5, {"z": 6}], y=pa.int64())


def test_a_column_without_nulls_gets_none() -> None:
    for kind, value in ((pa.int64(), None), (PAIR_WITHOUT_NULLS, (1, None))):
        schema = pa.schema([pa.field("x", pa.int64()), pa.field("y", kind, nullable=False)])
        with pytest.raises(UsageError, match=r"row 0, column y: None .* does not fit int64"):
            record_batch(received([(None, value)]), schema)


def test_rows_of_results_are_numbered_in_their_partition(tmp_path: Path) -> None:
    with Inbox(tmp_path, SECRET) as inbox:
        address = InboxAddress("c", "worker", 0, os.uname().nodename, "0", 0, inbox.address, SECRET)

        def work() -> None:
            feed = DataFeed(inbox, train_mode=False)
            while batch := feed.next_batch(4):
                feed.batch_results([row.x for row in batch])

        thread = threading.Thread(target=work)
        thread.start()
        rows = pa.RecordBatch.from_pydict({"x": [1.0] * 10 + [2.5, 1.0]})
        schema = pa.schema({"y": pa.int64()})
        with pytest.raises(UsageError, match=r"row 10, column y: 2.5 \(float\) does not fit int64"):
            list(infer_batches([rows], address, schema))
        inbox.end_of_feed()
        thread.join(60)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (decimal.Decimal("2.0"), pa.int64(), 2),
        (3.0, pa.int64(), 3),
        (np.int64(3), pa.int8(), 3),
        (float("inf"), pa.float32(), float("inf")),
        (NOON.replace(hour=0, minute=0), pa.date32(), datetime.date(2020, 1, 2)),
        (NOON, pa.timestamp("us"), NOON),
    ],
)
def test_a_value_that_the_type_holds_is_kept(value: Any, kind: pa.DataType, expected: Any) -> None:
    assert columns([value, value], y=kind) == {"y": [expected] * 2}


def test_a_value_that_arrow_does_not_convert_is_refused() -> None:
    with pytest.raises(UsageError, match="the results do not fit the schema"):
        columns([np.datetime64("2020-01-02T12:30", "ns")], y=pa.timestamp("us"))


KINDS = [
    *(pa.int8(), pa.int64(), pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.binary()),
    *(pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.duration("us")),
    *(pa.decimal128(10, 2), pa.null(), pa.list_(pa.int64()), pa.list_(pa.string()), PAIR),
    *(pa.map_(pa.string(), pa.float64()), pa.list_(PAIR)),
]
NUMBERS = st.integers(-3, 3) | st.sampled_from([300, 2**24 + 1, 2**53 + 1, 2**70])
PARTS = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.floats(),
    st.floats(width=32).map(np.float32),
    NUMBERS.filter(lambda number: number < 2**63).map(np.int64),
    st.sampled_from([2**53 + 1, 2**63, 2**64 - 1]).map(np.uint64),
    st.sampled_from([np.datetime64(5, "ns"), np.timedelta64(5, "ns")]),
    st.sampled_from(["", "a", "ü", b"a", b"\xff", bytearray(b"b")]),
    st.dates(),
    st.datetimes(datetime.datetime(1901, 1, 1), datetime.datetime(2100, 1, 1)),
    st.datetimes(timezones=st.just(datetime.timezone.utc)),
    st.timedeltas(datetime.timedelta(-9999), datetime.timedelta(9999)),
    st.decimals(-(10**9), 10**9, allow_nan=False, places=2),
    st.fractions(),
)
VALUES = st.one_of(
    PARTS,
    st.lists(PARTS, max_size=3),
    st.tuples(PARTS, PARTS),
    st.lists(st.floats(), max_size=2).map(np.array),
    st.dictionaries(st.sampled_from(["a", "b", "c"]), PARTS, max_size=3),
    st.tuples(PARTS, PARTS).map(lambda pair: Point(*pair)),
    st.tuples(PARTS, PARTS).map(lambda pair: Row(b=pair[0], a=pair[1])),
    st.lists(st.tuples(NUMBERS, NUMBERS), max_size=2),
    st.sets(st.integers(), max_size=2),
)


def is_kept(sent: Any, got: Any, kind: pa.DataType) -> bool:
    """Return True if a column of a type holds the value that was sent."""
    if sent is None or got is None:
        return sent is None and got is None
    if pa.types.is_struct(kind):
        names = by_name(sent) or dict(zip("ab", sent, strict=True))
        return set(names) == set(got) and all(is_kept(names[n], got[n], pa.int64()) for n in got)
    if pa.types.is_list(kind):
        assert not isinstance(sent, (str, bytes, bytearray, dict, set))
        pairs = zip(sent, got, strict=True)
        return all(is_kept(part, own, kind.value_type) for part, own in pairs)
    if pa.types.is_map(kind):
        return sent.keys() == dict(got).keys() and all(
            is_kept(sent[key], own, kind.item_type) for key, own in got
        )
    if isinstance(got, float):
        rounded = np.float32(sent) if pa.types.is_float32(kind) else sent
        return bool(rounded == got or (got != got and sent != sent))
    if isinstance(got, datetime.datetime):
        here = sent.astimezone() if got.tzinfo else sent
        return bool(here == got) and isinstance(sent, datetime.datetime)
    if isinstance(got, datetime.date):
        return bool(sent in (got, datetime.datetime(got.year, got.month, got.day)))
    texts = [part.encode() if isinstance(part, str) else part for part in (sent, got)]
    return bool(texts[0] == texts[1]) and (type(sent) is not bool or type(got) is bool)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(st.sampled_from(KINDS), st.lists(VALUES, min_size=1, max_size=3))
def test_random_results_are_kept_or_row_and_column_are_named(
    kind: pa.DataType, values: list[Any]
) -> None:
    try:
        (got, _) = columns([(value, 0) for value in values], y=kind, x=pa.int64()).values()
    except UsageError as error:
        assert re.search(r"row \d, column y: ", str(error))  # noqa: PT017
        return
    assert all(is_kept(*pair, kind) for pair in zip(values, got, strict=True))
