"""JSON form of values without code, in which a rank returns its result.

The kernel reads results from other hosts, so they are never unpickled.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections.abc import Iterable
from typing import Any

from tfd_notebook.errors import UsageError

#: Limit of a result in characters of JSON.
MAX_CHARACTERS = 8_000_000
#: Kinds of NumPy's dtypes that consist of numbers, truth values, text, bytes or times.
_KINDS = "biufcSUmM"
#: One such dtype. NumPy evaluates parts of other strings as Python.
_DTYPE = re.compile(rf"[<>|=][{_KINDS}][0-9]{{1,9}}(?:\[[0-9]{{0,9}}[a-zA-Z]{{1,2}}\])?")
_MAX_DEPTH = 10
#: Largest number of a message between agent and kernel.
_LARGEST_INTEGER = 2**63 - 1


def pack(value: Any, limit: int = MAX_CHARACTERS) -> Any:
    """Return a value as JSON: a number, text, bytes, an array, or a container of them.

    TensorFlow's tensors and variables become NumPy arrays.

    Parameters
    ----------
    value : object
    limit : int
        Largest number of characters of the JSON text. Default 8,000,000.

    Raises
    ------
    UsageError
        The value, or a part of it, has another type, or the value is too large.
    """
    packed = _Packer(limit).pack(value)
    if (size := len(json.dumps(packed))) > limit:
        raise _too_large(f"{size / 1e6:.0f}", limit)
    return packed


class _Packer:
    """The conversion of one value, which ends before it copies more data than the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0

    def pack(self, value: Any, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            raise UsageError(f"the result has more than {_MAX_DEPTH} levels")
        self._add(1)
        if value is None or type(value) is bool:
            return value
        if type(value) is str:
            self._add(len(value))
            return value
        if type(value) is int:
            return value if abs(value) <= _LARGEST_INTEGER else {"int": str(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, (bytes, bytearray)):
            self._add_encoded(len(value))
            return {"bytes": base64.b64encode(value).decode()}
        if type(value) is list:
            return self._items(value, depth)
        if type(value) in (tuple, set, frozenset):
            return {type(value).__name__: self._items(value, depth)}
        if isinstance(value, dict):
            return {"dict": [self._items(item, depth) for item in value.items()]}
        if hasattr(value, "numpy"):
            value = value.numpy()
        if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
            if value.dtype.kind == "O" and value.ndim == 0:  # a tensor of text
                return self.pack(value.item(), depth + 1)
            if value.dtype.kind == "O":
                self._add(value.size)
                return self.pack(value.tolist(), depth + 1)
            if value.dtype.kind in _KINDS:
                self._add_encoded(value.nbytes)
                data = base64.b64encode(value.tobytes()).decode()
                return {"array": [value.dtype.str, list(value.shape), data]}
        raise UsageError(
            f"a result of type {type(value).__name__} cannot be returned",
            fix="return numbers, text, arrays, or lists and dicts of them; write models to files",
        )

    def _items(self, values: Iterable[Any], depth: int) -> list[Any]:
        return [self.pack(item, depth + 1) for item in values]

    def _add_encoded(self, size: int) -> None:
        """Count `size` bytes in base64."""
        self._add(size * 4 // 3)

    def _add(self, size: int) -> None:
        """Count characters of the text; raise an error above the limit."""
        self._size += size
        if self._size > self._limit:
            raise _too_large(f"at least {self._size / 1e6:.0f}", self._limit)


def _too_large(megabytes: str, limit: int) -> UsageError:
    return UsageError(
        f"the result has {megabytes} MB, the limit is {limit / 1e6:g} MB",
        fix="write it to a file, and return the path",
    )


def unpack(value: Any) -> Any:
    """Return the value that `pack` converted.

    Raises
    ------
    ValueError
        The JSON value has another form.
    """
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in ("float", "int"):
        return {"float": float, "int": int}[kind](content)
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in content}
    if kind in ("tuple", "set", "frozenset"):
        items = unpack(list(content))
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
    if kind != "array":
        raise ValueError(f"unknown kind {kind!r}")
    import numpy as np

    dtype, shape, data = content
    if not _DTYPE.fullmatch(dtype):
        raise ValueError("invalid dtype")
    array = np.frombuffer(base64.b64decode(data, validate=True), dtype)
    if array.dtype.kind == "U" and (array.view(f"{dtype[0]}u4") > sys.maxunicode).any():
        raise ValueError("invalid text")  # its use would raise SystemError
    array = array.reshape([int(size) for size in shape])
    return array.copy() if array.ndim else array[()]
