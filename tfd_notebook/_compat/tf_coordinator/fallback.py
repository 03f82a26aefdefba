"""States of closures without TensorFlow's queue: scheduled, ready, failed."""

from __future__ import annotations

import hashlib
import inspect
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator

from tfd_notebook._compat.tf_coordinator import closures
from tfd_notebook.model.closure_store import CANCELLED, FAILED, READY, Store

_POLL_SECONDS = 0.1
_STOPPED = "The coordinator was stopped."


def wait(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait until `condition` returns True. Return False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


class RemoteValueFollower:
    """Follows RemoteValues in a separate thread, for an unsupported version of TensorFlow.

    Parameters
    ----------
    store : Store
        Records each closure when it is scheduled and when it has ended.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: list[tuple[int, Any, weakref.ref[Any]]] = []
        self._lock = threading.Lock()
        self._running = False

    def watch(self, function: Any, value: Any) -> None:
        """Follow a closure of `function` with the result `value`."""
        name = getattr(getattr(function, "python_function", function), "__name__", "function")
        key = self._store.add(name, name, weakref.ref(value))
        value._tfd_key = key
        with self._lock:
            # Refer to the event instead of the value, which would keep the result alive.
            self._open.append((key, value._status_available_event, weakref.ref(value)))
            if not self._running:
                self._running = True
                threading.Thread(target=self._follow, name="tfd-values", daemon=True).start()

    def close(self) -> None:
        """Stop following, and cancel the values that have no result yet."""
        with self._lock:
            left, self._open = self._open, []
        for key, event, reference in left:
            value = reference()
            if value is not None and not event.is_set():
                value._set_error(tf.errors.CancelledError(None, None, _STOPPED))
            self._store.end(key, CANCELLED, error=_STOPPED)

    def _follow(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            with self._lock:
                ended = [entry for entry in self._open if entry[1].is_set()]
                self._open = [entry for entry in self._open if not entry[1].is_set()]
                if not self._open:
                    self._running = False
            for key, _, reference in ended:
                error = getattr(reference(), "_error", None)
                self._store.end(key, FAILED if error else READY, error=str(error or ""))
            if not self._running:
                return


#: Result of `fingerprint` for the supported versions.
KNOWN = {
    "a0abdf1a959acd06d92fe1c6e517872e057bc7d453d21753a65226c34375823c": "2.15 to 2.21",
}


def fingerprint() -> str:
    """Return a hash of TensorFlow's ``cluster_coordinator`` without its comments."""
    source = inspect.getsource(cluster_coordinator)
    lines = [line.rstrip() for line in source.splitlines()]
    kept = [line for line in lines if line and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def recognized() -> bool:
    """Return True if this TensorFlow's coordinator is supported and has all private names."""
    return not closures.missing and fingerprint() in KNOWN
