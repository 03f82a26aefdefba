"""The Python stacks of this process, and the time for which its datasets' functions run."""

from __future__ import annotations

import functools
import inspect
import os
import sysconfig
import threading
import time
from types import FrameType
from typing import Any

from tfd_notebook._compat.frames import stacks
from tfd_notebook._compat.tf_data import autograph, py_functions, source_locations
from tfd_notebook.model.stacks import PythonFrame, PythonThread

#: Limits of a reply: the agent reads at most 16 MB. The frames are the outermost and innermost.
MAX_THREADS = 100
MAX_FRAMES = 40
_MAX_FUNCTION = 100
_MAX_FILE = 200

_INSTALLED = ("/site-packages/", "/dist-packages/")
#: Frames that outlive a call: a generator continues in the same frame.
_RESUMABLE = (
    inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
    | inspect.CO_ITERABLE_COROUTINE
)


class _Observed:
    """The time at which a frame was first observed.

    It is the trace function of the frame, so that it is deleted with the frame. A reference to the
    frame would keep the function's variables. Python calls it only after a debugger starts in the
    thread.
    """

    __slots__ = ("at",)

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Trace nothing."""


def observe() -> None:
    """Mark the frames of the datasets' Python functions that run now."""
    now = time.monotonic()
    for frames in py_functions.running():
        _mark(frames, now)


def threads(pipelines_only: bool = False) -> list[PythonThread]:
    """Return the stacks of all threads but the calling one.

    Parameters
    ----------
    pipelines_only : bool
        Whether to leave out threads that run no Python function of a dataset. Default false.

    Returns
    -------
    list of PythonThread
        At most `MAX_THREADS`. Those that run functions of datasets are first, the longest call
        before the others.
    """
    now = time.monotonic()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: list[PythonThread] = []
    for ident, stack in stacks().items():
        frames = py_functions.call_frames(stack)
        if frames:
            _mark(frames, now)
            found.append({"name": "tf.data", "pipeline": True, "frames": _call(frames, now)})
        elif not pipelines_only:
            packed = [_packed(frame, _is_own(frame), None) for frame in reversed(stack)]
            name = names.get(ident, "unnamed")[:_MAX_FUNCTION]
            found.append({"name": name, "pipeline": False, "frames": packed})
    found.sort(key=_urgency)
    return [{**thread, "frames": _cut(thread["frames"])} for thread in found[:MAX_THREADS]]


def _mark(frames: list[FrameType], now: float) -> None:
    for frame in frames:
        if frame.f_trace is None:  # else a debugger uses it
            frame.f_trace = _Observed(now)


def _call(frames: list[FrameType], now: float) -> list[PythonFrame]:
    """Return the frames of the call of a dataset's function."""
    packed: list[PythonFrame] = []
    is_first, caller_is_users, since = True, False, None
    for frame in frames:
        is_users = source_locations.is_users(frame)
        if not frame.f_code.co_flags & _RESUMABLE:
            mark: Any = frame.f_trace
            since = mark.at if isinstance(mark, _Observed) else None
        elif caller_is_users:
            # The caller may have resumed it any number of times. TensorFlow resumes it once.
            since = None
        seconds = None if since is None else now - since
        packed.append(_packed(frame, _is_own(frame) or (is_users and is_first), seconds))
        is_first, caller_is_users = is_first and not is_users, is_users
    return packed


def _packed(frame: FrameType, users: bool, seconds: float | None) -> PythonFrame:
    code = frame.f_code
    line = frame.f_lineno or code.co_firstlineno
    file, line, function = autograph.original(code.co_filename, line, code.co_name)
    return {
        "function": function[:_MAX_FUNCTION],
        "file": file[-_MAX_FILE:],
        "line": line,
        "users": users,
        "seconds": seconds,
    }


def _cut(frames: list[PythonFrame]) -> list[PythonFrame]:
    half = MAX_FRAMES // 2
    return frames if len(frames) <= MAX_FRAMES else [*frames[:half], *frames[-half:]]


def _urgency(thread: PythonThread) -> tuple[bool, float]:
    return not thread["pipeline"], -max((f["seconds"] or 0.0 for f in thread["frames"]), default=0)


def _is_own(frame: FrameType) -> bool:
    """Return True for the user's code, and False for code of Python or of an installed package."""
    file = frame.f_code.co_filename
    is_installed = file.startswith(_standard_library()) or any(name in file for name in _INSTALLED)
    return source_locations.is_users(frame) and not is_installed


@functools.cache
def _standard_library() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return ("<frozen ", *(paths[name] + os.sep for name in ("stdlib", "platstdlib")))
