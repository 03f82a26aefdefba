"""The transfer of elements, which depends on their types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfd_notebook._compat.tf_data.elements import is_one_variant, parts_of
from tfd_notebook.errors import NotSerializable, UnknownName, UsageError

_COMPRESSIONS = ("auto", "AUTO", "snappy", "SNAPPY", None)


def check_compression(compression: Any) -> None:
    """Raise UnknownName for an invalid `compression`."""
    if compression not in _COMPRESSIONS:
        raise UnknownName(
            f"invalid compression={compression!r}", fix='use "auto", "AUTO", "snappy" or None'
        )


def check_datasets(element_spec: Any) -> None:
    """Raise NotSerializable for elements that contain datasets, which TensorFlow cannot encode."""
    import tensorflow as tf

    if any(isinstance(spec, tf.data.DatasetSpec) for spec in parts_of(element_spec)):
        raise NotSerializable(
            "the dataset's elements are datasets, which cannot be sent",
            fix="flatten them first: .flat_map(lambda window: window.batch(size))",
        )


@dataclass(frozen=True)
class Transfer:
    """The transfer of elements of a type.

    Parameters
    ----------
    compression : {"AUTO", "SNAPPY", None}
        TensorFlow's value of ``compression``.
    optional : bool
        Whether TensorFlow can also send them without compression.
    """

    compression: str | None
    optional: bool

    @property
    def compressed_by_choice(self) -> bool:
        """True if elements are compressed, or TensorFlow may choose so, without need."""
        return self.optional and self.compression is not None


def transfer_of(
    compression: str | None, element_spec: Any, on_this_host: bool, by_reference: bool
) -> Transfer:
    """Return the transfer of elements with the user's `compression`.

    Parameters
    ----------
    compression : {"auto", "AUTO", "snappy", "SNAPPY", None}
        ``"auto"`` compresses between hosts, and elements that can only be sent compressed.
    element_spec : nested structure of tf.TypeSpec
    on_this_host : bool
        Whether the data workers run on this host.
    by_reference : bool
        Whether the elements stay in the memory of this process.

    Raises
    ------
    NotSerializable
        TensorFlow cannot send such elements.
    UsageError
        TensorFlow cannot send them with this compression.
    """
    if not by_reference:
        check_datasets(element_spec)
    plain = uncompressible(element_spec)
    optional = by_reference or not is_one_variant(element_spec)
    if plain is not None and not optional:
        raise NotSerializable(
            f"the dataset's elements are single rows of type {plain}, which cannot be sent",
            fix="turn them into tensors first: .map(lambda row: row)",
        )
    fix = 'omit compression=, or use "auto"'
    if compression is None and not optional:
        raise UsageError(
            f"invalid compression=None: elements of type {element_spec} need compression", fix=fix
        )
    if compression not in ("auto", None) and plain is not None:
        raise UsageError(
            f"invalid compression={compression!r}: elements of type {plain} cannot be compressed",
            fix=fix,
        )
    if compression == "auto":
        unneeded = plain is not None or (optional and on_this_host)
        return Transfer(None if unneeded else "AUTO", optional)
    return Transfer(compression.upper() if compression else None, optional)


def uncompressible(element_spec: Any) -> Any:
    """Return the ``tf.TypeSpec`` of the first part that cannot be compressed, or None.

    TensorFlow cannot encode a dataset. It compresses a row of a ragged tensor as a tensor, but
    expects a variant when it decompresses.
    """
    import tensorflow as tf

    for spec in parts_of(element_spec):
        row = isinstance(spec, tf.RaggedTensorSpec) and not spec.ragged_rank
        if row or isinstance(spec, tf.data.DatasetSpec):
            return spec
    return None
