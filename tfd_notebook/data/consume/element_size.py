"""Bytes of the elements of a dataset, in the memory of their consumer."""

from __future__ import annotations

from typing import Any

#: Bytes of a string in TensorFlow, without its characters.
_STRING_BYTES = 24


def element_bytes(element: Any) -> int | None:
    """Return the bytes of `element`. None if it contains a dataset or another opaque variant."""
    import tensorflow as tf

    sizes = [_part_bytes(tf, part) for part in tf.nest.flatten(element)]
    return None if None in sizes else sum(sizes)


def _part_bytes(tf: Any, part: Any) -> Any:
    if isinstance(part, tf.Tensor):
        items = part.shape.num_elements()
        if part.dtype == tf.string:
            # The op does not copy the characters.
            lengths = tf.raw_ops.StringLength(input=part).numpy()
            return _STRING_BYTES * items + int(lengths.sum(dtype="int64"))
        return items * part.dtype.size if part.dtype.size else None
    if isinstance(part, tf.experimental.Optional):
        return element_bytes(part.get_value()) if part.has_value() else 0
    if isinstance(part, tf.TensorArray):
        return sum(element_bytes(part.read(index)) or 0 for index in range(int(part.size())))
    if part is None:
        return 0
    tensors = tf.nest.flatten(part, expand_composites=True)
    return None if any(tensor is part for tensor in tensors) else element_bytes(tensors)
