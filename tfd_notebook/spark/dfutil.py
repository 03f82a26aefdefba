"""Save DataFrames as TFRecord files and load them, with TensorFlow on the executors.

The counterpart is ``tensorflowonspark.dfutil``; no jar is needed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import posixpath
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.errors import DataError, UsageError
from tfd_notebook.spark import tfrecords
from tfd_notebook.spark.driver import application, jobs
from tfd_notebook.spark.tfrecords import absolute_path, translate_filesystem_errors

__all__ = [
    "fromTFExample",
    "infer_schema",
    "isLoadedDF",
    "loadTFRecords",
    "loadedDF",
    "saveAsTFRecords",
    "toTFExample",
]

#: File with the types of the columns, in the directory of the records.
_SCHEMA = "_tfd_schema.json"
#: A file that is written last: the directory that holds it is complete.
_SUCCESS = "_SUCCESS"
#: Spark's names of types in JSON, where they differ from ``simpleString``.
_TYPE_NAMES = {"tinyint": "byte", "smallint": "short", "int": "integer", "bigint": "long"}
#: Number of rows per Arrow batch that is sent to Spark.
_BATCH_ROWS = 1024

#: Source paths of the DataFrames that `loadTFRecords` returned.
loadedDF: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def isLoadedDF(df: Any) -> bool:
    """Return True if `loadTFRecords` returned this DataFrame object.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    """
    return df in loadedDF


def saveAsTFRecords(
    df: Any, output_dir: str, overwrite: bool = False, *, wait: bool = True
) -> Future[None] | None:
    """Write a DataFrame as TFRecord files of ``tf.train.Example``, one file per partition.

    Whole numbers and booleans are stored as int64, floating-point numbers as float32, strings as
    UTF-8. A null is a missing feature. The directory appears when it is complete. It also holds a
    file with the column types.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Its columns hold numbers, booleans, strings, binary data, or arrays of these.
    output_dir : str
        A directory that all executors can access. A relative path starts at the working directory
        of this process. The files are named ``part-r-00000`` and so on.
    overwrite : bool
        Whether to replace an existing directory. Default false. The old directory is removed after
        the new one has its name. If the removal fails, both are kept.
    wait : bool
        If true (default), wait; otherwise return a future.

    Raises
    ------
    UsageError
        The type of a column is not supported, a number is beyond float32, or the directory exists.
    DataError
        This process does not see the files that the executors wrote: the directory is not shared.
        Or the directory could not be renamed. The error names the hidden directory that holds the
        data.

    Warns
    -----
    RuntimeWarning
        The replaced directory could not be removed, or numbers of double columns were rounded to
        float32. The warning names these.

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
    path = absolute_path(application.context_of(df.sparkSession, "saveAsTFRecords"), output_dir)
    with _publish(path, overwrite) as staging_dir:
        written = jobs.collect(df.rdd, functools.partial(_write, staging_dir, columns))
        missing = [
            part for part, _ in written if not tf.io.gfile.exists(posixpath.join(staging_dir, part))
        ]
        if missing:
            raise DataError(
                f"{len(missing)} of {len(written)} files that executors wrote do not exist "
                f"on this host, such as {missing[0]}",
                fix="use an output_dir that all hosts share",
            )
        with tf.io.gfile.GFile(posixpath.join(staging_dir, _SCHEMA), "w") as file:
            file.write(df.schema.json())
    tfrecords.warn_of_rounding(name for _, rounded in written for name in rounded)


def loadTFRecords(
    sc: Any,
    input_dir: str,
    binary_features: Sequence[str] = (),
    schema: Any = None,
    *,
    wait: bool = True,
) -> Any:
    """Return TFRecord files of ``tf.train.Example`` as a DataFrame with one partition per file.

    Parameters
    ----------
    sc : pyspark.SparkContext or pyspark.sql.SparkSession
    input_dir : str
        A directory that all executors can access, a file, or a pattern with ``*``. Files whose
        names start with ``_`` or ``.`` are skipped. Files with the suffix ``.gz`` are
        decompressed.
    binary_features : sequence of str
        Columns of bytes to load as binary data instead of strings.
    schema : pyspark.sql.types.StructType, optional
        The types of the columns. Default: the types that `saveAsTFRecords` stored. Without these,
        all records are read to infer them, and the columns are sorted by name. An int64 feature
        becomes ``bigint``, float ``double``, and bytes ``string`` if all values are UTF-8, else
        ``binary``. A feature with several values in a record becomes an array.
    wait : bool
        If true (default), wait until the files are listed and the schema is known. Otherwise
        return a future.

    Returns
    -------
    pyspark.sql.DataFrame or concurrent.futures.Future of it
        The DataFrame is lazy. For an invalid record, its error names file, number and column.

    Raises
    ------
    UsageError
        No file was found, or a name in `binary_features` is not a column of bytes.
    DataError
        The types of a column differ between records, or a file is damaged.

    Notes
    -----
    The counterpart is ``tensorflowonspark.dfutil.loadTFRecords``, which only reads the first
    record.
    """
    if not wait:
        return jobs.in_background(
            lambda: loadTFRecords(sc, input_dir, binary_features, schema), "load"
        )
    sc = application.context_of(sc, "loadTFRecords")
    path = absolute_path(sc, input_dir)
    files = _files(path)
    spread = sc.parallelize(files, len(files))
    if schema is None:
        schema = _written_schema(path)
    if schema is not None:
        columns = tfrecords.columns_of((f.name, f.dataType.simpleString()) for f in schema.fields)
    else:
        summaries = jobs.collect(spread, _summarize_files)
        columns = tfrecords.inferred_columns(
            functools.reduce(tfrecords.merge, summaries, {}), binary_features
        )
        if not columns:
            raise UsageError(
                f"{path} contains no record with a feature: cannot infer the schema",
                fix="pass schema=",
            )
    columns = tfrecords.with_binary(columns, binary_features)
    spark_schema = struct(column.parts for column in columns)
    paths = _session(sc).createDataFrame(spread.map(_as_row), "file string")
    df = paths.mapInArrow(functools.partial(_read, columns, spark_schema.jsonValue()), spark_schema)
    loadedDF[df] = path
    return df


def toTFExample(
    dtypes: Iterable[tuple[str, str]],
) -> Callable[[Iterable[Any]], Iterator[tuple[bytearray, None]]]:
    """Return a function for ``rdd.mapPartitions`` that serializes rows as ``tf.train.Example``.

    Parameters
    ----------
    dtypes : iterable of (str, str)
        ``df.dtypes`` of the DataFrame.

    Returns
    -------
    callable
        Takes the rows of a partition and yields pairs of bytes and None. It warns of double columns
        with numbers that float32 rounds.

    Raises
    ------
    UsageError
        The type of a column is not supported, or a number is beyond float32. The error names the
        column.
    """
    columns = tfrecords.columns_of(dtypes)

    def convert(rows: Iterable[Any]) -> Iterator[tuple[bytearray, None]]:
        rounded: set[str] = set()
        encode = tfrecords.encoder(columns, rounded)
        for row in rows:
            yield bytearray(encode(row)), None
        tfrecords.warn_of_rounding(rounded)

    return convert


def fromTFExample(iter: Iterable[Any], binary_features: Sequence[str] = ()) -> Iterator[Any]:
    """Yield a ``pyspark.sql.Row`` for each serialized ``tf.train.Example``, columns sorted by name.

    Parameters
    ----------
    iter : iterable
        Bytes, or tuples that start with them, as in a partition of ``newAPIHadoopFile``.
    binary_features : sequence of str
        Columns of bytes to return as ``bytes`` instead of ``str``.
    """
    import tensorflow as tf
    from pyspark.sql import Row

    for number, item in enumerate(iter):
        serialized = bytes(item[0] if isinstance(item, (tuple, list)) else item)
        summaries = tfrecords.summarize_features(tf.train.Example.FromString(serialized))
        columns = tfrecords.inferred_columns(summaries, binary_features)
        values = tfrecords.decoder(columns)(serialized, f"record {number}")
        yield Row(**dict(zip((column.name for column in columns), values, strict=True)))


def infer_schema(example: Any, binary_features: Sequence[str] = ()) -> Any:
    """Return the schema of one record, columns sorted by name.

    Parameters
    ----------
    example : tf.train.Example or bytes
    binary_features : sequence of str
        Columns of bytes to type as binary data instead of strings.

    Returns
    -------
    pyspark.sql.types.StructType
        A feature with one value becomes a column of its type. One with several values becomes an
        array, and one without a value a string.
    """
    import tensorflow as tf

    if isinstance(example, (bytes, bytearray)):
        example = tf.train.Example.FromString(bytes(example))
    if not hasattr(example, "features"):
        raise UsageError(
            f"invalid example: expected a tf.train.Example, got {type(example).__name__}"
        )
    columns = tfrecords.inferred_columns(tfrecords.summarize_features(example), binary_features)
    return struct(column.parts for column in columns)


# Functions that run on the executors


def _write(
    directory: str, columns: Sequence[tfrecords.Column], index: int, rows: Iterator[Any]
) -> Iterator[tuple[str, set[str]]]:
    """Write a partition, and yield the name of its file and of the columns that were rounded."""
    import tensorflow as tf

    rounded: set[str] = set()
    encode = tfrecords.encoder(columns, rounded)
    name = f"part-r-{index:05d}"
    # Spark may run a task twice: each attempt writes its own file, and renames it when complete.
    attempt = posixpath.join(directory, f".{name}.{uuid.uuid4().hex[:8]}")
    tf.io.gfile.makedirs(directory)
    with tf.io.TFRecordWriter(attempt) as writer:
        for row in rows:
            writer.write(encode(row))
    tf.io.gfile.rename(attempt, posixpath.join(directory, name), overwrite=True)
    yield name, rounded


def _summarize_files(
    index: int, files: Iterator[str]
) -> Iterator[dict[str, tfrecords.FeatureSummary]]:
    import tensorflow as tf

    summaries: dict[str, tfrecords.FeatureSummary] = {}
    for file in files:
        for number, serialized in _records(file):
            try:
                example = tf.train.Example.FromString(serialized)
            except Exception as error:  # see `tfrecords._parse`
                raise DataError(
                    f"record {number} of {file} is not a valid tf.train.Example: {error}"
                ) from None
            summaries = tfrecords.merge(summaries, tfrecords.summarize_features(example))
    yield summaries


def _read(
    columns: Sequence[tfrecords.Column], schema: Any, batches: Iterable[Any]
) -> Iterator[Any]:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    shape = compat_pyspark.arrow_schema(StructType.fromJson(schema))
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
            for number, serialized in _records(file):
                rows.append(decode(serialized, f"record {number} of {file}"))
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
        for serialized in tf.data.TFRecordDataset(file, kind).as_numpy_iterator():
            yield number, serialized
            number += 1
    except tf.errors.DataLossError as error:
        raise DataError(
            f"{file} is damaged, or not a TFRecord file, at record {number}: {error.message}"
        ) from None
    except tf.errors.NotFoundError:
        raise DataError(
            f"{file} does not exist on the executor", fix="use an input_dir that all hosts share"
        ) from None


# Functions that run in the driver


def _as_row(file: str) -> tuple[str]:
    return (file,)


def _session(sc: Any) -> Any:
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def struct(columns: Iterable[tuple[str, str, int]]) -> Any:
    """Return the ``StructType`` of columns.

    Parameters
    ----------
    columns : iterable of (str, str, int)
        Name, ``simpleString`` of the elements, and number of array dimensions of each column.
    """
    from pyspark.sql.types import StructType

    fields = []
    for name, element, dimensions in columns:
        kind: Any = _TYPE_NAMES.get(element, element)
        for _ in range(dimensions):
            kind = {"type": "array", "elementType": kind, "containsNull": True}
        fields.append({"name": name, "type": kind, "nullable": True, "metadata": {}})
    return StructType.fromJson({"type": "struct", "fields": fields})


def _files(path: str) -> list[str]:
    import tensorflow as tf

    with translate_filesystem_errors(path):
        if tf.io.gfile.isdir(path):
            paths = [posixpath.join(path, name) for name in tf.io.gfile.listdir(path)]
        else:
            paths = tf.io.gfile.glob(path)
        files = sorted(
            file
            for file in paths
            if posixpath.basename(file)[:1] not in ("_", ".", "") and not tf.io.gfile.isdir(file)
        )
    if not files:
        raise UsageError(
            f"no TFRecord file found in {path}",
            fix="use a directory, file or pattern that this process can access",
        )
    return files


def _written_schema(path: str) -> Any:
    import tensorflow as tf
    from pyspark.sql.types import StructType

    directory = path if tf.io.gfile.isdir(path) else posixpath.dirname(path)
    file = posixpath.join(directory, _SCHEMA)
    if not tf.io.gfile.exists(file):
        return None
    with tf.io.gfile.GFile(file) as opened:
        text = opened.read()
    try:
        return StructType.fromJson(json.loads(text))
    except (ValueError, KeyError) as error:
        raise DataError(
            f"{file} is not a valid schema: {error}", fix="remove the file, or pass schema="
        ) from None


# Publishing of a directory


@contextlib.contextmanager
def _publish(place: str, overwrite: bool) -> Iterator[str]:
    """Yield a hidden directory, and rename it to `place` when the block ends without an error.

    A directory that is replaced is renamed first and removed last. If a rename fails, it gets its
    name back. A hidden directory that holds ``_SUCCESS`` is never removed.

    Parameters
    ----------
    place : str
        Path or URI of the directory.
    overwrite : bool
        Whether `place` may exist.

    Raises
    ------
    UsageError
        `place` exists, and `overwrite` is false.
    DataError
        A rename failed. The error names the directories that hold the old and the new data.
    """
    import tensorflow as tf

    with translate_filesystem_errors(place):
        if tf.io.gfile.exists(place) and not overwrite:
            raise UsageError(f"{place} exists", fix="another directory, or overwrite=True")
    new = _temporary_path(place)
    try:
        tf.io.gfile.makedirs(new)
        yield new
        with tf.io.gfile.GFile(posixpath.join(new, _SUCCESS), "w") as file:
            file.write("")
    except BaseException:
        if tf.io.gfile.exists(new) and not tf.io.gfile.exists(posixpath.join(new, _SUCCESS)):
            _remove(new, "incomplete")
        raise
    _rename(new, place, overwrite)


def _rename(new: str, place: str, overwrite: bool) -> None:
    import tensorflow as tf

    old = _temporary_path(place) if overwrite and tf.io.gfile.exists(place) else ""
    try:
        if old:
            tf.io.gfile.rename(place, old)
        tf.io.gfile.rename(new, place)
    except BaseException as error:
        hint = _restore(old, place) if old else ""
        what = f"{error}; the new data is in {new}{hint}"
        if isinstance(error, tf.errors.OpError):
            fix = f"remove the cause, then rename {new} to {place}"
            raise DataError(f"saveAsTFRecords failed: {what}", fix=fix) from error
        warnings.warn(f"saveAsTFRecords was interrupted: {what}", RuntimeWarning, stacklevel=2)
        raise
    if old:
        _remove(old, "replaced")


def _restore(old: str, place: str) -> str:
    """Rename the old directory back; if that fails, return text that names it."""
    import tensorflow as tf

    try:
        if tf.io.gfile.exists(old):
            tf.io.gfile.rename(old, place)
    except tf.errors.OpError as error:
        return f", and the old data is in {old}, which cannot be renamed back: {error}"
    return ""


def _remove(directory: str, what: str) -> None:
    import tensorflow as tf

    try:
        tf.io.gfile.rmtree(directory)
    except tf.errors.OpError as error:
        warnings.warn(
            f"the {what} directory {directory} could not be removed: {error}; remove it yourself",
            RuntimeWarning,
            stacklevel=2,
        )


def _temporary_path(place: str) -> str:
    parent, name = posixpath.split(place.rstrip("/"))
    return posixpath.join(parent, f".{name}.{uuid.uuid4().hex[:8]}")
