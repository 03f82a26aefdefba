"""The end of an iterator, which may take a minute, without anybody waiting for it.

TensorFlow joins the thread that tunes an iterator's pipeline. That thread sleeps for up to 60 s,
and a cancellation may leave it asleep: `CancellationManager::StartCancel` wakes it first, and only
then sets the flag that it looks at. On a busy machine about one iterator in ten ends like that.
The end also waits for the Python functions of the pipeline that are running.
"""

from __future__ import annotations

import sys
import time
from _thread import start_new_thread
from typing import Any

#: Seconds for others to let go, such as the frames of a traceback that is just being removed.
_PATIENCE = 10.0
#: The references that remain by then: the local variable, and the argument of `getrefcount`.
_OURS = 2


class Held:
    """The only reference to an iterator's resource that lasts."""

    __slots__ = ("resource",)

    def __init__(self, resource: Any = None) -> None:
        self.resource = resource


def later(held: Held) -> None:
    """End what is held in a thread of its own, in which the last reference to it goes."""
    if held.resource is None:
        return
    # This may be called out of the garbage collection, at any place: no lock may be taken, as the
    # start of a `threading.Thread` does.
    start_new_thread(_end, (held,))


def _end(held: Held) -> None:
    resource, held.resource = held.resource, None
    deadline = time.monotonic() + _PATIENCE
    while sys.getrefcount(resource) > _OURS and time.monotonic() < deadline:
        time.sleep(0.01)
