"""What the graph of a dataset tells before it is sent to the data workers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tfd_notebook._compat.tf_data import graph
from tfd_notebook.data.service.py_functions import find_functions
from tfd_notebook.errors import NotSerializable

#: Bytes; TensorFlow ends the whole process when a definition reaches 2 GB, which includes some
#: kilobytes that it adds itself.
LARGEST = (1 << 31) - (1 << 20)

# With these alone, each element of the source makes exactly one element at the end.
_SOURCES = frozenset(("RangeDataset", "TensorSliceDataset"))
_ONE_TO_ONE = frozenset(
    (
        "MapDataset",
        "ModelDataset",
        "OptionsDataset",
        "ParallelMapDataset",
        "ParallelMapDatasetV2",
        "PrefetchDataset",
        "ShuffleDataset",
        "ShuffleDatasetV2",
        "ShuffleDatasetV3",
    )
)
_SHARD_HINT = -1

# Their handles are made anew in each process.
_OWN_RESOURCES = ("ShuffleDataset", "ShuffleAndRepeatDataset", "CacheDataset")
_RESOURCES = {
    "IteratorResource": "an iterator",
    "LookupInterface": "a lookup table that can change",
    "Var": "a variable",
}


@dataclass(frozen=True)
class Pipeline:
    """A dataset as the data workers will see it.

    Parameters
    ----------
    size : int
        Bytes of its definition.
    tokens : tuple of str
        Tokens of its Python functions.
    resources : tuple of str
        Kinds of objects of this process that it refers to, and that no other process can reach.
    has_shard_hint : bool
        Whether it has a ``shard(SHARD_HINT, SHARD_HINT)``.
    keeps_count : bool
        Whether splitting its source by elements leaves the number of its elements as it is.
    """

    size: int
    tokens: tuple[str, ...]
    resources: tuple[str, ...]
    has_shard_hint: bool
    keeps_count: bool


def examine(dataset: Any) -> Pipeline:
    """Return what there is to know about a ``tf.data.Dataset``.

    Raises
    ------
    NotSerializable
        TensorFlow cannot turn it into a graph, or the graph is too large to be sent.
    """
    import tensorflow as tf

    # TensorFlow would copy the tensors several times before it finds that they are too large.
    if (held := graph.constant_bytes(dataset)) > LARGEST:
        raise _too_large(held)
    try:
        serialized = graph.serialized(dataset)
    except (tf.errors.OpError, ValueError, TypeError, RuntimeError) as error:
        raise NotSerializable(
            f"TensorFlow cannot turn the dataset into a graph: {getattr(error, 'message', error)}",
            fix="make the dataset from files, tensors and functions alone",
        ) from error
    if not 0 < len(serialized) <= LARGEST:
        raise _too_large(len(serialized))
    graph_def = tf.compat.v1.GraphDef.FromString(serialized)
    ops = [node.op for node in graph_def.node if "Dataset" in node.op]
    return Pipeline(
        size=len(serialized),
        tokens=tuple(find_functions(graph_def)),
        resources=tuple(_resources(graph_def, tf)),
        has_shard_hint=any(_hints(body, tf) for body in _bodies(graph_def)),
        keeps_count=sum(op in _SOURCES for op in ops) == 1
        and all(op in _SOURCES or op in _ONE_TO_ONE for op in ops),
    )


def _too_large(size: int) -> NotSerializable:
    """Return the error for a definition of `size` bytes, 0 if they are not known."""
    return NotSerializable(
        f"the dataset's definition has {f'{size / 1e9:.1f}' if size else 'more than 2'} GB, "
        f"TensorFlow can send at most {LARGEST / 1e9:.1f} GB: the data itself is part of it",
        fix="write the data to files and read those (tf.data.TFRecordDataset, "
        "Dataset.save and Dataset.load), or np.load it inside the pipeline",
    )


def _bodies(graph_def: Any) -> Iterator[Any]:
    yield graph_def.node
    for function in graph_def.library.function:
        yield function.node_def


def _resources(graph_def: Any, tf: Any) -> dict[str, None]:
    """Return the kinds of the handles that the graph holds as constants for its functions."""
    used = {
        name
        for node in graph_def.node
        if not node.op.startswith(_OWN_RESOURCES)
        for name in node.input
    }
    found: dict[str, None] = {}
    for node in graph_def.node:
        kind = node.attr["dtype"].type
        if node.op == "Const" and kind == tf.resource.as_datatype_enum and node.name in used:
            for handle in node.attr["value"].tensor.resource_handle_val:
                # A C++ class as compilers write it: N10tensorflow6lookup15LookupInterfaceE
                names = re.findall(r"\d+([A-Za-z_]+?)(?=\d|E$)", handle.maybe_type_name)
                name = names[-1] if names else handle.name
                found[_RESOURCES.get(name, f"a {name}")] = None
    return found


def _hints(body: Any, tf: Any) -> bool:
    shards = {
        name.split(":")[0] for node in body if node.op == "ShardDataset" for name in node.input[1:2]
    }
    return any(
        tf.make_ndarray(node.attr["value"].tensor).item() == _SHARD_HINT
        for node in body
        if node.op == "Const" and node.name in shards
    )
