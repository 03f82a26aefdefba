"""Numbers that functions compute from the shapes of batches and from constants.

Examples are the new shape of a ``tf.reshape``, and the axes of a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

#: A prime number that stands for the number of rows of a batch.
ROWS = (1 << 31) - 1
#: Numbers that stand for the counter of a loop, and for the numbers of all rows in their order.
COUNTER, EACH_ROW = -(1 << 40) - 15, -(1 << 41) - 21
#: Length above which numbers are data.
_LENGTH = 100


def numbers_of(node: Any, values: Sequence[Any]) -> Any:
    """Return the numbers that an op computes, with NaN for unknown ones. None if all are unknown.

    Parameters
    ----------
    node : tf.compat.v1.NodeDef
    values : sequence of numpy.ndarray or None
        The numbers of its inputs.
    """
    if node.op == "Const":
        return _constant(node)
    if node.op == "SelectV2" and is_number(values[1], EACH_ROW) and is_number(values[2], 0):
        return values[1]  # as tf.vectorized_map does for a batch of one row
    if node.op == "Pack":
        unknown = next((value * np.nan for value in values if value is not None), None)
        values = [unknown if value is None else value for value in values]
    if node.op not in _OPS or not values or any(value is None for value in values):
        return None
    try:
        return _OPS[node.op](node, *values)
    except (IndexError, OverflowError, ValueError):  # of an unknown number
        return None


def parts_of(value: Any, sizes: Any, axis: Any) -> list[Any]:
    """Return the parts into which ``tf.split`` divides numbers, None for those that are unknown."""
    count = 0 if sizes is None else len(sizes)
    if value is None or value.ndim != 1 or sizes is None or not (sizes >= 0).all():
        return [None] * count
    return np.split(value, np.cumsum(sizes).astype(int)[:-1])


def axes_of_ellipsis(terms: str, shapes: Sequence[Any]) -> int:
    """Return the number of axes of the ellipsis of an einsum, and 0 if it differs or is unknown."""
    found = {
        0 if shape is None else len(shape) - len(term.replace("...", ""))
        for term, shape in zip(terms.split(","), shapes, strict=True)
        if "..." in term
    }
    return found.pop() if len(found) == 1 else 0


def joins_bits(node: Any) -> bool:
    """Return True if a ``tf.bitcast`` has larger elements as its result."""
    import tensorflow as tf

    before, after = (tf.as_dtype(node.attr[name].type).size for name in ("T", "type"))
    return bool(after > before)


def is_number(value: Any, number: int) -> bool:
    """Return True if `value` consists of one number."""
    return value is not None and value.size == 1 and bool(value.ravel()[0] == number)


def _constant(node: Any) -> Any:
    import tensorflow as tf

    value = tf.make_ndarray(node.attr["value"].tensor)
    return value.astype(float) if value.dtype.kind in "biuf" and value.size < _LENGTH else None


def _part(node: Any, value: Any, *others: Any) -> Any:
    masks = {name: node.attr[f"{name}_mask"].i for name in ("begin", "end", "ellipsis", "new_axis")}
    if value.ndim != 1 or masks["ellipsis"] or masks["new_axis"]:
        return None
    begin, end, step = (int(other.item()) for other in others)
    if node.attr["shrink_axis_mask"].i:
        return value[begin]
    return value[slice(None if masks["begin"] else begin, None if masks["end"] else end, step)]


def _range(_: Any, start: Any, end: Any, step: Any) -> Any:
    if (start, end, step) == (0, ROWS, 1):
        return np.array(float(EACH_ROW))
    return np.arange(start, end, step) if abs(end - start) < _LENGTH else None


def _of_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of numbers that do not include the number of rows."""
    return lambda _, a, b: np.where((abs(a) < ROWS) & (abs(b) < ROWS), function(a, b), np.nan)


def _is_at_least(_: Any, first: Any, second: Any) -> Any:
    """Compare numbers other than the number of rows."""
    is_known = (abs(first) < _LENGTH).all() and (abs(second) < _LENGTH).all()
    return (first >= second) * 1.0 if is_known else None


#: The values of ops. `ROWS` passes those that are right for each number of rows.
_OPS: Mapping[str, Callable[..., Any]] = {
    "Add": lambda _, a, b: a + b,
    "AddV2": lambda _, a, b: a + b,
    "Cast": lambda _, a: np.where(a == np.trunc(a), a, np.nan),
    "ConcatV2": lambda _, *parts: np.concatenate(parts[:-1]),
    "ExpandDims": lambda _, a, axis: np.expand_dims(a, int(axis.item())),
    "Fill": lambda _, sizes, a: np.full(sizes.astype(int), a) if sizes.prod() < _LENGTH else None,
    "FloorDiv": _of_sizes(np.floor_divide),
    "GatherV2": lambda _, a, numbers, __: a[numbers.astype(int)],
    "GreaterEqual": _is_at_least,
    "Identity": lambda _, a: a,
    "Max": lambda _, a, __: a.reshape(()),  # of one number
    "Maximum": _of_sizes(np.maximum),
    "Minimum": _of_sizes(np.minimum),
    "Mul": lambda _, a, b: a * b,
    "Pack": lambda _, *parts: np.stack(parts),
    "Prod": lambda node, a, axes: (
        a.prod(keepdims=node.attr["keep_dims"].b) if a.ndim == axes.size == 1 else None
    ),
    "Range": _range,
    "Reshape": lambda _, a, shape: a.reshape(shape.astype(int)),
    "SelectV2": lambda _, a, b, c: np.where(a, b, c) if (a == a).all() else None,
    "Squeeze": lambda _, a: a.squeeze(),
    "StridedSlice": _part,
    "Sub": lambda _, a, b: a - b,
}
