"""Encoding of rows as columns, the content of a chunk.

A column is a *layout* and buffers. The layout is JSON values that describe the content. Values of
one type become a NumPy array, or one buffer and the end of each value in it. Lists, tuples, dicts
and Rows become a column for each of their parts. Values of several types become a column for each
type and a column of type numbers. Decoded values equal the encoded values and have their types.

Other values are pickled: objects of other classes, aware datetimes and arrays of objects. Columns
are only read from channels whose peer has authenticated as part of the same cluster. Spark has also
unpickled the same rows before.
"""

from __future__ import annotations

import datetime
import decimal
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import numpy as np

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.errors import UsageError
from tfd_notebook.spark.feed import uniform

#: JSON values: the name of a kind, and its parameters.
Layout: TypeAlias = "list[Any]"
#: Content of one buffer: fragments that are sent one after another.
Fragments: TypeAlias = "list[Any]"

EPOCH = datetime.datetime(1970, 1, 1)
MICROSECOND = datetime.timedelta(microseconds=1)
#: Values of at least this size in bytes are sent without a copy into a common buffer.
_LARGE = 16_384
#: Maximum number of parts of a tuple that get separate columns.
_MAX_COLUMNS = 64
_MAX_TYPES = 250
_PLAIN = (int, float, bool, str, bytes, type(None))


def encode(values: Sequence[Any], out: list[Fragments]) -> Layout:
    """Append the buffers of a column of `values` to `out`, and return its layout.

    Raises
    ------
    UsageError
        A value cannot be pickled, and has no other encoding.
    """
    kinds = set(map(type, values))
    if len(kinds) == 1:
        (kind,) = kinds
        encoder = _ENCODERS.get(kind) or _special(kind)
        layout = encoder(values, out) if encoder else None
        return layout or _pickled(values, out)
    if not kinds:
        return ["none"]
    return _union(values, kinds, out)


def _none(values: Sequence[Any], out: list[Fragments]) -> Layout:
    return ["none"]


def _bool(values: Sequence[Any], out: list[Fragments]) -> Layout:
    out.append([np.array(values, np.bool_)])
    return ["bool"]


def _int(values: Sequence[Any], out: list[Fragments]) -> Layout:
    numbers = uniform.integers(values)
    if numbers is None:
        return ["big", _str([str(value) for value in values], out)]
    out.append([numbers])
    return ["int"]


def _float(values: Sequence[Any], out: list[Fragments]) -> Layout:
    out.append([uniform.floats(values)])
    return ["float"]


def _complex(values: Sequence[Any], out: list[Fragments]) -> Layout:
    out.append([np.array(values, np.complex128)])
    return ["complex"]


def _str(values: Sequence[Any], out: list[Fragments]) -> Layout:
    return ["str", *_bytes([value.encode("utf-8", "surrogatepass") for value in values], out)[1:]]


def _bytes(values: Sequence[Any], out: list[Fragments]) -> Layout:
    ends = np.fromiter(accumulate(map(len, values)), np.int64, len(values))
    out.append([ends])
    large = ends[-1] >= _LARGE * len(values)
    out.append(list(values) if large else [b"".join(values)])
    return ["bytes"]


def _bytearray(values: Sequence[Any], out: list[Fragments]) -> Layout:
    return ["bytearray", *_bytes(values, out)[1:]]


def _date(values: Sequence[Any], out: list[Fragments]) -> Layout:
    out.append([np.fromiter((v.toordinal() for v in values), np.int64, len(values))])
    return ["date"]


def _datetime(values: Sequence[Any], out: list[Fragments]) -> Layout | None:
    if any(value.tzinfo is not None or value.fold for value in values):
        return None
    since = ((value - EPOCH) // MICROSECOND for value in values)
    out.append([np.fromiter(since, np.int64, len(values))])
    return ["datetime"]


def _decimal(values: Sequence[Any], out: list[Fragments]) -> Layout:
    return ["decimal", _str([str(value) for value in values], out)]


def _list(values: Sequence[Any], out: list[Fragments]) -> Layout:
    return _sequence("list", values, out)


def _tuple(values: Sequence[Any], out: list[Fragments]) -> Layout:
    return _sequence("tuple", values, out)


def _sequence(kind: str, values: Sequence[Any], out: list[Fragments]) -> Layout:
    lengths = set(map(len, values))
    if len(lengths) > 1:
        return ["var", kind, _lengths(values, out), encode(_flat(values), out)]
    (length,) = lengths
    if not length:
        return ["fix", kind, 0, ["none"]]
    numbers = uniform.matrix(values, length)
    if numbers is not None:
        out.append([numbers])
        return ["fix", kind, length, ["float" if numbers.dtype.kind == "f" else "int"]]
    flat = _flat(values)
    if length > _MAX_COLUMNS or _alike(flat):
        return ["fix", kind, length, encode(flat, out)]
    return ["seq", kind, [encode(column, out) for column in zip(*values, strict=True)]]


def _flat(values: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(values))


def _alike(values: list[Any]) -> bool:
    """Return True if the parts of all rows fit one column, instead of a column per part."""
    kinds = set(map(type, values))
    if len(kinds) > 1:
        return False
    (kind,) = kinds
    if kind in (list, tuple):
        return len(set(map(len, values))) == 1
    if kind is np.ndarray:
        return len(set(map(attrgetter("shape", "dtype"), values))) == 1
    return kind in _PLAIN


def _lengths(values: Sequence[Any], out: list[Fragments]) -> Layout:
    out.append([np.fromiter(map(len, values), np.int64, len(values))])
    return ["int"]


def _dict(values: Sequence[Any], out: list[Fragments]) -> Layout:
    keys = tuple(values[0])
    if all(type(key) is str for key in keys) and set(map(tuple, values)) == {keys}:
        return ["dict", list(keys), [encode(list(map(itemgetter(k), values)), out) for k in keys]]
    return [
        "map",
        _lengths(values, out),
        encode(_flat(values), out),
        encode(_flat(value.values() for value in values), out),
    ]


def _row(values: Sequence[Any], out: list[Fragments]) -> Layout | None:
    fields = compat_pyspark.row_fields(values)
    if fields is None or len(set(map(len, values)) | {len(fields)}) > 1:
        return None
    columns = [encode(column, out) for column in zip(*values, strict=True)]
    return ["row", fields, columns]


def _array(values: Sequence[Any], out: list[Fragments]) -> Layout | None:
    dtypes = set(map(attrgetter("dtype"), values))
    if len(dtypes) > 1:
        return None
    (dtype,) = dtypes
    if dtype.kind not in "?biufcSUmM":
        return None
    shapes = list(map(attrgetter("shape"), values))
    if len(set(shapes)) == 1:
        out.append(uniform.raw(values, _LARGE))
        return ["array", dtype.str, list(shapes[0])]
    if len(set(map(len, shapes))) > 1:
        return None
    out.append([np.array(shapes, np.int64)])
    out.append([piece for value in values for piece in uniform.raw([value], _LARGE)])
    return ["arrays", dtype.str, len(shapes[0])]


def _scalar(values: Sequence[Any], out: list[Fragments]) -> Layout | None:
    dtypes = set(map(attrgetter("dtype"), values))
    (dtype,) = dtypes if len(dtypes) == 1 else (None,)
    if dtype is None or dtype.kind not in "?biufcmM":
        return None
    out.append(uniform.raw([np.array(values, dtype)], _LARGE))
    return ["scalar", dtype.str]


def _special(kind: type) -> Callable[[Sequence[Any], list[Fragments]], Layout | None] | None:
    if issubclass(kind, np.generic):
        return _scalar
    types = sys.modules.get("pyspark.sql.types")
    return _row if types is not None and kind is types.Row else None


def _union(values: Sequence[Any], kinds: set[type], out: list[Fragments]) -> Layout:
    if len(kinds) > _MAX_TYPES:
        return _pickled(values, out)
    groups: dict[type, list[Any]] = {}
    for value in values:
        groups.setdefault(type(value), []).append(value)
    turns = {kind: number for number, kind in enumerate(groups)}
    out.append([np.fromiter(map(turns.__getitem__, map(type, values)), np.uint8, len(values))])
    return ["union", [[len(group), encode(group, out)] for group in groups.values()]]


def _pickled(values: Sequence[Any], out: list[Fragments]) -> Layout:
    try:
        out.append([pickle.dumps(list(values), 5)])
    except Exception as error:
        kinds = ", ".join(sorted({type(value).__qualname__ for value in values}))
        raise UsageError(
            f"rows of {kinds} cannot be sent to a node: {error}",
            fix="map them to numbers, arrays, bytes, text or tuples of these before feeding",
        ) from error
    return ["pickle"]


_ENCODERS: dict[type, Callable[[Sequence[Any], list[Fragments]], Layout | None]] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    bytearray: _bytearray,
    datetime.date: _date,
    datetime.datetime: _datetime,
    decimal.Decimal: _decimal,
    list: _list,
    tuple: _tuple,
    dict: _dict,
    np.ndarray: _array,
}
