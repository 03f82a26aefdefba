"""Blocks threads that run TensorFlow operations while the eager context is replaced.

`Context.set_server_def` aborts the functions that run at that time and clears data that running
operations use. Threads that start an operation wait here until it has returned.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.eager import context
from tensorflow.python.ops import script_ops

from tfd_notebook._compat import frames
from tfd_notebook._compat.tf_coordinator import tables
from tfd_notebook.errors import StateError

#: Every eager operation and every call of a ``tf.function`` uses one of these.
_ENTRY_POINTS = ("TFE_Py_Execute", "TFE_Py_ExecuteCancelable", "TFE_Py_FastPathExecute")
_originals = {name: getattr(pywrap_tfe, name) for name in _ENTRY_POINTS}
_set_server_def = context.Context.set_server_def
#: Name of the method with which Python reads an iterator.
_READ = iterator_ops.OwnedIterator._next_internal.__name__
_CALLBACKS = script_ops.__file__
_INTERNAL = (str(Path(tf.__file__).parent), str(Path(__file__).parents[2]))

#: Seconds to wait for running operations.
SECONDS = 30.0
#: Seconds of one attempt. Parked threads continue between attempts, because an operation may need
#: them.
_ATTEMPT = 1.0
#: Seconds of the search for readers. A reader that computes for longer between two elements is not
#: found.
_READER_SECONDS = 2.0
_PAUSE = 0.05
_POLL = 0.002

#: The job name of a process's devices before it connects to a cluster.
_LOCAL_JOB = "localhost"

_lock = threading.RLock()
#: Set while reads of iterators may run.
_reads_open = threading.Event()
#: Set while other operations may run.
_others_open = threading.Event()
_reads_open.set()
_others_open.set()
_owner: int | None = None
#: Threads that wait at a gate. A thread that has passed one runs its operation in the same frame.
_waiting: set[int] = set()


@contextlib.contextmanager
def parked() -> Iterator[None]:
    """Block all other threads from TensorFlow's operations, and wait for the running ones.

    Functions that a pipeline calls in Python are not blocked, because a running thread may wait
    for their element.

    Raises
    ------
    StateError
        An operation runs for longer than `SECONDS`. The error names its thread.
    """
    deadline = time.monotonic() + SECONDS
    with _exclusive():
        if _others_open.is_set():
            _close(deadline)
        yield


@contextlib.contextmanager
def _exclusive() -> Iterator[None]:
    """Prevent other threads from closing the gates. At the end, the gates are open.

    The gates do not block the calling thread.
    """
    global _owner
    if not _lock.acquire(timeout=SECONDS):
        raise StateError(
            "another thread of this process is connecting to a cluster",
            fix="wait until it has connected, then try again",
        )
    outer, _owner = _owner, threading.get_ident()
    try:
        yield
    finally:
        if outer is None:
            _release()
        _owner = outer
        _lock.release()


def _close(deadline: float) -> None:
    while True:
        _close_gates(_reads_open, _others_open)
        attempt = min(deadline, time.monotonic() + _ATTEMPT)
        while busy := _busy():
            if time.monotonic() >= attempt:
                break
            time.sleep(_POLL)
        if not busy:
            return
        _release()
        if time.monotonic() >= deadline:
            raise StateError(
                "connecting failed because other threads run TensorFlow operations. "
                f"After {SECONDS:g} s these still run: {_description(busy)}",
                fix="stop them, or wait until they have their next element, then try again",
            )
        time.sleep(_PAUSE)


def _close_gates(*events: threading.Event) -> None:
    for event in events:
        event.clear()
    for name in _ENTRY_POINTS:
        setattr(pywrap_tfe, name, _gates[name])


def _release() -> None:
    for name, original in _originals.items():
        setattr(pywrap_tfe, name, original)
    _reads_open.set()
    _others_open.set()


def _gate(original: Any) -> Any:
    def gated(*args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        if thread != _owner:
            codes = [frame.f_code for frame in frames.callers(sys._getframe())]
            if not any(code.co_filename == _CALLBACKS for code in codes):
                reads = any(code.co_name == _READ for code in codes)
                is_open = _reads_open if reads else _others_open
                _waiting.add(thread)
                try:
                    while not is_open.wait(1.0):
                        pass
                finally:
                    _waiting.discard(thread)
        return original(*args, **kwargs)

    return gated


_gates = {name: _gate(original) for name, original in _originals.items()}
_GATED = next(iter(_gates.values())).__code__
#: Copies a tensor between devices, which uses no entry point. `_busy` finds its caller by the name.
copy_to_device = _gate(lambda tensor, device: tensor._copy_to_device(device))
_OPERATIONS = (*_ENTRY_POINTS, "copy_to_device")


def _busy() -> dict[int, list[FrameType]]:
    """Return the stacks of the threads that run an operation now."""
    busy = {}
    for thread, stack in frames.stacks().items():
        runs = waits = False
        for frame in stack:
            code = frame.f_code
            if code.co_filename == _CALLBACKS:
                runs = False  # inner frames run on behalf of a pipeline
            elif not waits and any(name in code.co_names for name in _OPERATIONS):
                runs = True
            # The caller of a gate has not entered the operation.
            waits = code is _GATED and thread in _waiting
        if runs:
            busy[thread] = stack
    return busy


def _description(threads: dict[int, list[FrameType]]) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, stack in threads.items():
        reads = any(frame.f_code.co_name == _READ for frame in stack)
        user = [f for f in stack if not f.f_code.co_filename.startswith(_INTERNAL)]
        place = f" at {user[0].f_code.co_filename}:{user[0].f_lineno}" if user else ""
        activity = "reads a dataset" if reads else "runs an operation"
        parts.append(f"thread {names.get(ident, ident)!r} {activity}{place}")
    return ", ".join(sorted(parts))


def _readers(seconds: float) -> dict[int, list[FrameType]]:
    """Return the threads that read an iterator now or within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        readers = {
            thread: stack
            for thread, stack in frames.stacks().items()
            if any(frame.f_code.co_name == _READ for frame in stack)
        }
        if readers or time.monotonic() >= end:
            return readers
        time.sleep(_POLL)


def _set_server_def_parked(self: Any, server_def: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the definition of the cluster while no operation runs."""
    if not self._context_handle or not server_def:
        return _set_server_def(self, server_def, *args, **kwargs)
    with _exclusive():
        job = server_def.job_name
        replaces_devices = job != own_job()
        if replaces_devices:
            # A reader stops at its next element. Until then it may run other operations.
            _close_gates(_reads_open)
            _refuse_readers(job, _READER_SECONDS)
        with parked():
            if replaces_devices:
                _refuse_readers(job, 0.0)
                return _set_server_def(self, server_def, *args, **kwargs)
            with tables.kept(job):
                return _set_server_def(self, server_def, *args, **kwargs)


def _refuse_readers(job: str, seconds: float) -> None:
    """Raise StateError if threads read an iterator now or within `seconds`."""
    if readers := _readers(seconds):
        raise StateError(
            f"connecting as job {job!r} replaces the devices of this process, and these threads "
            f"read from them: {_description(readers)}",
            fix="stop them first, or connect with cluster.strategy(), which keeps the devices",
        )


def own_job() -> str:
    """Return the job name of this process's devices."""
    definition = context.get_server_def()
    return _LOCAL_JOB if definition is None else str(definition.job_name)


context.Context.set_server_def = _set_server_def_parked
