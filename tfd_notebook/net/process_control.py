"""Settings of this process that only Linux has, by ``prctl``; other systems ignore them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def name_process(name: str) -> None:
    """Set the name of this process in ``ps`` and ``top``."""
    _prctl(_PR_SET_NAME, f"tfd {name}"[:15].encode())


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(number: int) -> None:
    """Set the signal that this process receives when its parent ends; 0 for none."""
    _prctl(_PR_SET_PDEATHSIG, number)


def end_with_parent(parent: int) -> None:
    """Make the operating system end this process with its parent, whose pid is `parent`.

    Wait until the intermediate process of a fork has ended and `parent` has become the parent.
    """
    if sys.platform != "linux":
        return
    deadline = time.monotonic() + 10
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, argument: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)
