"""Rows of a DataFrame as ``tf.train.Example`` and back: what both sides agree on, without Spark."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfd_notebook._compat import pyspark
from tfd_notebook.errors import DataError, Unsupported, UsageError

#: The list of a feature in which values of a Spark type are kept, by ``simpleString``.
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
#: The type that is read where only the list is known.
_WIDEST = {"int64_list": "bigint", "float_list": "double", "bytes_list": "string"}
_WORDS = {"int64_list": "whole numbers", "float_list": "numbers", "bytes_list": "bytes"}
_ADVICE = {
    "vector": "pyspark.ml.functions.vector_to_array(column)",
    "decimal": 'column.cast("double")',
    "date": 'column.cast("string")',
    "timestamp": 'column.cast("string")',
    "struct": "one column for each of its fields",
    "map": "pyspark.sql.functions.to_json(column)",
}


@dataclass(frozen=True)
class Column:
    """A column that a feature of the same name holds.

    Parameters
    ----------
    name : str
    element : str
        One of `LISTS`.
    is_array : bool
        Whether a row has any number of values in it, and not one.
    """

    name: str
    element: str
    is_array: bool = False

    @property
    def list_name(self) -> str:
        """The list of the feature."""
        return LISTS[self.element]

    @property
    def type_name(self) -> str:
        """Spark's ``simpleString`` of it."""
        return f"array<{self.element}>" if self.is_array else self.element


def columns_of(dtypes: Iterable[tuple[str, str]]) -> tuple[Column, ...]:
    """Return the columns of a DataFrame's ``dtypes``.

    Raises
    ------
    UsageError
        There is none, or some have types that no feature can hold; it names all of these.
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
        said = ", ".join(f"{name!r} ({type_name})" for name, type_name in wrong)
        known = [advice for kind, advice in _ADVICE.items() if kind in wrong[0][1]]
        raise UsageError(
            f"a tf.train.Example cannot hold the column{'s' * (len(wrong) > 1)} {said}",
            fix=f"use {known[0]}"
            if known
            else f"it holds {', '.join(LISTS)} and arrays of these; drop or convert the others",
        )
    if not columns:
        raise UsageError("the DataFrame has no column", fix="select at least one")
    return tuple(columns)


def encoder(columns: Sequence[Column]) -> Callable[[Sequence[Any]], bytes]:
    """Return what makes a serialised ``tf.train.Example`` of a row.

    None leaves the feature out; an empty array is a feature with an empty list.
    """
    import tensorflow as tf

    example = tf.train.Example

    def encode(row: Sequence[Any]) -> bytes:
        made = example()
        features = made.features.feature
        for column, value in zip(columns, row, strict=True):
            if value is None:
                continue
            values = value if column.is_array else (value,)
            if column.element == "boolean":
                values = [int(one) if one is not None else None for one in values]
            elif column.element == "string":
                values = [one.encode() if one is not None else None for one in values]
            elif column.element == "binary":
                values = [bytes(one) if one is not None else None for one in values]
            held = getattr(features[column.name], column.list_name)
            held.SetInParent()  # an empty list is not the same as none
            try:
                held.value.extend(values)
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"column {column.name!r} has {value!r}, which is no {column.type_name} "
                    f"that a feature can hold: {error}",
                    fix="an array's elements cannot be null; filter or fill them",
                ) from None
        serialised: bytes = made.SerializeToString()
        return serialised

    return encode


def decoder(columns: Sequence[Column]) -> Callable[[bytes, str], list[Any]]:
    """Return what makes a row of a serialised ``tf.train.Example``.

    It takes that and words that say where it stands, for errors.
    """
    import tensorflow as tf

    parse = tf.train.Example.FromString

    def decode(serialised: bytes, where: str) -> list[Any]:
        features = _parsed(parse, serialised, where).features.feature
        return [
            _value(features[column.name], column, where) if column.name in features else None
            for column in columns
        ]

    return decode


def _parsed(parse: Callable[[bytes], Any], serialised: bytes, where: str) -> Any:
    try:
        return parse(bytes(serialised))
    except Exception as error:  # protobuf's own error has no public place in all its versions
        raise DataError(f"{where} holds no tf.train.Example: {error}") from None


def _value(feature: Any, column: Column, where: str) -> Any:
    kind = feature.WhichOneof("kind")
    if kind is None:
        return [] if column.is_array else None
    values = getattr(feature, kind).value
    if kind != column.list_name and values:
        raise DataError(
            f"column {column.name!r} is {column.type_name}, but {where} holds {_WORDS[kind]} in it",
            fix="pass schema= with the types that all files have",
        )
    made = _converted(values, column, where)
    if column.is_array:
        return made
    if len(made) > 1:
        raise DataError(
            f"column {column.name!r} is {column.type_name}, but {where} holds {len(made)} "
            "values in it",
            fix=f"pass schema= in which {column.name!r} is array<{column.element}>",
        )
    return made[0] if made else None


def _converted(values: Iterable[Any], column: Column, where: str) -> list[Any]:
    if column.element == "boolean":
        return [bool(one) for one in values]
    if column.element != "string":
        return list(values)
    try:
        return [one.decode() for one in values]
    except UnicodeDecodeError:
        raise DataError(
            f"column {column.name!r} of {where} is not text",
            fix=f"binary_features=[{column.name!r}]",
        ) from None


# What is in files of others


@dataclass(frozen=True)
class Seen:
    """What was seen of a feature: its list, the most values in one record, whether all is text."""

    kind: str | None = None
    most: int = 0
    text: bool = True

    def merged(self, other: Seen, name: str) -> Seen:
        """Return what was seen of it in both."""
        if None not in (self.kind, other.kind) and self.kind != other.kind:
            raise DataError(
                f"column {name!r} holds {_WORDS[self.kind or '']} in some records and "
                f"{_WORDS[other.kind or '']} in others",
                fix="pass schema= without it, or write the files anew",
            )
        return Seen(self.kind or other.kind, max(self.most, other.most), self.text and other.text)


def seen_in(example: Any) -> dict[str, Seen]:
    """Return what a ``tf.train.Example`` tells of its features."""
    return {name: _seen(feature) for name, feature in example.features.feature.items()}


def _seen(feature: Any) -> Seen:
    kind = feature.WhichOneof("kind")
    values = getattr(feature, kind).value if kind else ()
    if not values:  # an empty list may have been written without its kind
        return Seen(None, 0)
    return Seen(kind, len(values), kind != "bytes_list" or all(map(_is_text, values)))


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def merge(first: Mapping[str, Seen], second: Mapping[str, Seen]) -> dict[str, Seen]:
    """Return what was seen in both."""
    merged = dict(first)
    for name, seen in second.items():
        merged[name] = merged[name].merged(seen, name) if name in merged else seen
    return merged


def columns_seen(seen: Mapping[str, Seen], binary: Iterable[str] = ()) -> tuple[Column, ...]:
    """Return the columns for what was seen, by name; what is always empty is a string.

    Parameters
    ----------
    seen : mapping of str to Seen
    binary : iterable of str
        Features that hold binary data, whatever they look like.
    """
    made = []
    for name in sorted(seen):
        one = seen[name]
        element = _WIDEST[one.kind or "bytes_list"]
        if element == "string" and (name in binary or not one.text):
            element = "binary"
        made.append(Column(name, element, one.most > 1))
    return tuple(made)


def with_binary(columns: Sequence[Column], binary: Iterable[str]) -> tuple[Column, ...]:
    """Return the columns with those named in `binary` as binary ones.

    Raises
    ------
    UsageError
        One of them is not there, or holds numbers.
    """
    known = {column.name: column for column in columns}
    for name in binary:
        if name not in known:
            raise UsageError(
                f"binary_features names {name!r}, which is no column",
                fix=f"the columns are {', '.join(known)}",
            )
        if known[name].list_name != "bytes_list":
            raise UsageError(
                f"binary_features names {name!r}, which holds {_WORDS[known[name].list_name]}",
                fix="leave it out",
            )
        known[name] = replace(known[name], element="binary")
    return tuple(known.values())


def located(sc: Any, path: str) -> str:
    """Return where a path is for all executors: under Spark's default file system.

    Parameters
    ----------
    sc : pyspark.SparkContext
    path : str
        A relative one counts from the directory of this process, or from the user's home where the
        default file system is no local one.
    """
    path = str(path)
    if not path:
        raise UsageError("the directory has no name")
    if path.startswith("file:"):
        return "/" + path.removeprefix("file:").lstrip("/")
    if "://" in path:
        return path
    root = pyspark.default_fs(sc)
    if root.startswith("file:"):
        return os.path.abspath(path)
    home = "" if path.startswith("/") else f"/user/{sc.sparkUser()}/"
    return f"{without_path(root)}{home}{path}"


def without_path(root: str) -> str:
    """Return the root of a file system, such as ``hdfs:///``, without the slashes of its path."""
    scheme, separator, rest = root.partition("://")
    return scheme + separator + rest.rstrip("/")


class translate_filesystem_errors:  # noqa: N801 - it reads as a word
    """Turns TensorFlow's word for a file system that it does not know into an error that helps."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and type(error).__name__ == "UnimplementedError":
            raise Unsupported(
                f"this TensorFlow does not know the file system of {self._place}",
                fix="a directory that all hosts have mounted, or the package tensorflow-io "
                "here and on the executors",
            ) from None
