"""The graph of a dataset, as it is sent to a tf.data service."""

from __future__ import annotations

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
