"""The types of a dataset's elements, as TensorFlow's tf.data service sends them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def parts_of(element_spec: Any) -> Iterator[Any]:
    """Yield the ``tf.TypeSpec`` of each part of an element, and of the values of optionals."""
    import tensorflow as tf

    for spec in tf.nest.flatten(element_spec):
        yield spec
        if isinstance(spec, tf.OptionalSpec):
            yield from parts_of(getattr(spec, "_element_spec", ()))


def is_one_variant(element_spec: Any) -> bool:
    """Return True if an element is a single variant tensor, which may be a scalar.

    TensorFlow's gRPC transfer expects that such a tensor is a compressed element. The shape of
    ragged tensors is not known before they are read, because a batch of them is a vector.
    """
    import tensorflow as tf
    from tensorflow.python.data.util import structure

    if structure.get_flat_tensor_types(element_spec) != [tf.variant]:
        return False
    # The specification does not contain their shape: 3 variants for each tensor.
    if any(isinstance(spec, tf.SparseTensorSpec) for spec in tf.nest.flatten(element_spec)):
        return False
    return bool(structure.get_flat_tensor_shapes(element_spec)[0].is_compatible_with(()))


def to_tensors(element_spec: Any, element: Any) -> list[Any]:
    """Return the tensors of an element, as TensorFlow gives them to a function."""
    from tensorflow.python.data.util import structure

    return list(structure.to_tensor_list(element_spec, element))


def from_tensors(element_spec: Any, tensors: list[Any]) -> Any:
    """Return the element with the given tensors."""
    from tensorflow.python.data.util import structure

    return structure.from_compatible_tensor_list(element_spec, tensors)


def map_tensors(dataset: Any, tensors: list[Any]) -> list[Any]:
    """Return the tensors that the function of a ``map`` computes from those of an element."""
    (wrapper,) = dataset._functions()
    return list(wrapper.function(*tensors))


def can_be_batched(element_spec: Any) -> bool:
    """Return True if ``tf.data.Dataset.batch`` accepts such elements."""
    import tensorflow as tf

    return all(hasattr(spec, "_batch") for spec in tf.nest.flatten(element_spec))


def static_bytes(element_spec: Any) -> int | None:
    """Return the bytes of each element. None if they vary or are unknown."""
    import tensorflow as tf

    total = 0
    for tensor in tf.nest.flatten(element_spec, expand_composites=True):
        items = tensor.shape.num_elements()
        if items is None or not tensor.dtype.size:  # a string or a variant
            return None
        total += items * tensor.dtype.size
    return total


def encoding_error() -> type[Exception]:
    """Return the class of the error for a specification that TensorFlow cannot encode."""
    from tensorflow.python.saved_model import nested_structure_coder

    error: type[Exception] = nested_structure_coder.NotEncodableError
    return error
