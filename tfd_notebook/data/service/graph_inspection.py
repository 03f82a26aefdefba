"""Inspection of a dataset's graph before it is sent to the data workers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tfd_notebook._compat.tf_data import graph
from tfd_notebook._compat.tf_data.pipeline_model import stages_of
from tfd_notebook.data.service.py_functions import find_functions
from tfd_notebook.data.service.semantics import Semantics
from tfd_notebook.errors import NotSerializable

#: Bytes. TensorFlow aborts the process when a definition reaches 2 GB, including some kilobytes
#: that it adds.
LARGEST = (1 << 31) - (1 << 20)

# A pipeline of these ops produces exactly one element for each element of its source.
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

# Each process creates its own handles of these.
_OWN_RESOURCES = (
    "CacheDataset",
    "GlobalShuffleDataset",
    "ShuffleAndRepeatDataset",
    "ShuffleDataset",
)
_RESOURCES = {
    "IteratorResource": "an iterator",
    "LookupInterface": "a lookup table that can change",
    "Var": "a variable",
}


@dataclass(frozen=True)
class Pipeline:
    """Properties of a dataset that matter to the data workers.

    Parameters
    ----------
    size : int
        Size of its definition in bytes.
    tokens : tuple of str
        Tokens of its Python functions.
    resources : tuple of str
        Kinds of objects in this process that it refers to, which other processes cannot access.
    reads_service : bool
        Whether it reads a tf.data service.
    keeps_count : bool
        Whether splitting its source by elements keeps the number of its elements.
    semantics : Semantics
        The changes that a service makes to its elements.
    """

    size: int
    tokens: tuple[str, ...]
    resources: tuple[str, ...]
    reads_service: bool
    keeps_count: bool
    semantics: Semantics


def definition_of(dataset: Any) -> Any:
    """Return the ``GraphDef`` of a ``tf.data.Dataset``.

    Raises
    ------
    NotSerializable
        TensorFlow cannot turn it into a graph, or the graph is too large to be sent.
    """
    import tensorflow as tf

    # Check this first: TensorFlow would copy the tensors several times before it rejects them.
    if (held := graph.constant_bytes(dataset)) > LARGEST:
        raise _too_large(held)
    try:
        serialized = graph.serialized(dataset)
    except (tf.errors.OpError, ValueError, TypeError, RuntimeError) as error:
        message = str(getattr(error, "message", error))
        if missing := re.search(r"Resource \S+ does not exist", message):
            raise NotSerializable(
                f"a table, or another resource, that the dataset uses was deleted ({missing[0]})",
                fix="create the resource and the dataset again",
            ) from error
        raise NotSerializable(
            f"TensorFlow cannot turn the dataset into a graph: {message}",
            fix="create the dataset only from files, tensors and functions",
        ) from error
    if not 0 < len(serialized) <= LARGEST:
        raise _too_large(len(serialized))
    return tf.compat.v1.GraphDef.FromString(serialized)


def examine(dataset: Any) -> Pipeline:
    """Return the properties of a ``tf.data.Dataset``.

    Raises
    ------
    NotSerializable
        As in `definition_of`.
    """
    import tensorflow as tf

    sent = definition_of(dataset)
    graph_def = graph.expanded(sent)
    semantics = Semantics(
        graph_def, stages_of(dataset, keep=False), dataset.options().deterministic is not False
    )
    ops = semantics.ops
    return Pipeline(
        size=sent.ByteSize(),
        tokens=tuple(find_functions(graph_def)),
        resources=tuple(_resources(graph_def, tf)),
        reads_service=reads_service(graph_def),
        keeps_count=sum(op in _SOURCES for op in ops) == 1
        and all(op in _SOURCES or op in _ONE_TO_ONE for op in ops),
        semantics=semantics,
    )


def reads_service(definition: Any) -> bool:
    """Return True if a graph, or a function of it, reads a tf.data service."""
    bodies = [definition.node, *(each.node_def for each in definition.library.function)]
    return any(node.op.startswith("DataServiceDataset") for body in bodies for node in body)


def _too_large(size: int) -> NotSerializable:
    """Return the error for a definition of `size` bytes, or of unknown size if 0."""
    return NotSerializable(
        f"the dataset's definition contains the data and has "
        f"{f'{size / 1e9:.1f}' if size else 'more than 2'} GB, "
        f"TensorFlow can send at most {LARGEST / 1e9:.1f} GB",
        fix="write the data to files and read those (tf.data.TFRecordDataset, "
        "Dataset.save and Dataset.load), or use np.load inside the pipeline",
    )


def _resources(graph_def: Any, tf: Any) -> dict[str, None]:
    """Return the kinds of the resource handles that the graph has as constants."""
    used = {
        name
        for node in graph_def.node
        if not node.op.startswith(_OWN_RESOURCES)
        for name in node.input
    }
    result: dict[str, None] = {}
    for node in graph_def.node:
        kind = node.attr["dtype"].type
        if node.op == "Const" and kind == tf.resource.as_datatype_enum and node.name in used:
            for handle in node.attr["value"].tensor.resource_handle_val:
                # Mangled name of a C++ class, such as N10tensorflow6lookup15LookupInterfaceE.
                names = re.findall(r"\d+([A-Za-z_]+?)(?=\d|E$)", handle.maybe_type_name)
                name = names[-1] if names else handle.name
                result[_RESOURCES.get(name, f"a {name}")] = None
    return result
