"""Datasets that read from the memory of data workers, for readers in other processes."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service

from tfd_notebook.data.consume.memory_datasets import check_sent
from tfd_notebook.errors import NoWorkers

pytestmark = pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options")

#: No service answers there. Tracing sends no request.
SERVICE = "grpc://localhost:1"
REMOTE = "worker.example:2222"


def distributed(**options: Any) -> Any:
    mode = service.ShardingPolicy.OFF
    return tf.data.Dataset.range(8).apply(service.distribute(mode, SERVICE, **options))


def traced(create: Any) -> Any:
    return tf.function(create, autograph=False).get_concrete_function()


IN_MEMORY = [
    lambda: distributed(data_transfer_protocol="local"),
    lambda: distributed(target_workers="LOCAL"),
    lambda: tf.data.Dataset.range(2).interleave(
        lambda _: distributed(data_transfer_protocol="local").take(4)
    ),
]


@pytest.mark.parametrize("create", IN_MEMORY)
def test_reads_in_memory_are_refused_for_other_processes(create: Any) -> None:
    with pytest.raises(NoWorkers, match=f"the training worker at {REMOTE} is another") as caught:
        check_sent(traced(create), [REMOTE])
    assert "data_transfer_protocol" in str(caught.value.fix)
    with socket.create_server(("localhost", 0)) as own:
        here = f"localhost:{own.getsockname()[1]}"
        check_sent(traced(create), [here])
        with pytest.raises(NoWorkers, match=REMOTE):
            check_sent(traced(create), [here, REMOTE])


@pytest.mark.parametrize(
    "create",
    [
        lambda: distributed(),
        lambda: distributed(data_transfer_protocol="grpc"),
        lambda: tf.data.Dataset.range(8),
    ],
)
def test_other_reads_are_accepted(create: Any) -> None:
    check_sent(traced(create), [REMOTE])


def serialized_in_the_function(dataset: Any) -> Any:
    """Return a dataset that the function serializes itself, as Keras 2 does."""
    graph = tf.raw_ops.DatasetToGraphV2(input_dataset=dataset._variant_tensor)
    return tf.raw_ops.DatasetFromGraph(graph_def=graph)


def test_datasets_that_the_function_serializes_are_examined() -> None:
    check_sent(traced(lambda: serialized_in_the_function(distributed())), [REMOTE])
    with pytest.raises(NoWorkers, match=REMOTE):
        check_sent(traced(lambda: serialized_in_the_function(IN_MEMORY[0]())), [REMOTE])


def test_captured_and_serialized_datasets_are_examined() -> None:
    numbers = tf.data.Dataset.range(8)
    check_sent(traced(lambda: numbers), [REMOTE])
    # TensorFlow sends a dataset to the workers in this form.
    text = tf.constant(traced(IN_MEMORY[0]).graph.as_graph_def().SerializeToString())

    def create() -> Any:
        return tf.raw_ops.DatasetFromGraph(graph_def=text)

    with pytest.raises(NoWorkers, match="localhost:1"):
        check_sent(traced(create), [REMOTE])
