"""The frames of all threads."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's ident.

    Python locks its list of threads during `sys._current_frames`. A garbage collection in the call
    may run a callback that releases the GIL. A thread that ends at that time then takes the GIL
    and waits for the lock. All threads stop (CPython's issue 106883).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if enabled:
            gc.enable()
