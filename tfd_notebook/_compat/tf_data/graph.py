"""The graph of a dataset, as it is sent to a tf.data service."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

#: The op that creates a dataset from a graph.
_FROM_GRAPH = "DatasetFromGraph"


def serialized(dataset: Any) -> bytes:
    """Return the ``GraphDef`` of a ``tf.data.Dataset``. Empty if it is larger than 2 GB."""
    import tensorflow as tf

    # Registration later applies the user's policy and warns. Until then, no warning is wanted.
    # TensorFlow stores the policy in a dataset's options for every later call, so set it in both.
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    options = tf.data.Options()
    options.experimental_external_state_policy = policy
    quiet = tf.data.Dataset.with_options(dataset, options)
    graph = quiet._as_serialized_graph(external_state_policy=policy).numpy()
    assert isinstance(graph, bytes)
    return graph


def with_rebatch(dataset: Any, ops: Iterable[str]) -> Any:
    """Return a dataset whose last operation TensorFlow keeps if it divides the results.

    It replaces a `rebatch` at the end by one that does nothing (2.21).
    """
    return dataset.take(-1) if any(op.startswith("Rebatch") for op in ops) else dataset


def is_registered(op: str) -> bool:
    """Return True if this version of TensorFlow, or a library that it has loaded, has an op."""
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get(op) is not None


def variant_of(value: Any) -> Any:
    """Return the tensor of a dataset, which iterators and functions keep. Others are unchanged."""
    import tensorflow as tf

    return value._variant_tensor if isinstance(value, tf.data.Dataset) else value


def is_traced(dataset: Any) -> bool:
    """Return True if a dataset is a part of a ``tf.function`` that is being traced."""
    return not hasattr(dataset._variant_tensor, "numpy")


def definitions_in(function: Any) -> Iterator[Any]:
    """Yield the ``GraphDef`` of a concrete function, and of the datasets that it captures."""
    import tensorflow as tf

    definition = function.graph.as_graph_def()
    yield definition
    values = {
        inner.op.name: outer for outer, inner in function.graph.captures if hasattr(outer, "numpy")
    }
    for outer in values.values():
        if outer.dtype == tf.variant:
            with contextlib.suppress(tf.errors.OpError):  # it has no graph, and cannot be sent
                yield _definition_of(outer)
    constants = {node.name: node.attr["value"] for node in definition.node if node.op == "Const"}
    for node in definition.node:
        if node.op == _FROM_GRAPH:
            name = node.input[0].partition(":")[0]
            held = constants[name].tensor.string_val if name in constants else ()
            # Otherwise an operation of the function makes it, from nodes that were yielded.
            for text in held or ([values[name].numpy()] if name in values else ()):
                yield tf.compat.v1.GraphDef.FromString(text)


def _definition_of(variant: Any) -> Any:
    """Return the ``GraphDef`` of a dataset's eager variant tensor."""
    import tensorflow as tf

    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    with tf.init_scope():
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=policy.value
        ).numpy()
    return tf.compat.v1.GraphDef.FromString(text)


def expanded(definition: Any) -> Any:
    """Return a ``GraphDef`` with the operations of the graphs that it has as constants.

    TensorFlow expands ``DatasetFromGraph`` when it serializes a dataset, but not in functions.
    A graph that is not a constant is left as it is.
    """
    bodies = _bodies(definition)
    if not any(node.op == _FROM_GRAPH for nodes in bodies.values() for node in nodes):
        return definition
    texts = _texts(definition, bodies)
    copied = type(definition)()
    copied.CopyFrom(definition)
    found = [
        _expand(node, nodes, texts[name].get(_source(node.input[0])), copied.library)
        for name, nodes in _bodies(copied).items()
        for node in list(nodes)
        if node.op == _FROM_GRAPH and node.input
    ]
    return expanded(copied) if any(found) else definition


def _bodies(definition: Any) -> dict[str, Any]:
    """Return the nodes of a graph, with an empty name, and those of its functions by name."""
    return {
        "": definition.node,
        **{each.signature.name: each.node_def for each in definition.library.function},
    }


def _source(name: str) -> str:
    return name.partition(":")[0]


def _texts(definition: Any, bodies: dict[str, Any]) -> dict[str, dict[str, bytes | None]]:
    """Return the constant strings of each body by their names, None for those that differ."""
    arguments = {
        each.signature.name: [argument.name for argument in each.signature.input_arg]
        for each in definition.library.function
    }
    texts: dict[str, dict[str, bytes | None]] = {name: {} for name in bodies}
    todo = list(bodies)
    while todo:
        name = todo.pop()
        for node in bodies[name]:
            if node.op == "Const" and len(strings := node.attr["value"].tensor.string_val) == 1:
                texts[name][node.name] = strings[0]
        for node in bodies[name]:
            called = {attr.func.name for attr in node.attr.values() if attr.func.name}
            if len(called) != 1 or not called <= arguments.keys():
                continue
            (function,) = called
            inputs = list(data_inputs(node))
            if "Dataset" in node.op:
                inputs = inputs[captured_inputs(node)]
            passed = arguments[function][len(arguments[function]) - len(inputs) :]
            known, own = texts[function], texts[name]
            for argument, source in zip(passed, map(_source, inputs), strict=False):
                if source not in own:
                    continue
                text = own[source] if known.get(argument, own[source]) == own[source] else None
                if argument not in known or known[argument] != text:
                    known[argument] = text
                    todo.append(function)
    return texts


def _expand(node: Any, nodes: Any, text: bytes | None, library: Any) -> bool:
    """Replace a node by the operations of its graph. Return False if that is not possible."""
    import tensorflow as tf

    if not text:
        return False
    inner = tf.compat.v1.GraphDef.FromString(text)
    known = {each.signature.name: each for each in library.function}
    added = [each for each in inner.library.function if each.signature.name not in known]
    others = [each for each in inner.library.function if each.signature.name in known]
    results = [each for each in inner.node if each.op == "_Retval"]
    if len(results) != 1 or any(known[each.signature.name] != each for each in others):
        return False
    for each in inner.node:
        if each is not results[0]:
            copied = nodes.add()
            copied.CopyFrom(each)
            copied.name = f"{node.name}/{each.name}"
            del copied.input[:]
            copied.input.extend(_inside(source, node.name) for source in each.input)
    library.function.extend(added)
    node.op = "Identity"
    del node.input[:]
    node.input.append(_inside(results[0].input[0], node.name))
    return True


def _inside(source: str, name: str) -> str:
    """Return an input with the prefix `name`. It can be a control input, such as ``"^a"``."""
    control = "^" if source.startswith("^") else ""
    return f"{control}{name}/{source.removeprefix('^')}"


class ServiceRead(NamedTuple):
    """A read of a tf.data service in a graph."""

    address: str  # of the dispatcher; empty if a caller passes it
    transfer_protocol: str  # empty for TensorFlow's choice
    target_workers: str


def service_reads(definition: Any) -> Iterator[ServiceRead]:
    """Yield the reads of a tf.data service in a ``GraphDef`` and its functions."""
    for nodes in (definition.node, *(each.node_def for each in definition.library.function)):
        constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
        for node in nodes:
            if node.op.startswith("DataServiceDataset"):
                address = constants.get(node.input[2].partition(":")[0])
                yield ServiceRead(
                    "" if address is None else b"".join(address.string_val).decode(),
                    node.attr["data_transfer_protocol"].s.decode(),
                    node.attr["target_workers"].s.decode(),
                )


def traced_definitions(dataset: Any) -> Iterator[Any]:
    """Yield the ``GraphDef`` of each function that creates a part of a traced dataset.

    Each contains the nodes and functions that the dataset needs. Datasets that were created
    outside of all functions are yielded as their own graphs.
    """
    import tensorflow as tf

    todo = [dataset._variant_tensor]
    visited: set[int] = set()
    while todo:
        tensor = todo.pop()
        if id(tensor) in visited:
            continue
        visited.add(id(tensor))
        if not hasattr(tensor, "graph") or hasattr(tensor, "numpy"):
            if tensor.dtype == tf.variant:
                yield _definition_of(tensor)
            continue
        definition = _subgraph(tensor.graph.as_graph_def(), tensor.op.name)
        yield definition
        used = {node.name for node in definition.node}
        for outer, inner in getattr(tensor.graph, "captures", ()):
            if inner.op.name in used:
                todo.append(outer)


def _subgraph(definition: Any, name: str) -> Any:
    """Return the subgraph of a ``GraphDef`` that the node `name` needs."""
    import tensorflow as tf

    nodes = {node.name: node for node in definition.node}
    functions = {function.signature.name: function for function in definition.library.function}
    needed = tf.compat.v1.GraphDef()
    todo, visited = [name], {name}
    called: list[Any] = []

    def follow(node: Any) -> None:
        for attr in node.attr.values():
            called.extend(each.name for each in (attr.func, *attr.list.func) if each.name)
        called.append(node.op)

    while todo:
        node = nodes[todo.pop()]
        needed.node.append(node)
        follow(node)
        for source in node.input:
            source = source.lstrip("^").partition(":")[0]
            if source not in visited:
                visited.add(source)
                todo.append(source)
    while called:
        function = functions.pop(called.pop(), None)
        if function is not None:
            needed.library.function.append(function)
            for node in function.node_def:
                follow(node)
    return needed


def data_inputs(node: Any) -> Iterator[str]:
    """Yield the inputs of a ``NodeDef`` without its control inputs."""
    return (name for name in node.input if not name.startswith("^"))


def captured_inputs(node: Any) -> slice:
    """Return the positions of the inputs of a dataset's node that its functions capture."""
    lists = {name: len(attr.list.type) for name, attr in node.attr.items()}
    first = 1 + lists.get("Tstate", 0)
    captured = [
        count
        for name, count in lists.items()
        if name.startswith("T") and name.endswith(("arguments", "_args"))
    ]
    return slice(first, first + sum(captured))


def constant_bytes(dataset: Any) -> int:
    """Return the bytes of the tensors in the graph of a dataset, without creating the graph.

    This counts the tensors that the dataset refers to. It includes those of its stages' functions,
    and of the functions that these call.
    """
    import tensorflow as tf

    sizes: dict[int, int] = {}
    graphs: set[int] = set()

    def add(tensor: Any) -> None:
        count = tensor.shape.num_elements()
        if not count or tensor.dtype in (tf.resource, tf.variant) or id(tensor) in sizes:
            return
        if tensor.dtype != tf.string:
            sizes[id(tensor)] = count * tensor.dtype.size
        elif hasattr(tensor, "numpy"):
            with tf.init_scope(), tf.device("CPU:0"):
                lengths = tf.cast(tf.strings.length(tensor), tf.int64)
                sizes[id(tensor)] = int(tf.reduce_sum(lengths))
        elif tensor.op.type == "Const":
            sizes[id(tensor)] = tensor.op.get_attr("value").ByteSize()

    def add_constants(function_graph: Any) -> None:
        if id(function_graph) in graphs:
            return
        graphs.add(id(function_graph))
        copies = set()  # of small tensors that the function captures
        for outer, inner in function_graph.captures:
            if hasattr(outer, "numpy"):
                add(outer)
                copies.add(inner.op.name)
        for op in function_graph.get_operations():
            if op.type == "Const" and op.name not in copies:
                add(op.outputs[0])
        for called in function_graph._functions.values():
            if hasattr(called, "graph"):  # functions of TensorFlow 1 have none
                add_constants(called.graph)

    todo, visited = [dataset], set()
    while todo:
        stage = todo.pop()
        if id(stage) in visited:
            continue
        visited.add(id(stage))
        todo += stage._inputs()
        for tensor in tf.nest.flatten(list(vars(stage).values())):
            if isinstance(tensor, tf.Tensor):
                add(tensor)
        for wrapper in stage._functions():
            function = wrapper.function
            for tensor in getattr(function, "captured_inputs", ()):
                add(tensor)
            add_constants(function.graph)
    return sum(sizes.values())


def end_of(definition: Any) -> str:
    """Return the name of the last dataset's node in the ``GraphDef`` of a dataset."""
    (end,) = (node for node in definition.node if node.op == "_Retval")
    return str(end.input[0].partition(":")[0])


def service_id(dataset: Any) -> str:
    """Return the id under which the dataset of a tf.data service is registered."""
    while not hasattr(dataset, "_dataset_id"):
        (dataset,) = dataset._inputs()
    return str(dataset._dataset_id.numpy().decode())


def processing_mode(dataset: Any) -> bytes | None:
    """Return the serialized processing mode of a dataset that reads a tf.data service, or None."""
    mode = getattr(dataset, "_processing_mode", None)
    return None if mode is None else bytes(mode.numpy())


def plain_reads(dataset: Any) -> Iterator[Any]:
    """Yield the datasets that read a tf.data service through TensorFlow's own ``distribute``."""
    todo, visited = [dataset], set()
    while todo:
        each = todo.pop()
        if id(each) in visited or hasattr(each, "_tfd_service") or is_traced(each):
            continue
        visited.add(id(each))
        if processing_mode(each) is not None:
            yield each
        todo += reversed(each._inputs())


def transfer_protocol(dataset: Any) -> str:
    """Return the transfer protocol of a dataset of `plain_reads`. Empty for the default."""
    import tensorflow as tf

    definition = tf.compat.v1.GraphDef.FromString(serialized(dataset))
    return next((read.transfer_protocol for read in service_reads(definition)), "")


def service_address(dataset: Any) -> str:
    """Return the dispatcher's address of a dataset of `plain_reads`."""
    return str(dataset._address.numpy().decode())


def ops_of(definition: bytes) -> set[str]:
    """Return the names of the ops in a serialized ``GraphDef`` and its functions."""
    return {node.op for node in _nodes(definition)}


def strings_of(definition: bytes, most: int = 10_000) -> list[str]:
    """Return the string constants of a serialized ``GraphDef``, at most `most`."""
    import tensorflow as tf

    texts: list[str] = []
    for node in _nodes(definition):
        if node.op == "Const" and node.attr["dtype"].type == tf.string.as_datatype_enum:
            values = tf.make_ndarray(node.attr["value"].tensor).ravel()
            texts += [value.decode(errors="replace") for value in values[: most - len(texts)]]
    return texts


def _nodes(definition: bytes) -> Iterator[Any]:
    import tensorflow as tf

    graph = tf.compat.v1.GraphDef.FromString(definition)
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


#: Ops that the TensorFlow module `tf.lite` loads like a library. Every installation has them.
_BUILTIN = frozenset(("AudioMicrofrontend",))


def loaded_ops() -> set[str]:
    """Return the names of the ops that ``tf.load_op_library`` added to this process."""
    names = {
        name
        for module in tuple(sys.modules.values())
        if getattr(module, "__dict__", {}).get("_IS_TENSORFLOW_PLUGIN")
        for name, value in vars(module).items()
        if name[:1].isupper() and isinstance(value, types.FunctionType)
    }
    return names - _BUILTIN
