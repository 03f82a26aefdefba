"""Changes to a pipeline that are tried by rewriting its graph, without the user's code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook._compat.tf_data import graph
from tfd_notebook._compat.tf_data.pipeline_model import Stage, nodes_of, stages_of

_AUTOTUNE = -1
#: Bytes of a graph above which it contains the data, so that copies cost too much.
_LARGEST = 50_000_000

#: Receives a graph and the name of the node to change.
_Change = Callable[[Any, str], object]


def parallel(dataset: Any, stage: Stage) -> Any:
    """Return `dataset` with a parallel `stage`, or None if the stage has no parallel version."""
    change = {
        "MapDataset": _parallel_map,
        "InterleaveDataset": _parallel_interleave,
        "FlatMapDataset": _parallel_interleave,
    }
    return _rewritten(dataset, stage, change)


def smaller_buffer(dataset: Any, stage: Stage, size: int) -> Any:
    """Return `dataset` with a shuffle buffer of `size` elements."""

    def change(definition: Any, name: str) -> None:
        node = _with_constants(definition, name, buffer_size=size)
        node.input[1] = node.input.pop()

    return _rewritten(dataset, stage, {"ShuffleDatasetV3": change, "ShuffleDataset": change})


def _rewritten(dataset: Any, stage: Stage, changes: Mapping[str, _Change]) -> Any:
    import tensorflow as tf

    serialized = graph.serialized(dataset)
    if not 0 < len(serialized) < _LARGEST:
        return None
    definition = tf.compat.v1.GraphDef.FromString(serialized)
    stages = nodes_of(definition, stages_of(dataset))
    name = next((name for name, each in stages.items() if each.dataset is stage.dataset), None)
    op = next((node.op for node in definition.node if node.name == name), "")
    if name is None or op not in changes:
        return None
    changes[op](definition, name)
    variant = tf.raw_ops.DatasetFromGraph(graph_def=definition.SerializeToString())
    changed = tf.data.experimental.from_variant(variant, dataset.element_spec)
    return changed.with_options(dataset.options())


def _with_constants(definition: Any, name: str, **values: int) -> Any:
    """Add constant inputs with these values to the node `name`, and return the node."""
    import tensorflow as tf

    kept = [copy.deepcopy(node) for node in definition.node]
    del definition.node[:]
    for suffix, value in values.items():
        node = definition.node.add(name=f"{name}/tfd_{suffix}", op="Const")
        node.attr["dtype"].type = tf.int64.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64, ()))
    definition.node.extend(kept)
    changed = next(node for node in definition.node if node.name == name)
    changed.input.extend(f"{name}/tfd_{suffix}" for suffix in values)
    return changed


def _parallel_map(definition: Any, name: str) -> None:
    node = _with_constants(definition, name, num_parallel_calls=_AUTOTUNE)
    node.op = "ParallelMapDatasetV2"
    node.attr["deterministic"].s = b"default"
    node.attr.pop("force_synchronous", None)


def _parallel_interleave(definition: Any, name: str) -> None:
    node = next(node for node in definition.node if node.name == name)
    cycle = {} if node.op == "InterleaveDataset" else {"cycle_length": _AUTOTUNE, "block_length": 1}
    node.op = "ParallelInterleaveDatasetV4"
    node.attr["deterministic"].s = b"default"
    _with_constants(
        definition,
        name,
        **cycle,
        buffer_output_elements=_AUTOTUNE,
        prefetch_input_elements=_AUTOTUNE,
        num_parallel_calls=_AUTOTUNE,
    )
