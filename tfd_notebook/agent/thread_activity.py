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
    """Return the share of a few samples in which another thread of this process worked.

    A thread works while it computes, waits for a disk, or runs a Python function, which may block.
    TensorFlow's server threads mostly wait. The call takes 50 ms. It returns None without
    ``/proc``.
    """
    if not os.path.isdir(_THREADS):
        return None
    own_id = str(threading.get_native_id())
    working_samples = 0
    for number in range(_SAMPLES):
        if number:
            time.sleep(_PAUSE_SECONDS)
        # Python lists a thread of TensorFlow only while it runs a Python function.
        working_samples += len(sys._current_frames()) > 1 or _any_thread_works(own_id)
    return working_samples / _SAMPLES


def _any_thread_works(own_id: str) -> bool:
    for thread in os.listdir(_THREADS):
        if thread != own_id:
            try:
                with open(f"{_THREADS}/{thread}/stat", "rb") as file:
                    state = file.read().rpartition(b") ")[2][:1].decode()
            except OSError:  # the thread has ended
                continue
            if state in _WORKING_STATES:
                return True
    return False
