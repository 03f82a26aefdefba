"""Rows of a DataFrame as ``tf.train.Example`` and back.

This module does not need Spark.
"""

from __future__ import annotations

import array
import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfd_notebook._compat import pyspark
from tfd_notebook.errors import DataError, Unsupported, UsageError
from tfd_notebook.net.hadoop_paths import without_path

#: The ``tf.train.Feature`` list that holds values of a Spark type, by ``simpleString``.
LISTS = {
    "boolean": "int64_list",
    "tinyint": "int64_list",
    "smallint": "int64_list",
    "int": "int64_list",
    "bigint": "int64_list",
    "float": "float_list",
    "double": "float_list",
    "string": "bytes_list",
    "binary": "bytes_list",
}
#: The Spark type to read if only the list is known.
_WIDEST = {"int64_list": "bigint", "float_list": "double", "bytes_list": "string"}
_WORDS = {"int64_list": "whole numbers", "float_list": "numbers", "bytes_list": "bytes"}
_ADVICE = {
    "vector": "pyspark.ml.functions.vector_to_array(column)",
    "decimal": 'column.cast("string")',
    "date": 'column.cast("string")',
    "timestamp": 'column.cast("string")',
    "struct": "one column for each of its fields",
    "map": "pyspark.sql.functions.to_json(column)",
}


@dataclass(frozen=True)
class Column:
    """A column of a DataFrame, stored in a feature of the same name.

    Parameters
    ----------
    name : str
    element : str
        A key of `LISTS`.
    is_array : bool
        Whether a row holds an array of values instead of one value.
    """

    name: str
    element: str
    is_array: bool = False

    @property
    def list_name(self) -> str:
        """Name of the list in the feature."""
        return LISTS[self.element]

    @property
    def parts(self) -> tuple[str, str, int]:
        """Name, element, and number of array dimensions."""
        return self.name, self.element, int(self.is_array)

    @property
    def type_name(self) -> str:
        """Spark's ``simpleString`` of the column's type."""
        return f"array<{self.element}>" if self.is_array else self.element


def columns_of(dtypes: Iterable[tuple[str, str]]) -> tuple[Column, ...]:
    """Return the columns of a DataFrame's ``dtypes``.

    Raises
    ------
    UsageError
        The DataFrame has no column, or no feature can hold the type of some columns. The error
        names all of these.
    """
    columns, wrong = [], []
    for name, type_name in dtypes:
        is_array = type_name.startswith("array<") and type_name.endswith(">")
        element = type_name[6:-1] if is_array else type_name
        if element in LISTS:
            columns.append(Column(name, element, is_array))
        else:
            wrong.append((name, type_name))
    if wrong:
        unsupported = ", ".join(f"{name!r} ({type_name})" for name, type_name in wrong)
        known = [advice for kind, advice in _ADVICE.items() if kind in wrong[0][1]]
        raise UsageError(
            f"a tf.train.Example cannot hold the column{'s' * (len(wrong) > 1)} {unsupported}",
            fix=f"use {known[0]}"
            if known
            else f"use {', '.join(LISTS)} or arrays of these; drop or convert other columns",
        )
    if not columns:
        raise UsageError("the DataFrame has no column", fix="select at least one")
    return tuple(columns)


def encoder(columns: Sequence[Column], rounded: set[str]) -> Callable[[Sequence[Any]], bytes]:
    """Return a function that serializes a row as ``tf.train.Example``.

    A null is left out; an empty array becomes a feature with an empty list.

    Parameters
    ----------
    columns : sequence of Column
    rounded : set of str
        The function adds the names of double columns with a number that float32 rounds.
    """
    import tensorflow as tf

    example = tf.train.Example

    def encode(row: Sequence[Any]) -> bytes:
        record = example()
        features = record.features.feature
        for column, value in zip(columns, row, strict=True):
            if value is None:
                continue
            values = value if column.is_array else (value,)
            if column.element == "boolean":
                values = [int(item) if item is not None else None for item in values]
            elif column.element == "string":
                values = [item.encode() if item is not None else None for item in values]
            elif column.element == "binary":
                values = [bytes(item) if item is not None else None for item in values]
            feature_list = getattr(features[column.name], column.list_name)
            feature_list.SetInParent()  # an empty list differs from a missing feature
            try:
                if column.list_name == "float_list" and _is_rounded(values):
                    rounded.update([column.name] if column.element == "double" else [])
                feature_list.value.extend(values)
            except OverflowError:
                raise UsageError(
                    f"invalid value {value!r:.80} in column {column.name!r}: a number is beyond "
                    "the range of float32, the only floating-point type of a tf.train.Example",
                    fix='filter the rows, or use column.cast("string")',
                ) from None
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"invalid value {value!r} in column {column.name!r}: expected "
                    f"{column.type_name} that a feature can hold: {error}",
                    fix="an array's elements cannot be null; filter or fill them",
                ) from None
        serialized: bytes = record.SerializeToString()
        return serialized

    return encode


def warn_of_rounding(names: Iterable[str]) -> None:
    """Warn of double columns with numbers that were rounded, if there are any."""
    columns = ", ".join(sorted(set(names)))
    if columns:
        warnings.warn(
            f"numbers were rounded to float32 for the columns {columns}: a tf.train.Example has no "
            'doubles; use column.cast("float") if this is intended, else column.cast("string")',
            RuntimeWarning,
            stacklevel=2,
        )


def _is_rounded(values: Sequence[Any]) -> bool:
    """Return True if float32 changes a number.

    Raises
    ------
    OverflowError
        A finite number would become infinite.
    """
    narrow = array.array("f", values)
    if narrow.tolist() == list(values):
        return False
    changed = [new for old, new in zip(values, narrow, strict=True) if old == old != new]
    if any(map(math.isinf, changed)):
        raise OverflowError
    return bool(changed)


def decoder(columns: Sequence[Column]) -> Callable[[bytes, str], list[Any]]:
    """Return a function that converts a serialized ``tf.train.Example`` to a row.

    Its arguments are the bytes and a description of the record's location, for errors.
    """
    import tensorflow as tf

    parse = tf.train.Example.FromString

    def decode(serialized: bytes, where: str) -> list[Any]:
        features = _parse(parse, serialized, where).features.feature
        return [
            _value(features[column.name], column, where) if column.name in features else None
            for column in columns
        ]

    return decode


def _parse(parse: Callable[[bytes], Any], serialized: bytes, where: str) -> Any:
    try:
        return parse(bytes(serialized))
    except Exception as error:  # the public name of protobuf's error depends on its version
        raise DataError(f"{where} is not a valid tf.train.Example: {error}") from None


def _value(feature: Any, column: Column, where: str) -> Any:
    kind = feature.WhichOneof("kind")
    if kind is None:
        return [] if column.is_array else None
    values = getattr(feature, kind).value
    if kind != column.list_name and values:
        raise DataError(
            f"column {column.name!r} is {column.type_name}, but {where} has {_WORDS[kind]} in it",
            fix="pass schema= with the types that all files have",
        )
    converted = _convert(values, column, where)
    if column.is_array:
        return converted
    if len(converted) > 1:
        raise DataError(
            f"column {column.name!r} is {column.type_name}, but {where} has {len(converted)} "
            "values in it",
            fix=f"pass schema= with the type array<{column.element}> for {column.name!r}",
        )
    return converted[0] if converted else None


def _convert(values: Sequence[Any], column: Column, where: str) -> list[Any]:
    if column.element == "boolean":
        other = next((item for item in values if item not in (0, 1)), None)
        if other is not None:
            raise DataError(
                f"column {column.name!r} is boolean, but {where} has {other} in it",
                fix=f"pass schema= with the type bigint for {column.name!r}",
            )
        return [bool(item) for item in values]
    if column.element != "string":
        return list(values)
    try:
        return [item.decode() for item in values]
    except UnicodeDecodeError:
        raise DataError(
            f"column {column.name!r} of {where} is not UTF-8 text",
            fix=f"pass binary_features=[{column.name!r}]",
        ) from None


# Schema inference for files without a stored schema


@dataclass(frozen=True)
class FeatureSummary:
    """List, maximum number of values per record, and UTF-8 validity of one feature."""

    kind: str | None = None
    max_values: int = 0
    text: bool = True

    def merged(self, other: FeatureSummary, name: str) -> FeatureSummary:
        """Return the summary of both sets of records.

        Raises
        ------
        DataError
            The feature has different lists in them.
        """
        if None not in (self.kind, other.kind) and self.kind != other.kind:
            raise DataError(
                f"column {name!r} holds {_WORDS[self.kind or '']} in some records and "
                f"{_WORDS[other.kind or '']} in others",
                fix="pass schema= without this column, or write the files again",
            )
        return FeatureSummary(
            self.kind or other.kind,
            max(self.max_values, other.max_values),
            self.text and other.text,
        )


def summarize_features(example: Any) -> dict[str, FeatureSummary]:
    """Return the summary of each feature of a ``tf.train.Example``."""
    return {name: _summarize(feature) for name, feature in example.features.feature.items()}


def _summarize(feature: Any) -> FeatureSummary:
    kind = feature.WhichOneof("kind")
    values = getattr(feature, kind).value if kind else ()
    if not values:  # an empty list may be stored without its kind
        return FeatureSummary(None, 0)
    return FeatureSummary(kind, len(values), kind != "bytes_list" or all(map(_is_text, values)))


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def merge(
    first: Mapping[str, FeatureSummary], second: Mapping[str, FeatureSummary]
) -> dict[str, FeatureSummary]:
    """Return the summaries of two sets of records."""
    merged = dict(first)
    for name, summary in second.items():
        merged[name] = merged[name].merged(summary, name) if name in merged else summary
    return merged


def inferred_columns(
    summaries: Mapping[str, FeatureSummary], binary: Iterable[str] = ()
) -> tuple[Column, ...]:
    """Return the columns for the summaries, sorted by name.

    A feature that is empty in all records becomes a string column.

    Parameters
    ----------
    summaries : mapping of str to FeatureSummary
    binary : iterable of str
        Features that hold binary data, even if their bytes are valid UTF-8.
    """
    columns = []
    for name in sorted(summaries):
        summary = summaries[name]
        element = _WIDEST[summary.kind or "bytes_list"]
        if element == "string" and (name in binary or not summary.text):
            element = "binary"
        columns.append(Column(name, element, summary.max_values > 1))
    return tuple(columns)


def with_binary(columns: Sequence[Column], binary: Iterable[str]) -> tuple[Column, ...]:
    """Return the columns, with binary type for those named in `binary`.

    Raises
    ------
    UsageError
        A named column does not exist, or holds numbers.
    """
    known = {column.name: column for column in columns}
    for name in binary:
        if name not in known:
            raise UsageError(
                f"invalid column {name!r} in binary_features",
                fix=f"use one of the columns {', '.join(known)}",
            )
        if known[name].list_name != "bytes_list":
            raise UsageError(
                f"invalid column {name!r} in binary_features: it holds "
                f"{_WORDS[known[name].list_name]}",
                fix="remove it from binary_features",
            )
        known[name] = replace(known[name], element="binary")
    return tuple(known.values())


def absolute_path(sc: Any, path: str) -> str:
    """Return the absolute form of a path, the same for all executors.

    Parameters
    ----------
    sc : pyspark.SparkContext
    path : str
        If Spark's default file system is local, a relative path starts at the working directory of
        this process. Otherwise it starts at the user's home directory there.
    """
    path = str(path)
    if not path:
        raise UsageError("invalid directory '': expected a path")
    if path.startswith("file:"):
        return "/" + path.removeprefix("file:").lstrip("/")
    if "://" in path:
        return path
    root = pyspark.default_fs(sc)
    if root.startswith("file:"):
        return os.path.abspath(path)
    home = "" if path.startswith("/") else f"/user/{sc.sparkUser()}/"
    return f"{without_path(root)}{home}{path}"


@contextlib.contextmanager
def translate_filesystem_errors(place: str) -> Iterator[None]:
    """Explain TensorFlow's error for an unsupported file system."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "UnimplementedError":
            raise
        raise Unsupported(
            f"this TensorFlow does not support the file system of {place}",
            fix="use a directory that all hosts have mounted, or install tensorflow-io "
            "here and on the executors",
        ) from None
