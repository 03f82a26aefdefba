"""TensorFlow's closures and their values, which record their state in a `Store`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator as tf_coordinator
from tensorflow.python.distribute.coordinator import values as tf_values

from tfd_notebook._compat.tf_coordinator import cancellation
from tfd_notebook.model.closure_store import CANCELLED, Store

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
    cancelled_by: str = ""
    #: `time.monotonic` of the call of its worker. 0 before.
    began: float = 0.0

    def execute_on(self, worker: Any) -> None:
        self.began = time.monotonic()
        self.store.running(self.key, worker.worker_index)
        super().execute_on(worker)
        self.store.fetch(self.key, worker.worker_index)

    def mark_cancelled(self) -> None:
        self.store.end(self.key, CANCELLED)
        super().mark_cancelled()


class WatchedValue(_Value):
    """The result of a scheduled function. Waiting for it ends if the result cannot arrive."""

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
