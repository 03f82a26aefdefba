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
#: Seconds within which a reader that computes between two elements returns to its iterator.
_READER_SECONDS = 2.0
_PAUSE = 0.05
_POLL = 0.002

_lock = threading.RLock()
_open = threading.Event()
_open.set()
_owner: int | None = None


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
    global _owner
    deadline = time.monotonic() + SECONDS
    if not _lock.acquire(timeout=SECONDS):
        raise StateError(
            "another thread of this process is connecting to a cluster",
            fix="wait until it has connected, then try again",
        )
    outer = _owner
    try:
        if outer is None:
            _owner = threading.get_ident()
            _close(deadline)
        yield
    finally:
        if outer is None:
            _release()
            _owner = None
        _lock.release()


def _close(deadline: float) -> None:
    while True:
        _open.clear()
        for name in _ENTRY_POINTS:
            setattr(pywrap_tfe, name, _gates[name])
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


def _release() -> None:
    for name, original in _originals.items():
        setattr(pywrap_tfe, name, original)
    _open.set()


def _gate(original: Any) -> Any:
    def gated(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != _owner and not _is_callback():
            while not _open.wait(1.0):
                pass
        return original(*args, **kwargs)

    return gated


_gates = {name: _gate(original) for name, original in _originals.items()}
_GATED = next(iter(_gates.values())).__code__


def _is_callback() -> bool:
    """Return True if this thread runs a function of ``tf.py_function`` or ``numpy_function``."""
    return any(frame.f_code.co_filename == _CALLBACKS for frame in _frames(sys._getframe()))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _busy() -> dict[int, FrameType]:
    """Return the threads that run an operation now, with their innermost frames."""
    own = threading.get_ident()
    busy = {}
    for thread, top in sys._current_frames().items():
        runs = waits = False
        for frame in _frames(top):
            code = frame.f_code
            if code.co_filename == _CALLBACKS:
                runs = False  # inner frames run on behalf of a pipeline
            elif not waits and any(name in code.co_names for name in _ENTRY_POINTS):
                runs = True
            # The caller of a gate has not entered the operation.
            waits = code is _GATED
        if runs and thread != own:
            busy[thread] = top
    return busy


def _description(threads: dict[int, FrameType]) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, top in threads.items():
        frames = list(_frames(top))
        reads = any(frame.f_code.co_name == _READ for frame in frames)
        user = [f for f in frames if not f.f_code.co_filename.startswith(_INTERNAL)]
        place = f" at {user[0].f_code.co_filename}:{user[0].f_lineno}" if user else ""
        activity = "reads a dataset" if reads else "runs an operation"
        parts.append(f"thread {names.get(ident, ident)!r} {activity}{place}")
    return ", ".join(sorted(parts))


def _readers(seconds: float) -> dict[int, FrameType]:
    """Return the threads that read an iterator now or within `seconds`."""
    own = threading.get_ident()
    end = time.monotonic() + seconds
    while True:
        readers = {
            thread: top
            for thread, top in sys._current_frames().items()
            if thread != own and any(frame.f_code.co_name == _READ for frame in _frames(top))
        }
        if readers or time.monotonic() >= end:
            return readers
        time.sleep(_POLL)


def _set_server_def_parked(self: Any, server_def: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the definition of the cluster while no operation runs."""
    if not self._context_handle or not server_def:
        return _set_server_def(self, server_def, *args, **kwargs)
    present = self.get_server_def()
    job = server_def.job_name
    replaces_devices = job != (LOCAL_JOB if present is None else present.job_name)
    if replaces_devices:
        # Before the threads are parked: between two elements, a reader may run an operation.
        _refuse_readers(job, _READER_SECONDS)
    with parked():
        if replaces_devices:
            _refuse_readers(job, 0.0)
        return _set_server_def(self, server_def, *args, **kwargs)


def _refuse_readers(job: str, seconds: float) -> None:
    """Raise StateError if threads read an iterator now or within `seconds`."""
    if readers := _readers(seconds):
        raise StateError(
            f"connecting as job {job!r} replaces the devices of this process, and these threads "
            f"read from them: {_description(readers)}",
            fix="stop them first, or connect with cluster.strategy(), which keeps the devices",
        )


#: The job name of a process's devices before it connects to a cluster.
LOCAL_JOB = "localhost"
context.Context.set_server_def = _set_server_def_parked
