"""One test per private name of TensorFlow that the coordinator and the data path use.

Iteration has a separate file. Each failure names the TensorFlow version with different internals.
Only a connected strategy has some of the attributes. For these, the tests search TensorFlow's code.
"""

from __future__ import annotations

import inspect
import re
import threading
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.distribute import parameter_server_strategy_v2 as strategies
from tensorflow.python.distribute.coordinator import cluster_coordinator as coordinators
from tensorflow.python.distribute.coordinator import values
from tensorflow.python.eager import cancellation, context, executor
from tensorflow.python.framework import composite_tensor
from tensorflow.python.ops import script_ops
from tensorflow.python.training import server_lib

from tfd_notebook._compat import errors
from tfd_notebook._compat.tf_coordinator import cancellation as tf_coordinator_cancellation
from tfd_notebook._compat.tf_coordinator import closures, connection, fallback
from tfd_notebook._compat.tf_data import graph, py_functions, servers
from tfd_notebook.model.closure_store import Store

VERSION = f"TensorFlow {tf.__version__}"
Queue = coordinators._CoordinatedClosureQueue


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(inspect.unwrap(function)).parameters)


def closure_of(function: Any, managers: Any = None, **options: Any) -> Any:
    managers = managers or cancellation.CancellationManager()
    return coordinators.Closure(function, managers, **options)


@pytest.fixture
def queue() -> Any:
    return Queue()


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("put", ["self", "closure", "tag"]),
        ("get", ["self", "timeout", "tag"]),
        ("mark_finished", ["self"]),
        ("mark_failed", ["self", "e"]),
        ("put_back", ["self", "closure"]),
        ("_cancel_all_closures", ["self"]),
        ("_raise_if_error", ["self"]),
        ("wait", ["self", "timeout"]),
        ("stop", ["self"]),
    ],
)
def test_queue_methods_have_their_signatures(method: str, expected: list[str]) -> None:
    assert parameters(getattr(Queue, method)) == expected, VERSION


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_queue_lock", type(threading.Lock())),
        ("_put_wait_lock", type(threading.Lock())),
        ("_closures_queued_condition", threading.Condition),
        ("_queue_free_slot_condition", threading.Condition),
        ("_stop_waiting_condition", threading.Condition),
        ("_no_inflight_closure_condition", threading.Condition),
        ("_inflight_closure_count", int),
        ("_tagged_queue", dict),
        ("_should_process_closures", bool),
        ("_cancellation_mgr", cancellation.CancellationManager),
    ],
)
def test_queue_has_its_attributes(queue: Any, name: str, kind: type) -> None:
    assert isinstance(getattr(queue, name), kind), (VERSION, name)


def test_queue_conditions_share_its_lock(queue: Any) -> None:
    condition = queue._stop_waiting_condition
    assert condition._lock is queue._queue_lock, VERSION
    assert isinstance(condition._waiters, deque)


def test_queue_keeps_closures_in_a_deque(queue: Any) -> None:
    closure = closure_of(tf.function(lambda: tf.constant(1)), queue._cancellation_mgr)
    queue.put(closure)
    assert list(queue._queue.queue) == [closure], VERSION
    assert queue.get() is closure
    assert queue._inflight_closure_count == queue.inflight_closure_count == 1, VERSION
    queue.mark_failed(ValueError("it broke"))
    assert isinstance(queue._error, ValueError), VERSION
    with pytest.raises(ValueError, match="it broke"):
        queue._raise_if_error()
    assert queue._error is None, VERSION


def test_closures_keep_their_arguments() -> None:
    function = tf.function(lambda a, b: a + b)
    closure = closure_of(function, args=(1,), kwargs={"b": 2})
    assert (closure._args, closure._kwargs) == ((1,), {"b": 2}), VERSION
    assert callable(closure._function), VERSION
    value = closure.build_output_remote_value()
    assert closure._output_remote_value_ref() is value, VERSION
    assert isinstance(closure._output_remote_value_ref, weakref.ref), VERSION
    closure.maybe_call_with_output_remote_value(lambda each: each._set_error(KeyError("k")))
    assert value._status_available_event.is_set(), VERSION
    assert isinstance(value._error, KeyError), VERSION


def test_cancelled_closure_notifies_its_value() -> None:
    closure = closure_of(tf.function(lambda: tf.constant(1)))
    value = closure.build_output_remote_value()
    closure.mark_cancelled()
    with pytest.raises(tf.errors.CancelledError):
        value.get()


def test_closure_function_comes_from_its_cancellation_manager() -> None:
    class Manager:
        requested: Any = None

        def get_cancelable_function(self, function: Any) -> Any:
            self.requested = function
            return "replaced"

    manager = Manager()
    closure = closure_of(tf.function(lambda: tf.constant(1)), manager)
    assert closure._function == "replaced", VERSION
    assert manager.requested.name.decode().startswith("__inference_"), VERSION


def test_parts_of_each_worker_are_found_inside_other_arguments() -> None:
    parts = [values.PerWorkerValues(()) for _ in range(4)]
    function = tf.function(lambda *args, **kwargs: None)
    arguments = (1, parts[0], [2, parts[1]], {"a": ({"b": parts[2]},)}, [])
    closure = SimpleNamespace(_args=arguments, _kwargs={"c": parts[3], "d": function})
    assert list(closures.per_worker(closure)) == parts, VERSION


def test_all_observed_names_exist() -> None:
    assert not closures.missing, VERSION


@pytest.mark.parametrize("kind", [tf.errors.InvalidArgumentError, ValueError])
@pytest.mark.parametrize("notes", [True, False])
def test_note_is_added_to_errors_on_every_python(kind: type, notes: bool) -> None:
    without = {} if notes else {"add_note": None}
    error = type(kind.__name__, (kind,), without)(
        *((None, None) if issubclass(kind, tf.errors.OpError) else ()), "it broke"
    )
    for _ in range(2):
        errors.add(error, "So mend it.")
    has_notes = notes and hasattr(Exception, "add_note")
    lines = [*str(error).splitlines(), *getattr(error, "__notes__", [])]
    assert lines == ["it broke", "So mend it."], VERSION
    assert ("So mend it." in str(error)) is not has_notes


def test_per_worker_values_have_their_parts() -> None:
    closure = coordinators.ResourceClosure(lambda: tf.constant(1), None)
    value = closure.build_output_remote_value()
    assert value._closure is closure, VERSION
    assert list(values.PerWorkerValues((value,))._values) == [value], VERSION


@pytest.mark.parametrize(
    ("init", "names"),
    [
        (
            coordinators.WorkerPreemptionHandler.__init__,
            {"_cluster_update_lock", "_server_def"},
        ),
        (coordinators.ClusterCoordinator.__init__, {"_cluster", "_has_initialized", "_strategy"}),
        (coordinators.Cluster.__init__, {"_num_workers", "failure_handler", "closure_queue"}),
        (coordinators.Cluster.__init__, {"resource_cancellation_mgr"}),
        (coordinators.Cluster.stop, {"resource_cancellation_mgr", "start_cancel"}),
        (coordinators.Worker.__init__, {"_cluster"}),
        (strategies.ParameterServerStrategyV2.__init__, {"_cluster_resolver"}),
        (
            strategies.ParameterServerStrategyV2Extended.__init__,
            {"_num_workers", "_variable_partitioner"},
        ),
    ],
)
def test_connected_coordinator_has_its_attributes(init: Any, names: set[str]) -> None:
    used = set(inspect.unwrap(init).__code__.co_names)
    assert names <= used, (VERSION, names - used)


def test_coordinator_parts_are_created_and_stopped() -> None:
    assert parameters(coordinators.Worker.__init__) == [
        "self", "worker_index", "device_name", "cluster",
    ], VERSION  # fmt: skip
    for kind in (coordinators.Worker, coordinators.WorkerPreemptionHandler, coordinators.Cluster):
        assert parameters(kind.stop) == ["self"], (VERSION, kind)
    assert "executor" in coordinators.Worker.__init__.__code__.co_names, VERSION
    # TensorFlow looks up the queue's class by name, so that the package can replace it.
    assert Queue.__name__ in coordinators.Cluster.__init__.__code__.co_names, VERSION


def test_strategy_has_a_flag_for_scheduled_functions() -> None:
    extended = strategies.ParameterServerStrategyV2Extended
    assert "_being_scheduled" in inspect.getsource(coordinators.ClusterCoordinator), VERSION
    assert "_being_scheduled" in inspect.getsource(strategies), VERSION
    assert callable(extended._create_variable), VERSION


def test_device_filters_become_a_message() -> None:
    filters = server_lib.ClusterDeviceFilters()
    filters.set_device_filters("worker", 0, ["/job:ps"])
    (job,) = filters._as_cluster_device_filters().jobs
    assert job.name == "worker", VERSION


def test_eager_context_accepts_a_new_cluster() -> None:
    tf.constant(1)
    assert context.context()._context_handle is not None, VERSION
    connect = strategies.ParameterServerStrategyV2._connect_to_cluster
    assert parameters(connect) == ["self", "coordinator_name"], VERSION
    source = inspect.getsource(strategies.ParameterServerStrategyV2)
    assert "self._connect_to_cluster(" in source, VERSION
    source = inspect.getsource(connection._connect_to_cluster)
    used = re.findall(r"_cluster_resolver\.(\w+)", source)
    assert set(used) == {"cluster_spec", "rpc_layer"}, VERSION
    assert parameters(context.Context.update_server_def)[:2] == ["self", "server_def"], VERSION
    assert callable(context.get_server_def), VERSION


def test_autograph_has_its_conversions_and_operators() -> None:
    function = tf.autograph.experimental.do_not_convert(lambda: None)
    assert hasattr(function, "autograph_info__"), VERSION
    operators = py_functions.autograph_operators()
    assert operators is py_functions.autograph_operators(), VERSION
    assert callable(operators.converted_call), VERSION


def test_executor_can_be_replaced_by_a_silent_one() -> None:
    replaced = executor.new_executor(enable_async=True)
    tf_coordinator_cancellation.quieten([SimpleNamespace(executor=replaced)])
    assert type(replaced) is not executor.Executor, VERSION
    replaced.wait()
    replaced.clear_error()
    assert callable(executor.Executor.__del__), VERSION


def test_installed_coordinator_is_supported() -> None:
    assert fallback.recognized(), (VERSION, fallback.fingerprint())


def test_python_functions_have_a_registry_of_tokens() -> None:
    registry = script_ops._py_funcs
    assert isinstance(registry, script_ops.FuncRegistry), VERSION
    assert callable(script_ops.FuncRegistry._next_unique_token), VERSION

    def called(x: Any) -> Any:
        return x

    token = registry.insert(called)
    assert registry._funcs[token] is called, VERSION
    assert registry.get(token) is called, VERSION
    eager = script_ops.EagerFunc(called, tf.int64, is_grad_func=False)
    assert eager._func is called, VERSION


def test_generator_state_is_kept() -> None:
    state = dataset_ops.DatasetV2._GeneratorState(range)
    assert state._generator is range, VERSION


def test_composite_tensors_have_a_type_spec() -> None:
    ragged = tf.ragged.constant([[1], [2, 3]])
    assert isinstance(ragged, composite_tensor.CompositeTensor), VERSION
    assert isinstance(ragged._type_spec, tf.RaggedTensorSpec), VERSION


def test_datasets_have_their_inputs_and_functions() -> None:
    source = tf.data.Dataset.range(3)
    mapped = source.map(lambda x: x + 1)
    assert list(mapped._inputs()) == [source], VERSION
    (function,) = mapped._functions()
    assert callable(function._func), VERSION
    assert graph.serialized(mapped), VERSION


@pytest.mark.slow
def test_native_tf_data_server_stops_without_the_gil() -> None:
    config = tf.data.experimental.service.DispatcherConfig(port=0)
    server = tf.data.experimental.service.DispatchServer(config)
    assert callable(server._stop), VERSION
    assert servers.unlocked_stop(server._server) is not None, VERSION
    servers.stop(server)


def test_comm_of_the_newest_ipykernel_routes_replies() -> None:
    import ipykernel
    from ipykernel.comm import comm

    if ipykernel.version_info[:2] < (7, 4):
        assert not hasattr(comm.BaseComm, "_reply_subshell_for")
    else:
        assert hasattr(comm.BaseComm, "_reply_subshell_for"), ipykernel.__version__


def test_function_can_be_unregistered_and_registered() -> None:
    function = tf.function(lambda x: x + 1)
    function(tf.constant(1))
    here = context.context()
    (name,) = {concrete.name for concrete in function._list_all_concrete_functions()}
    names = {
        each.decode() if isinstance(each, bytes) else each for each in here.list_function_names()
    }
    assert name.decode() in names, VERSION
    definition = here.get_function_def(name)
    here.remove_function(name)
    assert not here.has_function(name), VERSION
    here.add_function_def(definition)
    assert int(function(tf.constant(2))) == 3, VERSION


@pytest.mark.parametrize("nested", [False, True])
def test_watched_closure_selects_arguments_as_tensorflow_does(
    nested: bool,
) -> None:
    def remote(number: int) -> Any:
        value = values.RemoteValueImpl(None, tf.TensorSpec([], tf.int32))
        value._set_values(tf.constant(number))
        return value

    def add(first: Any, plain: Any, *, second: Any) -> Any:
        return (first[0] if nested else first) + plain + second

    first, second = (values.PerWorkerValues([remote(n), remote(n + 1)]) for n in (10, 20))
    worker = SimpleNamespace(
        worker_index=1, device_name="/cpu:0", executor=executor.new_executor(enable_async=False)
    )
    results = []
    for kind in (coordinators.Closure, closures.WatchedClosure):
        closure = closure_of(add, args=([first] if nested else first, 3), kwargs={"second": second})
        closure.__class__ = kind
        closure.store, closure.key = Store(), 0
        result = closure.build_output_remote_value()
        closure.execute_on(worker)
        results.append(int(result._get_values()))
        second._values[1]._set_error(ValueError("broken"))
        with pytest.raises(coordinators.ClosureInputError, match="broken"):
            closure.execute_on(worker)
        second._values[1]._set_values(tf.constant(21))
    assert results == [35, 35], VERSION
