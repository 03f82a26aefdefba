"""Encoding of rows as columns, the content of a chunk.

A column is a *layout* and buffers. The layout is JSON values that describe the content. Numbers and
NumPy arrays of one type become one array, and large bytes one buffer. Tuples, lists, dicts and Rows
become a column for each of their parts. Decoded values equal the encoded values and have their
types.

All other values are pickled: text, lists of several lengths, values of several types, other
classes. Large buffers in them, such as arrays of several shapes, are not copied into the pickle.
The encoders cannot be replaced by pickles with separate buffers, which TensorFlow cannot read:

- `_number` and `_array` make the contiguous arrays. A pickle has an object for each row.
- `_bytes` keeps large bytes out of the pickle. Pickle has separate buffers for arrays only, and
  would copy each blob before it is sent.
- `_sequence`, `_dict` and `_row` split rows into columns, so that their numbers become such arrays.

Pickles are only read from channels whose peer has authenticated as part of the same cluster. Spark
has also unpickled the same rows before.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import numpy as np

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.errors import UsageError

#: JSON values: the name of a kind, and its parameters.
Layout: TypeAlias = "list[Any]"
#: Content of one buffer: fragments that are sent one after another.
Fragments: TypeAlias = "list[Any]"

#: Values of at least this size in bytes are sent without a copy into a common buffer.
_LARGE = 16_384
#: Maximum number of parts of a tuple that get separate columns.
_MAX_COLUMNS = 64
_NUMBERS: dict[type, Any] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}
_PLAIN = (*_NUMBERS, str, bytes, type(None))


def encode(values: Sequence[Any], out: list[Fragments], kinds: set[type] | None = None) -> Layout:
    """Append the buffers of a column of `values` to `out`, and return its layout.

    Parameters
    ----------
    values : sequence
    out : list
    kinds : set of type, optional
        The types of the values. Default: determined.

    Raises
    ------
    UsageError
        A value cannot be pickled, and has no other encoding.
    """
    kinds = kinds or set(map(type, values))
    layout = None
    if len(kinds) == 1:
        (kind,) = kinds
        encoder = _ENCODERS.get(kind) or _special(kind)
        layout = encoder(values, out) if encoder else None
    return layout or _pickled(values, kinds, out)


def _number(values: Sequence[Any], out: list[Fragments]) -> Layout | None:
    try:
        numbers = np.fromiter(values, _NUMBERS[type(values[0])], len(values))
    except OverflowError:
        return None
    out.append([numbers])
    return ["python", numbers.dtype.str]


def _bytes(values: Sequence[Any], out: list[Fragments]) -> Layout | None:
    ends = np.fromiter(accumulate(map(len, values)), np.int64, len(values))
    if ends[-1] < _LARGE * len(values):
        return None
    out += [[ends], list(values)]
    return ["bytes"]


def _sequence(values: Sequence[Any], out: list[Fragments]) -> Layout | None:
    kind = type(values[0]).__name__
    lengths = set(map(len, values))
    if len(lengths) > 1 or 0 in lengths:
        return None
    (length,) = lengths
    flat = list(chain.from_iterable(values))
    kinds = set(map(type, flat))
    if length > _MAX_COLUMNS or _alike(flat, kinds):
        return ["fix", kind, length, encode(flat, out, kinds)]
    return [kind, None, [encode(column, out) for column in zip(*values, strict=True)]]


def _alike(values: list[Any], kinds: set[type]) -> bool:
    """Return True if the parts of all rows fit one column, instead of a column per part."""
    if len(kinds) > 1:
        return False
    (kind,) = kinds
    if kind in (list, tuple):
        return len(set(map(len, values))) == 1
    if kind is np.ndarray:
        return len(set(map(attrgetter("shape", "dtype"), values))) == 1
    return kind in _PLAIN


def _dict(values: Sequence[Any], out: list[Fragments]) -> Layout | None:
    keys = tuple(values[0])
    if not keys or any(type(key) is not str for key in keys) or set(map(tuple, values)) != {keys}:
        return None
    return ["dict", keys, [encode(list(map(itemgetter(key), values)), out) for key in keys]]


def _row(values: Sequence[Any], out: list[Fragments]) -> Layout | None:
    fields = compat_pyspark.row_fields(values)
    if fields is None or len(set(map(len, values)) | {len(fields)}) > 1:
        return None
    return ["row", fields, [encode(column, out) for column in zip(*values, strict=True)]]


def _array(values: Sequence[Any], out: list[Fragments]) -> Layout | None:
    """Encode NumPy arrays, or NumPy scalars."""
    kinds = set(map(attrgetter("dtype", "shape"), values))
    dtype, shape = next(iter(kinds))
    is_array = isinstance(values[0], np.ndarray)
    if len(kinds) > 1 or dtype.kind not in "?biufcmM" + "SU" * is_array:
        return None
    if values[0].nbytes >= _LARGE:
        out.append([np.ascontiguousarray(value) for value in values])
    else:
        try:
            out.append([b"".join(values)])
        except (BufferError, ValueError, TypeError):  # not contiguous, or dates
            out.append([np.array(values, dtype)])
    return ["array" if is_array else "scalar", dtype.str, shape]


def _special(kind: type) -> Callable[[Sequence[Any], list[Fragments]], Layout | None] | None:
    """Return the encoder of a type that is not in `_ENCODERS`, which has no import of pyspark."""
    if issubclass(kind, np.generic):
        return _array
    types = sys.modules.get("pyspark.sql.types")
    return _row if types is not None and kind is types.Row else None


def _pickled(values: Sequence[Any], kinds: set[type], out: list[Fragments]) -> Layout:
    buffers: list[Fragments] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        """Return True if a buffer is copied into the pickle."""
        raw = buffer.raw()
        if raw.nbytes >= _LARGE:
            buffers.append([raw])
        return raw.nbytes < _LARGE

    names = sorted(kind.__qualname__ for kind in kinds)
    try:
        out.append([pickle.dumps(list(values), 5, buffer_callback=is_small)])
    except Exception as error:
        raise UsageError(
            f"rows of {', '.join(names)} cannot be sent to a node: {error}",
            fix="map them to numbers, arrays, bytes, text or tuples of these before feeding",
        ) from error
    out += buffers
    return ["pickle", names[0] if len(names) == 1 else "several", len(buffers)]


_ENCODERS: dict[type, Callable[[Sequence[Any], list[Fragments]], Layout | None]] = {
    **dict.fromkeys(_NUMBERS, _number),
    bytes: _bytes,
    list: _sequence,
    tuple: _sequence,
    dict: _dict,
    np.ndarray: _array,
}
