"""What can be told of closures without TensorFlow's queue: scheduled, ready, failed."""

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


def wait(done: Callable[[], bool], timeout: float) -> bool:
    """Wait until all is done; False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


class RemoteValueFollower:
    """Follows RemoteValues from a thread of its own, for a TensorFlow that is not known.

    Parameters
    ----------
    store : Store
        Told of each closure when it was scheduled and when it has ended.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: list[tuple[int, Any, weakref.ref[Any]]] = []
        self._lock = threading.Lock()
        self._running = False

    def watch(self, function: Any, value: Any) -> None:
        """Take in a closure of `function` whose result will be `value`."""
        name = getattr(getattr(function, "python_function", function), "__name__", "function")
        key = self._store.add(name, name, weakref.ref(value))
        value._tfd_key = key
        with self._lock:
            # The event is held, not the value: that would keep its result.
            self._open.append((key, value._status_available_event, weakref.ref(value)))
            if not self._running:
                self._running = True
                threading.Thread(target=self._follow, name="tfd-values", daemon=True).start()

    def close(self) -> None:
        """Follow nothing any more, and leave nobody waiting for a result that cannot come."""
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


#: What `fingerprint` says of the files that this was written for and tried with.
KNOWN = {
    "a0abdf1a959acd06d92fe1c6e517872e057bc7d453d21753a65226c34375823c": "2.15 to 2.21",
}


def fingerprint() -> str:
    """Return a hash of TensorFlow's ``cluster_coordinator`` without its comments."""
    source = inspect.getsource(cluster_coordinator)
    lines = [line.rstrip() for line in source.splitlines()]
    kept = [line for line in lines if line and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def recognised() -> bool:
    """Whether this TensorFlow's coordinator is a known one, and all that it needs is there."""
    return not closures.missing and fingerprint() in KNOWN
