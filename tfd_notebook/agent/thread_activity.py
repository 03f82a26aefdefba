"""Samples of whether the threads of a task work or wait."""

from __future__ import annotations

import os
import sys
import threading
import time

_SAMPLES = 5
_PAUSE_SECONDS = 0.01
_THREADS = "/proc/self/task"
#: Running or runnable, and waiting for a disk.
_WORKING_STATES = ("R", "D")


def working_share() -> float | None:
    """Return the share of some samples in which another thread of this process worked.

    A thread works while it computes, waits for a disk, or runs a Python function, which may wait
    for anything. Threads that TensorFlow keeps for its servers wait most of the time. Takes 50 ms;
    None without ``/proc``.
    """
    if not os.path.isdir(_THREADS):
        return None
    own = str(threading.get_native_id())
    found = 0
    for number in range(_SAMPLES):
        if number:
            time.sleep(_PAUSE_SECONDS)
        # A thread of TensorFlow's is known to Python only while it runs a Python function.
        found += len(sys._current_frames()) > 1 or _any_thread_works(own)
    return found / _SAMPLES


def _any_thread_works(own: str) -> bool:
    for thread in os.listdir(_THREADS):
        if thread != own:
            try:
                with open(f"{_THREADS}/{thread}/stat", "rb") as file:
                    state = file.read().rpartition(b") ")[2][:1].decode()
            except OSError:  # it has ended
                continue
            if state in _WORKING_STATES:
                return True
    return False
