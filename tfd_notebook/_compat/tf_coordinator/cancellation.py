"""Cancellation of the calls of one thread. TensorFlow's own context applies to all threads."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import cancellation, executor

CancellationManager = cancellation.CancellationManager
_global_context = cancellation.context
_local = threading.local()


@contextlib.contextmanager
def by(manager: Any) -> Iterator[None]:
    """Make `manager` cancel the functions that this thread calls."""
    before = getattr(_local, "manager", None)
    _local.manager = manager
    try:
        yield
    finally:
        _local.manager = before


def current() -> Any:
    """Return the manager that would cancel a function called by this thread, or None."""
    return getattr(_local, "manager", None) or _global_context()


class Cancelable:
    """A function that can be cancelled separately."""

    __slots__ = ("_function", "manager")

    def __init__(self, function: Any) -> None:
        self._function = function
        self.manager = CancellationManager()

    @property
    def name(self) -> str:
        return str(self._function.name.decode())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The context manager `by` would take a noticeable part of a short call.
        _local.manager = self.manager
        try:
            return self._function(*args, **kwargs)
        finally:
            _local.manager = None


def cancel(closure: Any) -> None:
    """Cancel the function of a closure, if it is cancellable."""
    manager = getattr(closure._function, "manager", None)
    if manager is not None:  # a plain Python function has none
        manager.start_cancel()


class Managers:
    """Replacement of the one cancellation manager that TensorFlow's queue has for all closures."""

    def __init__(self, queue: Any) -> None:
        self._queue = weakref.proxy(queue)
        self.is_cancelled = False

    def get_cancelable_function(self, function: Any) -> Cancelable:
        return Cancelable(function)

    def start_cancel(self) -> None:
        self.is_cancelled = True
        for closure in list(self._queue.in_flight.values()):
            cancel(closure)


cancellation.context = current


class _Executor(executor.Executor):
    """An executor that does not print the error of its last operation when it is deleted."""

    __slots__ = ()

    def __del__(self) -> None:
        try:
            super().__del__()
        except tf.errors.OpError:  # TensorFlow's wait() raises it until it is cleared
            self.clear_error()
            super().__del__()


def quieten(workers: Iterable[Any]) -> None:
    """Suppress the last error that workers print when they are deleted. Their queue reported it."""
    for worker in workers:
        worker.executor.__class__ = _Executor
