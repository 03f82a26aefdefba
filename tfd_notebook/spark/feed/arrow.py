"""Feeding from DataFrames by Arrow: columns stay columns, and no row is pickled on the way.

Spark gives a task its partition as Arrow's record batches (`DataFrame.mapInArrow`); their buffers
go to the node as they are. What the user's function gets are the Rows, or the arrays, that it would
get from ``df.rdd``. The node needs no Arrow.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tfd_notebook.errors import TfdError, UsageError
from tfd_notebook.spark.feed import columns
from tfd_notebook.spark.feed.chunks import Chunk, Packed, packed_columns
from tfd_notebook.spark.feed.packing import TARGET
from tfd_notebook.spark.feed.place import Place
from tfd_notebook.spark.feed.sending import Fed, feed_chunks, infer_chunks

#: What Spark is told how many rows go into one of its batches; four chunks' worth.
_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BATCH_BYTES = 4 * TARGET


def feed_batches(
    batches: Iterable[pa.RecordBatch],
    places: Place | Sequence[Place],
    qname: str = "input",
    feed_timeout: float = 600.0,
) -> Fed:
    """Feed record batches to the node of this executor; as `feed_partition` does with rows.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
    places, qname, feed_timeout
        As for `feed_partition`.
    """
    return feed_chunks(_chunks(batches), places, qname, feed_timeout)


def infer_batches(
    batches: Iterable[pa.RecordBatch],
    places: Place | Sequence[Place],
    schema: pa.Schema,
    qname: str = "input",
    feed_timeout: float = 600.0,
) -> Iterator[pa.RecordBatch]:
    """Feed record batches, and yield the results as record batches; as `infer_partition` does.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
    places, qname, feed_timeout
        As for `feed_partition`.
    schema : pyarrow.Schema
        Of the results. With one field a result is its value; with more it is a tuple or list in
        their order, a dict or a Row.
    """
    for chunk in infer_chunks(_chunks(batches), places, qname, feed_timeout):
        yield _record_batch(chunk, schema)


def training(
    frame: Any, epochs: int, places: Sequence[Place], feed_timeout: float, qname: str
) -> Callable[[], TfdError | None]:
    """Return the action that feeds a DataFrame; it returns the first error of a node.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
    epochs : int
    places, feed_timeout, qname
        As for `feed_partition`.
    """

    def feed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # The error is a result, so that Spark does not try again.
        try:
            feed_batches(batches, places, qname, feed_timeout)
        except TfdError as error:
            yield pa.RecordBatch.from_pydict({"error": [pickle.dumps(error)]})

    def work() -> TfdError | None:
        repeated = frame
        for _ in range(epochs - 1):
            repeated = repeated.unionAll(frame)
        session = frame.sparkSession
        before = session.conf.get(_RECORDS)
        session.conf.set(_RECORDS, str(min(int(before), records_per_batch(frame))))
        try:
            found = repeated.mapInArrow(feed, "error binary").collect()
        finally:
            session.conf.set(_RECORDS, before)
        # From tasks of one's own application, as everything that Spark collects.
        return pickle.loads(found[0].error) if found else None  # noqa: S301

    return work


def inference(
    frame: Any, schema: Any, places: Sequence[Place], feed_timeout: float, qname: str
) -> Any:
    """Return the DataFrame of the results for the rows of a DataFrame.

    It is computed when it is needed, in batches of as many rows as
    ``spark.sql.execution.arrow.maxRecordsPerBatch`` says then: `records_per_batch` tells how many
    are good.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
    schema : pyspark.sql.types.StructType or str
        Of the results.
    places, feed_timeout, qname
        As for `feed_partition`.
    """
    from pyspark.sql.types import StructType

    wanted = schema if isinstance(schema, StructType) else StructType.fromDDL(schema)
    arrow_schema = pa.schema(list(_arrow_type(wanted)))

    def infer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from infer_batches(batches, places, arrow_schema, qname, feed_timeout)

    return frame.mapInArrow(infer, wanted)


def fits(frame: Any) -> bool:
    """Whether a DataFrame can be fed by Arrow: whether Arrow has all of its types."""
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
    return len(set(names)) == len(names) and has(frame.schema)


def records_per_batch(frame: Any) -> int:
    """Return how many rows of a DataFrame Spark should put into a record batch.

    Looks at a few of its rows, which takes a small job where they are of no fixed size.
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
        from tfd_notebook.spark.feed.packing import size_of

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
            out: list[columns.Fragments] = []
            parts = [_column(column, out) for column in part.columns]
            layout: columns.Layout = ["row", part.schema.names, parts]
            yield packed_columns(part.num_rows, layout, out)


def _column(values: pa.Array, out: list[columns.Fragments]) -> columns.Layout:
    """Append the buffers of a column, and return its layout; see `columns`."""
    kind = values.type
    if values.null_count == 0 and len(values):
        if pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind):
            numbers = values.to_numpy()
            out.append([numbers])
            return ["number", numbers.dtype.str]
        if pa.types.is_boolean(kind):
            out.append([values.to_numpy(zero_copy_only=False)])
            return ["bool"]
        if _of_bytes(kind):
            ends, data = _spans(values)
            out.append([ends])
            out.append([data])
            return [
                "str" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else "bytes"
            ]
        if pa.types.is_list(kind):
            lengths = values.value_lengths().to_numpy()
            items = values.flatten()
            if (lengths == lengths[0]).all() and lengths[0]:
                return ["fix", "list", int(lengths[0]), _column(items, out)]
            out.append([lengths.astype(np.int64)])
            return ["var", "list", ["int"], _column(items, out)]
        if pa.types.is_struct(kind):
            fields = [kind.field(at).name for at in range(kind.num_fields)]
            return ["row", fields, [_column(part, out) for part in values.flatten()]]
    return columns.encode([_plain(value, kind) for value in values.to_pylist()], out)


def _of_bytes(kind: pa.DataType) -> bool:
    tests = (
        pa.types.is_string,
        pa.types.is_binary,
        pa.types.is_large_string,
        pa.types.is_large_binary,
    )
    return any(test(kind) for test in tests)


def _spans(values: pa.Array) -> tuple[np.ndarray[Any, Any], memoryview]:
    """Return where each value ends, and the bytes of all of them, without a copy."""
    large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    _, offsets, data = values.buffers()
    kind = np.int64 if large else np.int32
    edges = np.frombuffer(offsets, kind)[values.offset : values.offset + len(values) + 1]
    first, last = int(edges[0]), int(edges[-1])
    whole = memoryview(data) if data is not None else memoryview(b"")
    return edges[1:].astype(np.int64) - first, whole[first:last]


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Return a value of Arrow's as ``df.rdd`` has it."""
    if value is None:
        return None
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return value.astimezone().replace(tzinfo=None)
    if pa.types.is_list(kind):
        return [_plain(part, kind.value_type) for part in value]
    if pa.types.is_map(kind):
        return {_plain(k, kind.key_type): _plain(v, kind.item_type) for k, v in value}
    if pa.types.is_struct(kind):
        from pyspark.sql import Row

        fields = [kind.field(at) for at in range(kind.num_fields)]
        made = Row(*(_plain(value[field.name], field.type) for field in fields))
        made.__fields__ = [field.name for field in fields]
        return made
    return value


def _arrow_type(kind: Any) -> pa.DataType:
    """Return the type that Arrow has for one of Spark's."""
    from pyspark.sql import types

    simple = {
        types.BooleanType: pa.bool_(),
        types.ByteType: pa.int8(),
        types.ShortType: pa.int16(),
        types.IntegerType: pa.int32(),
        types.LongType: pa.int64(),
        types.FloatType: pa.float32(),
        types.DoubleType: pa.float64(),
        types.StringType: pa.string(),
        types.BinaryType: pa.binary(),
        types.DateType: pa.date32(),
        types.TimestampType: pa.timestamp("us", "UTC"),
        types.TimestampNTZType: pa.timestamp("us"),
    }
    if type(kind) in simple:
        return simple[type(kind)]
    if isinstance(kind, types.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, types.ArrayType):
        return pa.list_(_arrow_type(kind.elementType))
    if isinstance(kind, types.MapType):
        return pa.map_(_arrow_type(kind.keyType), _arrow_type(kind.valueType))
    if isinstance(kind, types.StructType):
        return pa.struct([pa.field(f.name, _arrow_type(f.dataType)) for f in kind.fields])
    raise UsageError(f"results of the type {kind.simpleString()} cannot go by Arrow")


def _storable(value: Any, kind: pa.DataType) -> Any:
    """Return a value as Arrow takes it: the inverse of `_plain`."""
    if value is None:
        return None
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return value.astimezone(datetime.timezone.utc)
    if pa.types.is_list(kind):
        return [_storable(part, kind.value_type) for part in value]
    if pa.types.is_map(kind):
        return [
            (_storable(k, kind.key_type), _storable(v, kind.item_type)) for k, v in value.items()
        ]
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        parts = [value[f.name] for f in fields] if isinstance(value, dict) else value
        return {f.name: _storable(part, f.type) for f, part in zip(fields, parts, strict=True)}
    return value


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_nested(kind) or pa.types.is_timestamp(kind):
        values = [_storable(value, kind) for value in values]
    return pa.array(values, kind)


def _record_batch(chunk: Chunk, schema: pa.Schema) -> pa.RecordBatch:
    rows = chunk.rows(0, chunk.count)
    try:
        if len(schema) == 1 and not isinstance(rows[0], (dict, tuple)):
            return pa.RecordBatch.from_arrays([_array(rows, schema.field(0).type)], schema=schema)
        if isinstance(rows[0], dict):
            parts = [[row[name] for row in rows] for name in schema.names]
        else:
            parts = list(map(list, zip(*rows, strict=True)))
        arrays = [_array(part, f.type) for part, f in zip(parts, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"the results do not fit the schema ({', '.join(map(str, schema))}): {error}",
            fix="give batch_results() values of the schema's types, in its order",
        ) from error
