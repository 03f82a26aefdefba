"""Datasets that are built again from a part of another dataset's graph, in the same process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from tfd_notebook._compat.tf_data import graph
from tfd_notebook._compat.tf_data.pipeline_model import kind_of

#: TensorFlow's op that creates the state of a new dataset, by the kind of dataset.
_STATE = {
    "Cache": tf.raw_ops.DummyMemoryCache,
    "Random": tf.raw_ops.DummySeedGenerator,
    "Shuffle": tf.raw_ops.DummySeedGenerator,
    "ShuffleAndRepeat": tf.raw_ops.DummySeedGenerator,
}


class RebuiltDataset(dataset_ops.DatasetV2):
    """A dataset whose first operations are replaced by other datasets.

    Parameters
    ----------
    variant : tf.Tensor
    original : tf.data.Dataset
    replaced : mapping of int to tf.data.Dataset
        The datasets in place of operations of `original`, by their ``id``.
    """

    def __init__(self, variant: Any, original: Any, replaced: Mapping[int, Any]) -> None:
        self.original = original
        self.replaced = dict(replaced)
        super().__init__(variant)

    def _inputs(self) -> list[Any]:
        return list(self.replaced.values())

    @property
    def element_spec(self) -> Any:
        return self.original.element_spec


def rebuilt(
    original: Any,
    definition: Any,
    end: str,
    inputs: Mapping[str, tuple[Any, Any]],
    operations: Mapping[str, Any],
) -> Any:
    """Return the dataset of node `end`, with other datasets in place of some nodes.

    Parameters
    ----------
    original : tf.data.Dataset
        The dataset of `end`.
    definition : tf.compat.v1.GraphDef
        A graph that contains `end`.
    end : str
    inputs : mapping of str to (tf.data.Dataset, tf.data.Dataset)
        By node, its dataset and the one in its place.
    operations : mapping of str to tf.data.Dataset
        The datasets of the other nodes. Their functions refer to the same variables and tables.
    """
    nodes = {node.name: node for node in definition.node}
    given = {name: dataset._variant_tensor for name, (_, dataset) in inputs.items()}
    part = tf.compat.v1.GraphDef(versions=definition.versions, library=definition.library)
    todo, visited = [end], set()
    while todo:
        name = todo.pop()
        if name in visited:
            continue
        visited.add(name)
        node = nodes[name]
        if name not in given:
            given |= _states(node, nodes, operations.get(name))
            part.node.append(node)
            todo += [each.lstrip("^").partition(":")[0] for each in node.input]
    used = {name: tensor for name, tensor in given.items() if name in visited}
    placeholders = tf.compat.v1.GraphDef()
    for name, tensor in used.items():
        node = placeholders.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
    kept = [node for node in part.node if node.name not in used]
    del part.node[:]
    part.node.extend([*placeholders.node, *kept])

    def build(*tensors: Any) -> Any:
        mapped = {f"{name}:0": tensor for name, tensor in zip(used, tensors, strict=True)}
        return tf.graph_util.import_graph_def(
            part, input_map=mapped, return_elements=[f"{end}:0"], name=""
        )

    signature = [tf.TensorSpec((), tensor.dtype) for tensor in used.values()]
    with tf.device("CPU:0"):
        (variant,) = tf.compat.v1.wrap_function(build, signature)(*used.values())
    replaced = {id(before): dataset for name, (before, dataset) in inputs.items() if name in used}
    return RebuiltDataset(variant, original, replaced)


def _states(node: Any, nodes: Mapping[str, Any], dataset: Any) -> dict[str, Any]:
    """Return the live tensors for the inputs of `node` that are resources."""
    names = [name.partition(":")[0] for name in graph.data_inputs(node)]
    live: dict[str, Any] = {}
    if create := _STATE.get(kind_of(node.op)):
        constants = [name for name in names if nodes[name].op == "Const"]
        live = {
            name: create()
            for name in constants
            if nodes[name].attr["dtype"].type == tf.resource.as_datatype_enum
        }
    captured = names[graph.captured_inputs(node)]
    if captured and dataset is not None:
        tensors = [
            tensor
            for wrapper in dataset._functions()
            for tensor in wrapper.function.captured_inputs
        ]
        pairs = zip(captured, tensors, strict=True)
        live |= {name: tensor for name, tensor in pairs if tensor.dtype == tf.resource}
    return live
