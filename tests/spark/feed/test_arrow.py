"""Results of inference as Arrow columns: each value is kept, or an error names its place."""

from __future__ import annotations

import datetime
import decimal
import fractions
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tfd_notebook.errors import UsageError
from tfd_notebook.spark.feed.arrow import record_batch
from tfd_notebook.spark.feed.chunks import Chunk, pack

NOON = datetime.datetime(2020, 1, 2, 12, 30)
HERE = NOON.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=5)))


def columns(rows: list[Any], **kinds: Any) -> dict[str, list[Any]]:
    packed = pack(rows)
    body = memoryview(bytearray(b"".join(packed.body)))
    chunk = Chunk(json.loads(json.dumps(packed.header)), body)
    result: dict[str, list[Any]] = record_batch(chunk, pa.schema(list(kinds.items()))).to_pydict()
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
    ],
)
def test_a_value_that_the_type_cannot_hold_is_named(value: Any, kind: pa.DataType) -> None:
    for rows, schema in (
        ([(1, None), (2, value)], kind),
        ([(1, [None]), (2, [value])], pa.list_(kind)),
    ):
        with pytest.raises(UsageError, match=r"row 1, column y: .* does not fit"):
            columns(rows, x=pa.int64(), y=schema)


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
