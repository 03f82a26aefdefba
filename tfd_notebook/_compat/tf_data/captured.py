"""Variables and lookup tables of this process that the functions of a dataset use."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Bytes of a variable and entries of a table above which they are not read.
MOST_BYTES, MOST_ENTRIES = 16_000_000, 20_000
#: Attributes of lookup ops with the types of their keys and values.
_TABLE_TYPES = (("Tin", "Tout"), ("Tkeys", "Tvalues"))


@dataclass(frozen=True, eq=False)
class Resource:
    """A variable or table. Does not keep it in memory.

    Parameters
    ----------
    kind : {"variable", "table"}
    name : str
        TensorFlow's name of a variable. Empty for a table.
    handle : weakref.ref of tf.Tensor
    types : tuple of pairs of tf.DType
        The possible types of the keys and values of a table.
    """

    kind: str
    name: str
    handle: weakref.ref[Any]
    types: tuple[tuple[Any, Any], ...] = ()

    def is_held_by(self, value: object) -> bool:
        """Return True if `value` is the variable's or table's object."""
        import tensorflow as tf

        handle = self.handle()
        if handle is None:
            return False
        if isinstance(value, tf.Variable):
            return getattr(value, "handle", None) is handle
        tables = (tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)
        return isinstance(value, tables) and value.resource_handle is handle

    @property
    def can_change(self) -> bool:
        """False for a table with constant entries, such as a ``tf.lookup.StaticHashTable``."""
        import tensorflow as tf

        handle = self.handle()
        for keys, values in self.types if handle is not None else ():
            try:
                with tf.init_scope():  # an insertion of no entry
                    tf.raw_ops.LookupTableInsertV2(
                        table_handle=handle, keys=tf.zeros([0], keys), values=tf.zeros([0], values)
                    )
            except tf.errors.UnimplementedError:
                return False
            except tf.errors.OpError:  # other types, or deleted
                continue
        return True

    def fingerprint(self) -> tuple[int, ...] | None:
        """Return numbers that differ if the content differs.

        None if it is too large, was deleted or cannot be read.
        """
        import tensorflow as tf

        handle = self.handle()
        if handle is None:
            return None
        try:
            with tf.init_scope():
                return _variable(handle) if self.kind == "variable" else self._table(handle)
        except tf.errors.OpError:  # it was deleted
            return None

    def _table(self, handle: Any) -> tuple[int, ...] | None:
        import numpy as np
        import tensorflow as tf

        if int(tf.raw_ops.LookupTableSizeV2(table_handle=handle)) > MOST_ENTRIES:
            return None
        for keys, values in self.types:
            try:
                exported = tf.raw_ops.LookupTableExportV2(
                    table_handle=handle, Tkeys=keys, Tvalues=values
                )
            except tf.errors.InvalidArgumentError:  # the types of another table
                continue
            found, contents = exported.keys.numpy(), exported.values.numpy()
            if max(found.nbytes, contents.nbytes) > MOST_BYTES:
                return None
            count = len(found)
            # A key can be a vector. TensorFlow returns the entries in any order.
            order = np.lexsort(found.reshape(count, -1).T[::-1]) if count else slice(0)
            return count, _checksum(found[order]), _checksum(contents[order])
        return None


def _variable(handle: Any) -> tuple[int, ...] | None:
    import tensorflow as tf

    dtype = tf.as_dtype(handle._handle_data.shape_and_type[0].dtype)
    count = int(tf.reduce_prod(tf.raw_ops.VariableShape(input=handle, out_type=tf.int64)))
    if count * max(1, dtype.size or 0) > MOST_BYTES:
        return None
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    return (*value.shape, _checksum(value.numpy()))


def _checksum(array: Any) -> int:
    if array.dtype != object:
        return zlib.crc32(array.tobytes())
    checksum = 0
    for text in array.ravel():
        checksum = zlib.crc32(text, zlib.crc32(b"%d:" % len(text), checksum))
    return checksum


def resources_of(dataset: Any) -> Iterator[Resource]:
    """Yield the variables and tables that the functions of one stage of a pipeline use."""
    import tensorflow as tf

    for wrapper in dataset._functions():
        function = wrapper.function
        names = {id(each.handle): each.name for each in getattr(function.graph, "variables", ())}
        types = tuple(dict.fromkeys(_table_types(function.graph, set())))
        for handle in getattr(function, "captured_inputs", ()):
            if handle.dtype != tf.resource or not hasattr(handle, "numpy"):
                continue
            described = getattr(handle, "_handle_data", None)
            if described is not None and described.is_set:
                name = names.get(id(handle), "").partition(":")[0]
                yield Resource("variable", name, weakref.ref(handle))
            elif types:
                yield Resource("table", "", weakref.ref(handle), types)


def _table_types(graph: Any, visited: set[int]) -> Iterator[tuple[Any, Any]]:
    """Yield the types of keys and values of the lookups in a function and those that it calls."""
    if id(graph) in visited:
        return
    visited.add(id(graph))
    for op in graph.get_operations():
        if op.type.startswith("LookupTable"):
            for pair in _TABLE_TYPES:
                if all(name in op.node_def.attr for name in pair):
                    keys, values = map(op.get_attr, pair)
                    yield keys, values
    for called in graph._functions.values():
        if hasattr(called, "graph"):
            yield from _table_types(called.graph, visited)
