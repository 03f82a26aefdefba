"""DataFrames as TFRecord files and back, written and read by TensorFlow on the executors.

The counterpart is ``tensorflowonspark.dfutil``; no jar is needed.
"""

from __future__ import annotations

import functools
import json
import posixpath
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from tfd_notebook._compat import pyspark as private
from tfd_notebook.errors import DataError, UsageError
from tfd_notebook.spark import tfrecords
from tfd_notebook.spark.driver import application, jobs
from tfd_notebook.spark.publishing import published
from tfd_notebook.spark.tfrecords import located, translate_filesystem_errors

__all__ = [
    "fromTFExample",
    "infer_schema",
    "isLoadedDF",
    "loadTFRecords",
    "loadedDF",
    "saveAsTFRecords",
    "toTFExample",
]

#: The types of the columns, beside the files.
_SCHEMA = "_tfd_schema.json"
#: Rows that are one batch on their way to Spark.
_BATCH_ROWS = 1024

#: Where the DataFrames came from that `loadTFRecords` returned and somebody still holds.
loadedDF: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def isLoadedDF(df: Any) -> bool:
    """Return whether `loadTFRecords` made this DataFrame, and nothing was changed in it since.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    """
    return df in loadedDF


def saveAsTFRecords(
    df: Any, output_dir: str, overwrite: bool = False, *, wait: bool = True
) -> Future[None] | None:
    """Write a DataFrame as TFRecord files of ``tf.train.Example``, one for each partition.

    Whole numbers and booleans are kept as int64, floating-point numbers as float32, strings as
    UTF-8; a null is a feature that is left out. The directory appears when all of it is written,
    with the column types in a file beside the records.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Its columns are numbers, booleans, strings, binary, or arrays of these.
    output_dir : str
        A directory that all executors reach; a relative one counts from the directory of this
        process. Files are called ``part-r-00000`` and so on.
    overwrite : bool
        Whether an existing directory is replaced. Default false. The old one is removed when the
        new one has its name; if that fails, both are kept.
    wait : bool
        Whether to wait (default), or return the future of it.

    Raises
    ------
    UsageError
        A column cannot be kept, with its name; or the directory exists.
    DataError
        Executors wrote where this process sees nothing: the directory is not shared. Or the
        directory could not be renamed: the error names the hidden directory that holds the data.

    Warns
    -----
    RuntimeWarning
        The replaced directory could not be removed; the warning names it.

    Notes
    -----
    The counterpart is ``tensorflowonspark.dfutil.saveAsTFRecords``.
    """
    if not wait:
        return jobs.in_background(lambda: _save(df, output_dir, overwrite), "save")
    _save(df, output_dir, overwrite)
    return None


def _save(df: Any, output_dir: str, overwrite: bool) -> None:
    import tensorflow as tf

    columns = tfrecords.columns_of(df.dtypes)
    place = located(application.context_of(df.sparkSession, "saveAsTFRecords"), output_dir)
    with published(place, overwrite) as hidden:
        written = jobs.collect(df.rdd, functools.partial(_write, hidden, columns))
        missing = [part for part in written if not tf.io.gfile.exists(posixpath.join(hidden, part))]
        if missing:
            raise DataError(
                f"{len(missing)} of {len(written)} files that executors wrote are not to be seen "
                f"here, such as {missing[0]}",
                fix="an output_dir that all hosts share",
            )
        with tf.io.gfile.GFile(posixpath.join(hidden, _SCHEMA), "w") as file:
            file.write(df.schema.json())


def loadTFRecords(
    sc: Any,
    input_dir: str,
    binary_features: Sequence[str] = (),
    schema: Any = None,
    *,
    wait: bool = True,
) -> Any:
    """Return TFRecord files of ``tf.train.Example`` as a DataFrame, one partition for each file.

    Parameters
    ----------
    sc : pyspark.SparkContext or pyspark.sql.SparkSession
    input_dir : str
        A directory that all executors reach, one file, or a pattern with ``*``. Names that begin
        with ``_`` or ``.`` are left out; those that end in ``.gz`` are decompressed.
    binary_features : sequence of str
        Columns of bytes that shall be binary, and not strings.
    schema : pyspark.sql.types.StructType, optional
        The types. Default: those that `saveAsTFRecords` wrote down; in files of others what all
        their records tell, columns by name: int64 as ``bigint``, float as ``double``, bytes as
        ``string`` where all of it is UTF-8 and else ``binary``, and an array where a record has
        more than one value.
    wait : bool
        Whether to wait (default) until the files are listed, and looked at where no schema is
        known, or return the future of it.

    Returns
    -------
    pyspark.sql.DataFrame or concurrent.futures.Future of it
        Lazy as any other. A record that does not fit is an error with file, number and column.

    Raises
    ------
    UsageError
        No file is there, or `binary_features` names what is no column of bytes.
    DataError
        The records do not agree with each other, or a file is damaged.

    Notes
    -----
    The counterpart is ``tensorflowonspark.dfutil.loadTFRecords``, which looks at the first record
    only.
    """
    if not wait:
        return jobs.in_background(
            lambda: loadTFRecords(sc, input_dir, binary_features, schema), "load"
        )
    sc = application.context_of(sc, "loadTFRecords")
    place = located(sc, input_dir)
    files = _files(place)
    spread = sc.parallelize(files, len(files))
    if schema is None:
        schema = _written_schema(place)
    if schema is not None:
        columns = tfrecords.columns_of((f.name, f.dataType.simpleString()) for f in schema.fields)
    else:
        seen = jobs.collect(spread, _look)
        columns = tfrecords.columns_seen(
            functools.reduce(tfrecords.merge, seen, {}), binary_features
        )
        if not columns:
            raise UsageError(f"{place} has no record, or none with a feature", fix="pass schema=")
    columns = tfrecords.with_binary(columns, binary_features)
    made = _struct(columns)
    named = _session(sc).createDataFrame(spread.map(_alone), "file string")
    df = named.mapInArrow(functools.partial(_read, columns, made.jsonValue()), made)
    loadedDF[df] = place
    return df


def toTFExample(
    dtypes: Iterable[tuple[str, str]],
) -> Callable[[Iterable[Any]], Iterator[tuple[bytearray, None]]]:
    """Return what makes serialised ``tf.train.Example`` of rows, for ``rdd.mapPartitions``.

    Parameters
    ----------
    dtypes : iterable of (str, str)
        ``df.dtypes`` of the DataFrame.

    Returns
    -------
    callable
        Takes the rows of a partition and yields pairs of bytes and None.

    Raises
    ------
    UsageError
        A column cannot be kept, with its name.
    """
    columns = tfrecords.columns_of(dtypes)

    def convert(rows: Iterable[Any]) -> Iterator[tuple[bytearray, None]]:
        encode = tfrecords.encoder(columns)
        for row in rows:
            yield bytearray(encode(row)), None

    return convert


def fromTFExample(iter: Iterable[Any], binary_features: Sequence[str] = ()) -> Iterator[Any]:
    """Yield a ``pyspark.sql.Row`` for each serialised ``tf.train.Example``, columns by name.

    Parameters
    ----------
    iter : iterable
        Bytes, or pairs that begin with them, as in a partition of ``newAPIHadoopFile``.
    binary_features : sequence of str
        Columns of bytes that shall be ``bytes``, and not ``str``.
    """
    import tensorflow as tf
    from pyspark.sql import Row

    for number, one in enumerate(iter):
        serialised = bytes(one[0] if isinstance(one, (tuple, list)) else one)
        seen = tfrecords.seen_in(tf.train.Example.FromString(serialised))
        columns = tfrecords.columns_seen(seen, binary_features)
        values = tfrecords.decoder(columns)(serialised, f"record {number}")
        yield Row(**dict(zip((column.name for column in columns), values, strict=True)))


def infer_schema(example: Any, binary_features: Sequence[str] = ()) -> Any:
    """Return the schema that one record tells, columns by name.

    Parameters
    ----------
    example : tf.train.Example or bytes
    binary_features : sequence of str
        Columns of bytes that shall be binary, and not strings.

    Returns
    -------
    pyspark.sql.types.StructType
        A feature with one value is a column of that type, one with more an array; one without a
        value is a string.
    """
    import tensorflow as tf

    if isinstance(example, (bytes, bytearray)):
        example = tf.train.Example.FromString(bytes(example))
    if not hasattr(example, "features"):
        raise UsageError(f"{type(example).__name__} is no tf.train.Example")
    return _struct(tfrecords.columns_seen(tfrecords.seen_in(example), binary_features))


# On the executors


def _write(
    directory: str, columns: Sequence[tfrecords.Column], index: int, rows: Iterator[Any]
) -> Iterator[str]:
    import tensorflow as tf

    encode = tfrecords.encoder(columns)
    name = f"part-r-{index:05d}"
    # A task may run twice: each attempt writes its own file, and a whole one gets the name.
    attempt = posixpath.join(directory, f".{name}.{uuid.uuid4().hex[:8]}")
    tf.io.gfile.makedirs(directory)
    with tf.io.TFRecordWriter(attempt) as writer:
        for row in rows:
            writer.write(encode(row))
    tf.io.gfile.rename(attempt, posixpath.join(directory, name), overwrite=True)
    yield name


def _look(index: int, files: Iterator[str]) -> Iterator[dict[str, tfrecords.Seen]]:
    import tensorflow as tf

    seen: dict[str, tfrecords.Seen] = {}
    for file in files:
        for number, serialised in _records(file):
            try:
                example = tf.train.Example.FromString(serialised)
            except Exception as error:  # as in `records`
                raise DataError(
                    f"record {number} of {file} holds no tf.train.Example: {error}"
                ) from None
            seen = tfrecords.merge(seen, tfrecords.seen_in(example))
    yield seen


def _read(
    columns: Sequence[tfrecords.Column], schema: Any, batches: Iterable[Any]
) -> Iterator[Any]:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    shape = private.arrow_schema(StructType.fromJson(schema))
    decode = tfrecords.decoder(columns)

    def batch(rows: list[list[Any]]) -> Any:
        arrays = [
            pa.array(values, field.type)
            for values, field in zip(zip(*rows, strict=True), shape, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=shape)

    rows: list[list[Any]] = []
    for files in batches:
        for file in files.column(0).to_pylist():
            for number, serialised in _records(file):
                rows.append(decode(serialised, f"record {number} of {file}"))
                if len(rows) == _BATCH_ROWS:
                    yield batch(rows)
                    rows = []
    if rows:
        yield batch(rows)


def _records(file: str) -> Iterator[tuple[int, bytes]]:
    import tensorflow as tf

    kind = "GZIP" if file.endswith(".gz") else None
    number = 0
    try:
        for serialised in tf.data.TFRecordDataset(file, kind).as_numpy_iterator():
            yield number, serialised
            number += 1
    except tf.errors.DataLossError as error:
        raise DataError(
            f"{file} is damaged, or no TFRecord file, at record {number}: {error.message}"
        ) from None
    except tf.errors.NotFoundError:
        raise DataError(
            f"{file} is not there on the executor", fix="an input_dir that all hosts share"
        ) from None


# Here


def _alone(file: str) -> tuple[str]:
    return (file,)


def _session(sc: Any) -> Any:
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def _struct(columns: Iterable[tfrecords.Column]) -> Any:
    from pyspark.sql import types

    elements = {
        "boolean": types.BooleanType(),
        "tinyint": types.ByteType(),
        "smallint": types.ShortType(),
        "int": types.IntegerType(),
        "bigint": types.LongType(),
        "float": types.FloatType(),
        "double": types.DoubleType(),
        "string": types.StringType(),
        "binary": types.BinaryType(),
    }
    made = types.StructType()
    for column in columns:
        element = elements[column.element]
        made.add(column.name, types.ArrayType(element) if column.is_array else element)
    return made


def _files(place: str) -> list[str]:
    import tensorflow as tf

    with translate_filesystem_errors(place):
        if tf.io.gfile.isdir(place):
            found = [posixpath.join(place, name) for name in tf.io.gfile.listdir(place)]
        else:
            found = tf.io.gfile.glob(place)
        kept = sorted(
            file
            for file in found
            if posixpath.basename(file)[:1] not in ("_", ".", "") and not tf.io.gfile.isdir(file)
        )
    if not kept:
        raise UsageError(
            f"there is no TFRecord file at {place}",
            fix="a directory, file or pattern that this process can see",
        )
    return kept


def _written_schema(place: str) -> Any:
    import tensorflow as tf
    from pyspark.sql.types import StructType

    beside = place if tf.io.gfile.isdir(place) else posixpath.dirname(place)
    file = posixpath.join(beside, _SCHEMA)
    if not tf.io.gfile.exists(file):
        return None
    with tf.io.gfile.GFile(file) as opened:
        text = opened.read()
    try:
        return StructType.fromJson(json.loads(text))
    except (ValueError, KeyError) as error:
        raise DataError(
            f"{file} does not tell the types: {error}", fix="remove it, or pass schema="
        ) from None
