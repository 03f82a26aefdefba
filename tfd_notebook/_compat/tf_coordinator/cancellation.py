"""Cancelling what one thread calls: TensorFlow's own context of it is one for all threads."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import cancellation, executor

CancellationManager = cancellation.CancellationManager
_everybodys = cancellation.context
_local = threading.local()


@contextlib.contextmanager
def by(manager: Any) -> Iterator[None]:
    """Have the functions that this thread calls be cancelled by `manager`."""
    before = getattr(_local, "manager", None)
    _local.manager = manager
    try:
        yield
    finally:
        _local.manager = before


def current() -> Any:
    """Return what would cancel a function that this thread calls, None where nothing would."""
    return getattr(_local, "manager", None) or _everybodys()


class Cancelable:
    """A function that can be cancelled on its own."""

    __slots__ = ("_function", "manager")

    def __init__(self, function: Any) -> None:
        self._function = function
        self.manager = CancellationManager()

    @property
    def name(self) -> str:
        return str(self._function.name.decode())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with by(self.manager):
            return self._function(*args, **kwargs)


def cancel(closure: Any) -> None:
    """Cancel what a closure runs, if it can be."""
    manager = getattr(closure._function, "manager", None)
    if manager is not None:  # a plain Python function has none
        manager.start_cancel()


class Managers:
    """Stands for the one cancellation manager that TensorFlow's queue has for all closures."""

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
    """An executor that does not print, when it is collected, what its last operation met."""

    __slots__ = ()

    def __del__(self) -> None:
        try:
            super().__del__()
        except tf.errors.OpError:  # what TensorFlow's wait() raises, and again until it is cleared
            self.clear_error()
            super().__del__()


def quieten(workers: Iterable[Any]) -> None:
    """Have workers not tell, when they are collected, what failed last: their queue has told."""
    for worker in workers:
        worker.executor.__class__ = _Executor
