"""Feeding from DataFrames with Arrow: columns stay columns, and no row is pickled.

Spark passes a task its partition as Arrow record batches (`DataFrame.mapInArrow`). Their buffers
are sent to the node unchanged. The user's function receives the same Rows or arrays as from
``df.rdd``. The node does not need Arrow.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import fractions
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.errors import UsageError
from tfd_notebook.spark.feed import encode
from tfd_notebook.spark.feed.chunks import TARGET, Chunk, Packed, by_name, packed_columns, size_of
from tfd_notebook.spark.feed.sender import FeedResult, InboxAddresses, feed_chunks, infer_chunks

#: Spark's setting for the number of rows per record batch. A batch is about four chunks.
_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BATCH_BYTES = 4 * TARGET
_BYTES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
#: Errors of Arrow, and of rows with another structure.
_MISFITS = (
    AttributeError,
    KeyError,
    NotImplementedError,
    OverflowError,
    TypeError,
    ValueError,
)
#: Types of values, by the Arrow type. Arrow takes other values as raw numbers, or takes them apart.
_TYPES: tuple[tuple[Callable[[pa.DataType], bool], Any], ...] = (
    (pa.types.is_timestamp, (datetime.datetime, np.datetime64)),
    (pa.types.is_date, datetime.date),
    (pa.types.is_time, datetime.time),
    (pa.types.is_duration, (datetime.timedelta, np.timedelta64)),
    (pa.types.is_list, (list, tuple, np.ndarray)),
    (pa.types.is_map, dict),
)
#: Types of values that Arrow converts, or refuses, as it must: for integers, and for others.
_INTEGERS = {int, type(None)}
_PLAIN = {*_INTEGERS, float, str, bytes, bool, decimal.Decimal, np.float64}
_MAX_FLOAT = float(np.finfo(np.float32).max)
#: Previous setting of each session that feeds, and the values that its feeds request.
_limited: dict[Any, tuple[str, list[int]]] = {}
_lock = threading.Lock()


def feed_batches(
    batches: Iterable[pa.RecordBatch],
    inboxes: InboxAddresses,
    qname: str = "input",
    feed_timeout: float = 600.0,
) -> FeedResult:
    """Feed record batches to the node of this executor; see `feed_partition` for rows.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
    inboxes, qname, feed_timeout
        As for `feed_partition`.
    """
    return feed_chunks(_chunks(batches), inboxes, qname, feed_timeout)


def infer_batches(
    batches: Iterable[pa.RecordBatch],
    inboxes: InboxAddresses,
    schema: pa.Schema,
    qname: str = "input",
    feed_timeout: float = 600.0,
) -> Iterator[pa.RecordBatch]:
    """Feed record batches, and yield the results as record batches; see `infer_partition`.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
    inboxes, qname, feed_timeout
        As for `feed_partition`.
    schema : pyarrow.Schema
        Schema of the results. For one field a result is its value. For several it is a tuple or
        list in their order. A dict, Row or named tuple has the names of the fields.

    Raises
    ------
    UsageError
        A type cannot hold a value, or a row has other columns. The error names the row by its
        number in the partition, from 0.
    """
    first = 0
    for chunk in infer_chunks(_chunks(batches), inboxes, qname, feed_timeout):
        yield record_batch(chunk, schema, first)
        first += chunk.count


def schemas(schema: Any) -> tuple[Any, pa.Schema]:
    """Return the schema of results for Spark and for Arrow.

    Parameters
    ----------
    schema : pyspark.sql.types.StructType or str

    Raises
    ------
    UsageError
        The schema is invalid, or has a type that Arrow does not support.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    try:
        spark_schema = StructType.fromDDL(schema) if isinstance(schema, str) else schema
        if not isinstance(spark_schema, StructType):
            raise TypeError("expected a string or a StructType")
        return spark_schema, compat_pyspark.arrow_schema(spark_schema)
    except (PySparkException, TypeError) as error:
        raise UsageError(
            f"invalid schema {schema!r}: {str(error).strip().partition(chr(10))[0]}",
            fix='pass columns and their types, such as "guess long, scores array<float>"',
        ) from error


def one_value(name: str, value: Any) -> pa.RecordBatch:
    """Return a record batch of one row and one column."""
    return pa.RecordBatch.from_pydict({name: [value]})


def unsupported_columns(frame: Any) -> list[str]:
    """Return the names of a DataFrame's columns that cannot be fed with Arrow.

    These are columns of a type that Arrow does not support, and columns with the same name.
    """
    from pyspark.sql import types

    plain = (
        types.NumericType,
        types.BooleanType,
        types.StringType,
        types.BinaryType,
        types.DateType,
        types.TimestampType,
        types.TimestampNTZType,
    )

    def has(kind: Any) -> bool:
        if isinstance(kind, types.ArrayType):
            return has(kind.elementType)
        if isinstance(kind, types.MapType):
            return has(kind.keyType) and has(kind.valueType)
        if isinstance(kind, types.StructType):
            return all(has(field.dataType) for field in kind.fields)
        return isinstance(kind, plain)

    names = frame.schema.names
    return [
        field.name
        for field in frame.schema.fields
        if not has(field.dataType) or names.count(field.name) > 1
    ]


@contextlib.contextmanager
def small_batches(frame: Any) -> Iterator[None]:
    """Limit Spark's record batches of this DataFrame to a few MiB within the block.

    The setting belongs to the session. Concurrent feeds use their smallest value, and the last one
    restores the previous value.
    """
    session, rows = frame.sparkSession, records_per_batch(frame)
    key = compat_pyspark.session_key(session)

    def set_minimum() -> None:
        # Spark interprets values of zero and less as no limit.
        session.conf.set(_RECORDS, str(min(n for n in (int(previous), *requested) if n > 0)))

    with _lock:
        previous, requested = _limited.setdefault(key, (session.conf.get(_RECORDS), []))
        requested.append(rows)
        set_minimum()
    try:
        yield
    finally:
        with _lock:
            requested.remove(rows)
            if requested:
                set_minimum()
            else:
                del _limited[key]
                session.conf.set(_RECORDS, previous)


def records_per_batch(frame: Any) -> int:
    """Return the number of rows of a DataFrame per record batch.

    If the columns have no fixed size, a small job inspects a few rows.
    """
    from pyspark.sql import types

    sizes = [
        8
        if isinstance(field.dataType, (types.NumericType, types.BooleanType, types.DateType))
        else 0
        for field in frame.schema.fields
    ]
    size: float = sum(sizes)
    if not all(sizes):
        rows = frame.limit(8).collect()
        size = max(map(size_of, rows), default=64)
    return max(1, min(1 << 16, int(_BATCH_BYTES // max(1, size))))


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[Packed]:
    for batch in batches:
        if not batch.num_rows:
            continue
        rows = max(1, int(batch.num_rows * TARGET // max(1, batch.nbytes)))
        for at in range(0, batch.num_rows, rows):
            part = batch.slice(at, rows)
            out: list[encode.Fragments] = []
            parts = [_column(column, out) for column in part.columns]
            layout: encode.Layout = ["row", part.schema.names, parts]
            yield packed_columns(part.num_rows, layout, out)


def _column(values: pa.Array, out: list[encode.Fragments]) -> encode.Layout:
    """Append the buffers of a column, and return its layout; see `encode.encode`."""
    kind = values.type
    if values.null_count == 0 and len(values):
        if pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind):
            numbers = values.to_numpy()
            out.append([numbers])
            return ["number", numbers.dtype.str]
        if pa.types.is_boolean(kind):
            out.append([values.to_numpy(zero_copy_only=False)])
            return ["python", "|b1"]
        if kind in _BYTES:
            ends, data = _spans(values)
            out += [[ends], [data]]
            return ["str" if "string" in str(kind) else "bytes"]
        if pa.types.is_list(kind):
            lengths = values.value_lengths().to_numpy()
            if (lengths == lengths[0]).all() and lengths[0]:
                return ["fix", "list", int(lengths[0]), _column(values.flatten(), out)]
        if pa.types.is_struct(kind):
            fields = [kind.field(at).name for at in range(kind.num_fields)]
            return ["row", fields, [_column(part, out) for part in values.flatten()]]
    return encode.encode([_plain(value, kind) for value in values.to_pylist()], out)


def _spans(values: pa.Array) -> tuple[np.ndarray[Any, Any], memoryview]:
    """Return the end of each value, and the bytes of all values, without a copy."""
    _, offsets, data = values.buffers()
    kind = np.int64 if "large" in str(values.type) else np.int32
    edges = np.frombuffer(offsets, kind)[values.offset : values.offset + len(values) + 1]
    first, last = int(edges[0]), int(edges[-1])
    whole = memoryview(data) if data is not None else memoryview(b"")
    return edges[1:].astype(np.int64) - first, whole[first:last]


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Return an Arrow value as ``df.rdd`` has it."""
    if value is None:
        return None
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return value.astimezone().replace(tzinfo=None)
    if pa.types.is_list(kind):
        return [_plain(part, kind.value_type) for part in value]
    if pa.types.is_map(kind):
        return {_plain(k, kind.key_type): _plain(v, kind.item_type) for k, v in value}
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        return compat_pyspark.named_row(
            [_plain(value[field.name], field.type) for field in fields],
            [field.name for field in fields],
        )
    return value


def _storable(value: Any, field: pa.Field) -> Any:
    """Return a value in the form that Arrow accepts: the inverse of `_plain`.

    Raises
    ------
    ValueError
        The type cannot hold the value. Arrow would change it without an error.
    """
    kind = field.type
    if value is None and field.nullable:
        return None
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        is_time = value.dtype.kind in "mM"  # a time is also an integer
        if is_time and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise ValueError(f"{_text(value)} does not fit {kind}")
        value = value if is_time else value.item()
        if isinstance(value, np.longdouble):
            value = float(value)
    if value is None or _is_lost(value, kind):
        raise ValueError(f"{_text(value)} does not fit {kind}")
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return value.astimezone(datetime.timezone.utc)
    if pa.types.is_list(kind):
        return [_storable(part, kind.value_field) for part in value]
    if pa.types.is_map(kind):
        return [
            (_storable(k, kind.key_field), _storable(v, kind.item_field)) for k, v in value.items()
        ]
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        parts = _in_order(value, [part.name for part in fields])
        return {f.name: _storable(part, f) for f, part in zip(fields, parts, strict=True)}
    return value


def _text(value: Any) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


def _in_order(value: Any, names: list[str]) -> Any:
    """Return the values of a row or struct in the order of the names of its columns."""
    columns = by_name(value)
    if columns is not None and tuple(columns) != tuple(names):
        if set(columns) != set(names):
            has = ", ".join(map(str, columns))
            raise ValueError(f"{_text(value)} has the names {has} instead of {', '.join(names)}")
        return [columns[name] for name in names]
    if columns is not None:
        return list(columns.values())
    if not isinstance(value, (list, tuple)) and not (isinstance(value, np.ndarray) and value.ndim):
        raise ValueError(f"{_text(value)} is not a row of {len(names)} values ({', '.join(names)})")
    if len(value) != len(names):
        raise ValueError(
            f"{_text(value)} has {len(value)} values instead of {len(names)} ({', '.join(names)})"
        )
    return value


def _is_lost(value: Any, kind: pa.DataType) -> bool:
    """Return True if Arrow would change the value without an error."""
    if pa.types.is_integer(kind):
        if isinstance(value, float):
            return not value.is_integer()
        return isinstance(value, (decimal.Decimal, fractions.Fraction)) and value != int(value)
    if pa.types.is_float32(kind):
        return isinstance(value, float) and _MAX_FLOAT < abs(value) < math.inf
    for is_kind, types in _TYPES:
        if is_kind(kind) and not isinstance(value, types):
            return True
    if pa.types.is_date(kind) and isinstance(value, datetime.datetime):
        return value.time() != datetime.time() or value.tzinfo is not None
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):  # of pandas
        return True
    if not pa.types.is_timestamp(kind):
        return False
    has_zone = isinstance(value, datetime.datetime) and value.tzinfo is not None
    return has_zone if kind.tz is None else isinstance(value, np.datetime64)


def _array(values: list[Any], field: pa.Field, first: int) -> pa.Array:
    """Return the values of a column. `first` is the number of the first row."""
    kind = field.type
    # Arrow refuses all other values of these types.
    is_plain = (
        field.nullable
        and not (
            pa.types.is_nested(kind) or pa.types.is_temporal(kind) or pa.types.is_float32(kind)
        )
        and set(map(type, values)) <= (_INTEGERS if pa.types.is_integer(kind) else _PLAIN)
    )
    try:
        return pa.array(values if is_plain else [_storable(v, field) for v in values], kind)
    except _MISFITS:
        for row, value in enumerate(values, first):
            try:
                pa.array([_storable(value, field)], kind)
            except _MISFITS as error:
                text = str(error)
                if "does not fit" not in text:
                    text = f"{_text(value)} does not fit {kind}: {text}"
                raise ValueError(f"row {row}, column {field.name}: {text}") from None
        raise


def _columns(chunk: Chunk, names: list[str], first: int) -> list[list[Any]]:
    """Return the values of results by column. `first` is the number of the first row."""
    by_column = chunk.column.by_name(0, chunk.count)
    if by_column is not None and sorted(by_column) == sorted(names):
        return [by_column[name] for name in names]
    rows = chunk.rows(0, chunk.count)
    kinds = set(map(type, rows))
    if len(names) == 1 and not any(issubclass(kind, (dict, tuple)) for kind in kinds):
        return [rows]
    sequences = {tuple} if len(names) == 1 else {list, tuple}
    if not kinds <= sequences or set(map(len, rows)) != {len(names)}:
        rows = [_row(row, names, number) for number, row in enumerate(rows, first)]
    return list(map(list, zip(*rows, strict=True)))


def _row(row: Any, names: list[str], number: int) -> Any:
    if len(names) == 1 and not isinstance(row, (dict, tuple)):
        return (row,)
    try:
        return _in_order(row, names)
    except ValueError as error:
        raise ValueError(f"row {number}: {error}") from None


def record_batch(chunk: Chunk, schema: pa.Schema, first: int = 0) -> pa.RecordBatch:
    """Return results as columns with the types of a schema.

    Parameters
    ----------
    chunk : Chunk
    schema : pyarrow.Schema
    first : int
        Number of the first row in its partition. Default 0.

    Raises
    ------
    UsageError
        A type cannot hold a value, or a row has other columns than the schema.
    """
    try:
        columns = _columns(chunk, schema.names, first)
        arrays = [_array(part, field, first) for part, field in zip(columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    except _MISFITS as error:
        raise UsageError(
            f"the results do not fit the schema ({', '.join(map(str, schema))}): {error}",
            fix="pass batch_results() values of the schema's types, in its order or by its names",
        ) from error
