"""TensorFlow's closures, and the values that come of them, telling what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator as tf_coordinator
from tensorflow.python.distribute.coordinator import values as tf_values

from tfd_notebook._compat.tf_coordinator import cancellation
from tfd_notebook.model.closure_store import CANCELLED, Store

#: The private names that this TensorFlow does not have: then nothing here may be used.
missing: list[str] = []


def _named(module: Any, name: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        missing.append(name)
        return type(name, (), {})
    return found


Queue: Any = _named(tf_coordinator, "_CoordinatedClosureQueue")
_Closure: Any = _named(tf_coordinator, "Closure")
_Value: Any = _named(tf_values, "RemoteValueImpl")
_PerWorkerValues: Any = _named(tf_values, "PerWorkerValues")


class Waits(Protocol):
    """Whoever waits for a value in a way that ends."""

    def await_value(self, event: Any, key: int) -> None:
        """Wait for it."""

    def explain(self, error: BaseException) -> object:
        """Add to an error what it means."""


class WatchedClosure(_Closure):
    """A scheduled function that tells where it is; made of TensorFlow's by its class."""

    key: int
    name: str
    store: Store
    cancelled_by: str = ""
    #: `time.monotonic` when its worker was called; 0 before.
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
    """The result of a scheduled function; waiting for it does not last longer than it can come."""

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
    """Return those arguments of a closure of which each worker has its own."""
    for argument in (*closure._args, *closure._kwargs.values()):
        # To flatten takes longer than all the rest, and most arguments are no containers.
        parts = tf.nest.flatten(argument) if isinstance(argument, (list, tuple, dict)) else ()
        for part in parts or (argument,):
            if isinstance(part, _PerWorkerValues):
                yield part


_watched: dict[type, type] = {}


class _Counted:
    """What a class of TensorFlow's resource closures gets in front of it."""

    _tfd_store: Store

    def execute_on(self, worker: Any) -> None:
        built = False
        try:
            # TensorFlow's own covers concrete functions only, and this is mostly a Python function.
            with cancellation.by(worker._cluster.resource_cancellation_mgr):
                super().execute_on(worker)  # type: ignore[misc]
            built = True
        finally:
            self._tfd_store.resource(worker.worker_index, built)


def watch(closure: Any, store: Store) -> None:
    """Have `store` told whenever `closure` builds its resource; doing it again changes nothing."""
    kind = type(closure)
    if not issubclass(kind, _Counted):
        if kind not in _watched:
            _watched[kind] = type(f"Counted{kind.__name__}", (_Counted, kind), {})
        closure.__class__ = _watched[kind]
        closure._tfd_store = store


def is_foreign(values: Any, store: Store) -> bool:
    """Whether ``PerWorkerValues`` were made by a coordinator that tells another store."""
    closure = next((value._closure for value in values._values), None)
    return getattr(closure, "_tfd_store", store) is not store
