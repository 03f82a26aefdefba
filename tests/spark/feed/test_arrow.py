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

import numpy as np
import pyarrow as pa
import pytest

from tests.spark._feeding import SECRET
from tfd_notebook.errors import UsageError
from tfd_notebook.spark.feed.arrow import infer_batches, record_batch
from tfd_notebook.spark.feed.chunks import Chunk, pack
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
