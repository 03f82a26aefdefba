"""One test per private name of TensorFlow that observed iteration uses.

Each failure names the TensorFlow version whose internals are different.
"""

import functools
import inspect

import pytest
import tensorflow as tf
from tensorflow.core.framework import model_pb2
from tensorflow.python.data.ops import dataset_ops, iterator_ops
from tensorflow.python.data.util import structure
from tensorflow.python.eager import cancellation, context, execute
from tensorflow.python.framework import ops

from tfd_notebook.data.consume import observe
from tfd_notebook.data.consume.consumers import Consumers

compat = observe.load_compat()
VERSION = f"TensorFlow {tf.__version__}"


def parameters(function):
    return list(inspect.signature(inspect.unwrap(function)).parameters)


def test_execute_with_cancellation_ends_a_get_next():
    assert parameters(execute.execute_with_cancellation)[:6] == [
        "op_name", "num_outputs", "inputs", "attrs", "ctx", "cancellation_manager",
    ], VERSION  # fmt: skip
    iterator = iter(tf.data.Dataset.range(3))
    manager = cancellation.CancellationManager()
    call = functools.partial(
        execute.execute_with_cancellation,
        b"IteratorGetNext",
        1,
        [iterator._iterator_resource],
        ("output_types", [9], "output_shapes", [[]]),
        context.context(),
    )
    assert int(call(manager)[0]) == 0, VERSION
    manager.start_cancel()
    with pytest.raises(tf.errors.CancelledError):
        call(manager)


def test_owned_iterator_keeps_its_hooks():
    names = ("_create_iterator", "_next_internal", "_serialize_to_tensors", "_restore_from_tensors")
    for name in names:
        assert callable(getattr(iterator_ops.OwnedIterator, name, None)), (VERSION, name)
    dataset = tf.data.Dataset.range(1)
    assert iter(dataset)._iterator_resource.dtype == tf.resource, VERSION
    assert dataset._apply_debug_options() is dataset, VERSION


def test_iterator_spec_returns_the_resource_tensor():
    iterator = iter(tf.data.Dataset.range(1))
    (component,) = iterator._type_spec._to_components(iterator)
    assert component is iterator._iterator_resource, VERSION


def test_datasets_share_a_variant():
    dataset = tf.data.Dataset.range(3)
    same = dataset_ops.UnaryUnchangedStructureDataset(dataset, dataset._variant_tensor)
    assert list(same.as_numpy_iterator()) == [0, 1, 2], VERSION
    assert same._input_dataset is dataset, VERSION


def test_functions_are_called_through_the_context():
    calls = []
    original = context.Context.call_function

    def call_function(self, name, tensor_inputs, *rest, **options):
        calls.append(tensor_inputs)
        return original(self, name, tensor_inputs, *rest, **options)

    iterator = iter(tf.data.Dataset.range(3))
    context.Context.call_function = call_function
    try:
        tf.function(lambda iterator: next(iterator))(iterator)
    finally:
        context.Context.call_function = original
    assert any(tensor is iterator._iterator_resource for tensor in calls[-1]), VERSION


def test_the_cancellation_context_reaches_function_calls():
    assert context.cancellation is cancellation, VERSION
    manager = cancellation.CancellationManager()
    manager.start_cancel()
    function = tf.function(lambda x: x + 1).get_concrete_function(tf.constant(1))
    before = cancellation.context
    cancellation.context = lambda: manager
    try:
        with pytest.raises(tf.errors.CancelledError):
            function(tf.constant(1))
    finally:
        cancellation.context = before
    assert int(function(tf.constant(1))) == 2, VERSION


def test_flat_structures():
    spec = {"a": tf.TensorSpec([2], tf.int64), "b": tf.TensorSpec(None, tf.string)}
    assert structure.get_flat_tensor_types(spec) == [tf.int64, tf.string], VERSION
    assert [s.rank for s in structure.get_flat_tensor_shapes(spec)] == [1, None], VERSION
    element = structure.from_compatible_tensor_list(
        spec, [tf.zeros([2], tf.int64), tf.constant("")]
    )
    assert set(element) == {"a", "b"}, VERSION


def test_eager_tensors_have_item_counts():
    assert tf.zeros([2, 3])._num_elements() == 6, VERSION
    assert context.executing_eagerly(), VERSION
    assert context.context().executor.is_async() is False, VERSION
    assert ops.init_scope is not None, VERSION


def test_latency_and_model_are_measured():
    iterator, _ = observe.open_iterator(tf.data.Dataset.range(5).batch(2), Consumers())
    total = tf.function(lambda iterator: tf.reduce_sum(next(iterator)))
    assert [int(total(iterator)) for _ in range(2)] == [1, 5], VERSION
    reading = iterator.meter.sample()
    assert reading.elements == 2, VERSION
    assert reading.waited > 0, VERSION
    if tf.__version__.startswith("2.15."):  # it does not expose its model
        assert not hasattr(tf.raw_ops, "IteratorGetModelProto"), VERSION
        assert reading.bytes == 0, VERSION
        return
    assert reading.bytes == 32, VERSION
    model = model_pb2.ModelProto.FromString(
        tf.raw_ops.IteratorGetModelProto(iterator=iterator.opened).numpy()
    )
    assert model.nodes[model.output].num_elements == 2, VERSION
    names = {node.name for node in model.nodes.values()}
    assert "LatencyStats" in names, VERSION
    # The clock is before the package's prefetch, not after TensorFlow's prefetch.
    kinds = (
        (node.name, model_pb2.NodeClass.Name(node.node_class)) for node in model.nodes.values()
    )
    assert next(name for name, kind in kinds if "ASYNC" in kind) == "Prefetch", VERSION


def test_names_of_the_asynchronous_datasets():
    dataset = tf.data.Dataset.range(4)
    datasets = [
        dataset.prefetch(1),
        dataset.map(lambda x: x, num_parallel_calls=2),
        dataset.batch(2, num_parallel_calls=2),
        dataset.interleave(lambda x: tf.data.Dataset.from_tensors(x), num_parallel_calls=2),
    ]
    assert {type(d).__name__ for d in datasets} <= set(compat._ASYNCHRONOUS), VERSION
    assert type(dataset.with_options(tf.data.Options())).__name__ in compat._TRANSPARENT, VERSION


def test_unknown_tensorflow_falls_back_with_one_warning(monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "tfd_notebook._compat.tf_data.iterator")
    monkeypatch.delattr(execute, "execute_with_cancellation")
    import tfd_notebook._compat.tf_data as package

    monkeypatch.delattr(package, "iterator")
    dataset = tf.data.Dataset.range(3)
    with pytest.warns(UserWarning, match=f"TensorFlow {tf.__version__} is not supported"):
        assert observe.watch(dataset, Consumers()) is dataset
    with pytest.warns(UserWarning, match="not supported"):
        iterator, meter = observe.open_iterator(dataset, Consumers())
    assert [int(x) for x in iterator] == [0, 1, 2]
    assert meter.read().elements == 3
