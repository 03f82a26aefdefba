"""JSON form of values without code, in which a rank returns its result.

The kernel reads results from other hosts, so they are never unpickled.
"""

from __future__ import annotations

import base64
import math
from typing import Any

from tfd_notebook.errors import UsageError

#: Kinds of NumPy's dtypes that consist of numbers, truth values, text, bytes or times.
_KINDS = "biufcSUmM"
_MAX_DEPTH = 10
#: Largest number of a message between agent and kernel.
_LARGEST_INTEGER = 2**63 - 1


def pack(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON: a number, text, bytes, an array, or a container of them.

    TensorFlow's tensors and variables become NumPy arrays.

    Raises
    ------
    UsageError
        The value, or a part of it, has another type.
    """
    if depth > _MAX_DEPTH:
        raise UsageError(f"the result has more than {_MAX_DEPTH} levels")
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if abs(value) <= _LARGEST_INTEGER else {"int": str(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) is list:
        return [pack(item, depth + 1) for item in value]
    if type(value) in (tuple, set, frozenset):
        return {type(value).__name__: [pack(item, depth + 1) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[pack(k, depth + 1), pack(v, depth + 1)] for k, v in value.items()]}
    if hasattr(value, "numpy"):
        value = value.numpy()
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        if value.dtype.kind == "O" and value.ndim == 0:  # a tensor of text
            return pack(value.item(), depth + 1)
        if value.dtype.kind == "O":
            return pack(value.tolist(), depth + 1)
        if value.dtype.kind in _KINDS:
            data = base64.b64encode(value.tobytes()).decode()
            return {"array": [value.dtype.str, list(value.shape), data]}
    raise UsageError(
        f"a result of type {type(value).__name__} cannot be returned",
        fix="return numbers, text, arrays, or lists and dicts of them; write models to files",
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
    if np.dtype(dtype).kind not in _KINDS:
        raise ValueError(f"invalid dtype {dtype!r}")
    array = np.frombuffer(base64.b64decode(data, validate=True), dtype)
    array = array.reshape([int(size) for size in shape])
    return array.copy() if array.ndim else array[()]
