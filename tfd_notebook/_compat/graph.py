"""The graph of a dataset, as it is sent to a tf.data service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def serialized(dataset: Any) -> bytes:
    """Return the ``GraphDef`` of a ``tf.data.Dataset``; empty if it is larger than 2 GB."""
    import tensorflow as tf

    # Registration applies the user's policy and warns; here nothing is to be said yet. TensorFlow
    # remembers the policy in a dataset's options for every later call: so it is set there, too.
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    options = tf.data.Options()
    options.experimental_external_state_policy = policy
    quiet = tf.data.Dataset.with_options(dataset, options)
    graph = quiet._as_serialized_graph(external_state_policy=policy).numpy()
    assert isinstance(graph, bytes)
    return graph


def service_id(dataset: Any) -> str:
    """Return the id under which a dataset that reads through a tf.data service is registered."""
    while not hasattr(dataset, "_dataset_id"):
        (dataset,) = dataset._inputs()
    return str(dataset._dataset_id.numpy().decode())


def processing_mode(dataset: Any) -> bytes | None:
    """Return how a dataset reads a tf.data service, serialized; None where it reads none itself."""
    mode = getattr(dataset, "_processing_mode", None)
    return None if mode is None else bytes(mode.numpy())


def ops_of(definition: bytes) -> set[str]:
    """Return the names of the ops in a serialized ``GraphDef`` and its functions."""
    return {node.op for node in _nodes(definition)}


def strings_of(definition: bytes, most: int = 10_000) -> list[str]:
    """Return the texts among the constants of a serialized ``GraphDef``, at most `most`."""
    import tensorflow as tf

    found: list[str] = []
    for node in _nodes(definition):
        if node.op == "Const" and node.attr["dtype"].type == tf.string.as_datatype_enum:
            values = tf.make_ndarray(node.attr["value"].tensor).ravel()
            found += [value.decode(errors="replace") for value in values[: most - len(found)]]
    return found


def _nodes(definition: bytes) -> Iterator[Any]:
    import tensorflow as tf

    graph = tf.compat.v1.GraphDef.FromString(definition)
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def
