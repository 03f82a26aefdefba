"""TensorFlow's closures and their values, which record their state in a `Store`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator as tf_coordinator
from tensorflow.python.distribute.coordinator import coordinator_context, metric_utils
from tensorflow.python.distribute.coordinator import values as tf_values
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
from tensorflow.python.util import nest

from tfd_notebook._compat.tf_coordinator import cancellation, thread_parking
from tfd_notebook.model.closure_store import CANCELLED, Store
from tfd_notebook.model.handle import Handle

#: Private names that this TensorFlow lacks. If any is missing, this module cannot be used.
missing: list[str] = []


def _private_class(module: Any, name: str) -> Any:
    value = getattr(module, name, None)
    if value is None:
        missing.append(name)
        return type(name, (), {})
    return value


Queue: Any = _private_class(tf_coordinator, "_CoordinatedClosureQueue")
_Closure: Any = _private_class(tf_coordinator, "Closure")
_Value: Any = _private_class(tf_values, "RemoteValueImpl")
#: Types of the parts that `WatchedValue` copies itself.
_TENSORS: Any = (ops.EagerTensor, type(None))
_PerWorkerValues: Any = _private_class(tf_values, "PerWorkerValues")


class Waits(Protocol):
    """Interface of a queue that waits for a value with a timeout."""

    def await_value(self, event: Any, key: int) -> None:
        """Wait for a value."""

    def explain(self, error: BaseException) -> object:
        """Add an explanation to an error."""


class WatchedClosure(_Closure):
    """A scheduled function that records its state. Created by changing a closure's class."""

    key: int
    name: str
    store: Store
    #: The worker that has taken the closure. -1 before.
    worker: int = -1
    cancelled_by: str = ""
    #: `time.monotonic` of the call of its worker. 0 before.
    began: float = 0.0

    def execute_on(self, worker: Any) -> None:
        self.began = time.monotonic()
        self.store.running(self.key)
        if any(map(nest.is_nested, (*self._args, *self._kwargs.values()))):
            super().execute_on(worker)
        else:
            self._execute_flat(worker)
        self.store.fetch(self.key)

    def _execute_flat(self, worker: Any) -> None:
        """Run with arguments without nested values.

        TensorFlow searches each argument six times for nested values. That takes longer than all
        other steps in Python.
        """
        args = [_value_on(value, worker) for value in self._args]
        kwargs = {name: _value_on(value, worker) for name, value in self._kwargs.items()}
        with (
            ops.device(worker.device_name),
            context.executor_scope(worker.executor),
            coordinator_context.with_dispatch_context(worker),
            metric_utils.monitored_timer("closure_execution"),
        ):
            result = self._function(*args, **kwargs)
        self.maybe_call_with_output_remote_value(lambda value: value._set_values(result))

    def mark_cancelled(self) -> None:
        self.store.end(self.key, CANCELLED)
        super().mark_cancelled()


def _value_on(value: Any, worker: Any) -> Any:
    """Return the value of an argument on a worker."""
    if isinstance(value, _PerWorkerValues):
        value = value._values[worker.worker_index]
    is_remote = isinstance(value, tf.distribute.coordinator.RemoteValue)
    if is_remote and (error := value._get_error()):
        is_input_error = isinstance(error, tf_coordinator.ClosureInputError)
        raise error if is_input_error else tf_coordinator.ClosureInputError(error)
    return coordinator_context.maybe_get_remote_value(value)


class WatchedValue(_Value, Handle):
    """The result of a scheduled function. Waiting for it ends if the result cannot arrive."""

    _instead = "send the result of its fetch()"

    _tfd_key: int
    _tfd_queue: Waits

    def get(self) -> Any:
        if not self._status_available_event.is_set():
            self._tfd_queue.await_value(self._status_available_event, self._tfd_key)
        try:
            return super().get()
        except Exception as error:
            self._tfd_queue.explain(error)
            raise

    def _copy_to_local(self) -> Any:
        """Return the result on this host, copied without ``tf.identity``.

        TensorFlow runs that operation as a function with a part on the worker. Its table of these
        parts is not safe for threads. The first results of two workers could end in an
        InternalError.
        """
        parts = nest.flatten(self._values, expand_composites=True)
        if all(isinstance(part, _TENSORS) for part in parts):
            # RuntimeError: a lost worker. TensorFlow's copy raises the error of its retries.
            with contextlib.suppress(RuntimeError):
                return nest.map_structure(_to_cpu, self._values, expand_composites=True)
        return super()._copy_to_local()


def _to_cpu(part: Any) -> Any:
    return None if part is None else thread_parking.copy_to_device(part, "CPU:0")


def per_worker(closure: Any) -> Iterator[Any]:
    """Yield the arguments of a closure that have a separate value for each worker."""
    for argument in (*closure._args, *closure._kwargs.values()):
        # Flattening is the slowest part, and most arguments are not containers.
        parts = tf.nest.flatten(argument) if isinstance(argument, (list, tuple, dict)) else ()
        for part in parts or (argument,):
            if isinstance(part, _PerWorkerValues):
                yield part


_counted_classes: dict[type, type] = {}


class _Counted:
    """Mixin for the classes of TensorFlow's resource closures that counts their runs."""

    _tfd_store: Store

    def execute_on(self, worker: Any) -> None:
        built = False
        try:
            # TensorFlow only cancels concrete functions, and this is usually a Python function.
            with cancellation.by(worker._cluster.resource_cancellation_mgr):
                super().execute_on(worker)  # type: ignore[misc]
            built = True
        finally:
            self._tfd_store.resource(worker.worker_index, built)


def watch(closure: Any, store: Store) -> None:
    """Record in `store` whenever `closure` builds its resource. Repeated calls are no-ops."""
    kind = type(closure)
    if not issubclass(kind, _Counted):
        if kind not in _counted_classes:
            _counted_classes[kind] = type(f"Counted{kind.__name__}", (_Counted, kind), {})
        closure.__class__ = _counted_classes[kind]
        closure._tfd_store = store


def is_external(values: Any, store: Store) -> bool:
    """Return True if ``PerWorkerValues`` belong to a coordinator with another store."""
    closure = next((value._closure for value in values._values), None)
    return getattr(closure, "_tfd_store", store) is not store
