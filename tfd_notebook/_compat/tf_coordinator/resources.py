"""Closures that build what a worker holds, such as the iterator of its dataset: they are counted.

They never pass TensorFlow's queue of functions, so nobody waits for one; where one fails, the
closures that take it as an argument do.
"""

from __future__ import annotations

from typing import Any

from tfd_notebook._compat.tf_coordinator import cancellation
from tfd_notebook.model.closure_store import Store

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
