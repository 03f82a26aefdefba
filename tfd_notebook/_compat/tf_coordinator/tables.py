"""Lookup tables of this process, which a connection to a cluster deletes, and loaded models.

A connection replaces the devices of the process. Resources with a name, such as lookup tables, are
lost with them. Resources of variables, iterators and generators belong to their handles and stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import gen_lookup_ops
from tensorflow.python.trackable import autotrackable, resource

from tfd_notebook.errors import StateError

_ANONYMOUS = 'container="Anonymous"'
_TABLE = 'type="tensorflow::lookup::LookupInterface"'


@dataclasses.dataclass
class _Content:
    """A table, and its keys and values if it has any."""

    owner: Any
    handle: Any
    items: tuple[Any, Any] | None

    def restore(self) -> None:
        """Create the table again under its name, so that its handles are valid again."""
        with tf.device(self.handle.device):
            handle = self.owner._create_resource()
            if self.items is not None:
                gen_lookup_ops.lookup_table_import_v2(handle, *self.items)


@contextlib.contextmanager
def kept(job: str) -> Iterator[None]:
    """Keep the tables of this process while a connection replaces the devices of job `job`.

    Raises
    ------
    StateError
        A resource cannot be created again. The error names it. Nothing has changed.
    """
    contents = read(job)
    try:
        yield
    finally:
        with tf.init_scope():
            for content in contents:
                content.restore()  # a table that still exists has the same content afterwards


def read(job: str, name_of: Callable[[Any], str] = lambda owner: "") -> list[_Content]:
    """Return the tables on the devices of `job` that are found by a name, with their content.

    `name_of` returns the user's name of an object, or an empty string.

    Raises
    ------
    StateError
        A resource cannot be created again under its name.
    """
    with contextlib.suppress(StateError):
        return _read_all(job, name_of)
    gc.collect()  # the object may be unreachable
    return _read_all(job, name_of)


def loaded_with_variables() -> list[Any]:
    """Return the objects of ``tf.saved_model.load`` whose variables workers cannot use."""
    loaded = (
        each
        for each in gc.get_objects()
        if issubclass(type(each), autotrackable.AutoTrackable) and "graph_debug_info" in vars(each)
    )
    return [
        each
        for each in loaded
        if any(isinstance(part, tf.Variable) for part in tf.train.TrackableView(each).descendants())
    ]


def _read_all(job: str, name_of: Callable[[Any], str]) -> list[_Content]:
    contents = []
    with tf.init_scope():
        for owner, handle in _named_resources(f"/job:{job}/"):
            try:
                contents.append(_read(owner, handle))
            except Exception as error:
                kind, name = type(owner).__name__, name_of(owner)
                raise StateError(
                    f"connecting failed: it deletes {f'{name!r}, a' if name else 'a'} {kind} of "
                    f"this process, which cannot be created again: {error}",
                    fix="delete it, or restart the kernel and create it after the connection",
                ) from error
    return contents


def _named_resources(prefix: str) -> Iterator[tuple[Any, Any]]:
    """Yield the owners and the handles of named resources on devices with a prefix."""
    for owner in gc.get_objects():
        # isinstance() would call __class__ of the user's proxies.
        if not issubclass(type(owner), resource.CapturableResource):
            continue
        handle = getattr(owner, "_resource_handle_value", None)
        if not isinstance(handle, ops.EagerTensor) or handle.dtype != tf.resource:
            continue
        if handle.device.startswith(prefix) and _ANONYMOUS not in repr(handle):
            yield owner, handle


def _read(owner: Any, handle: Any) -> _Content:
    if _TABLE not in repr(handle):
        raise ValueError("it is not a table")
    with tf.device(handle.device):
        if repr(owner._create_resource()) != repr(handle):
            raise ValueError("TensorFlow would give it another name")
    if not int(gen_lookup_ops.lookup_table_size_v2(handle)):
        return _Content(owner, handle, None)  # an uninitialized table has no export
    items = gen_lookup_ops.lookup_table_export_v2(handle, *_dtypes(owner))
    return _Content(owner, handle, tuple(items))


def _dtypes(owner: Any) -> tuple[Any, Any]:
    """Return the types of a table's keys and values."""
    if hasattr(owner, "key_dtype"):
        return owner.key_dtype, owner.value_dtype
    # A table of a SavedModel: its types are only in the function that creates it.
    for function in owner._create_resource.concrete_functions:
        for operation in function.graph.get_operations():
            if "key_dtype" in operation.node_def.attr:
                return operation.get_attr("key_dtype"), operation.get_attr("value_dtype")
    raise ValueError("the types of its keys and values are unknown")
