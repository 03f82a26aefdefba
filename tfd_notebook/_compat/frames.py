"""The frames of other threads."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_lock = threading.RLock()


def stacks() -> dict[int, list[FrameType]]:
    """Return the frames of each other thread, innermost first, by the thread's ident.

    The threads continue to run meanwhile. The result keeps the variables of the frames.
    """
    with without_collection():
        innermost = sys._current_frames()
        innermost.pop(threading.get_ident(), None)
        return {ident: list(callers(frame)) for ident, frame in innermost.items()}


def variable_in(frame: FrameType, name: str) -> Any:
    """Return a local variable of a frame of another thread, or None."""
    with without_collection():
        return frame.f_locals.get(name)


def callers(innermost: FrameType) -> Iterator[FrameType]:
    """Yield a frame of this thread and those that called it."""
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Prevent garbage collections in a block.

    One may run a callback that releases the GIL in the middle of a call. Before Python 3.12, calls
    are not prepared for it. In `sys._current_frames` all threads stop (CPython's issue 106883). In
    ``f_back`` and ``f_locals`` the frame may end, and the process crashes.
    """
    with _lock:  # else the end of another thread's block enables it here
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
