"""The end of an iterator, which may take a minute, without anybody waiting for it.

TensorFlow joins the thread that tunes an iterator's pipeline. That thread sleeps for up to 60 s,
and a cancellation may leave it asleep: `CancellationManager::StartCancel` wakes it first, and only
then sets the flag that it looks at. On a busy machine about one iterator in ten ends like that.
The end also waits for the Python functions of the pipeline that are running.
"""

from __future__ import annotations

import sys
import threading
import time
from _thread import start_new_thread
from typing import Any

#: Seconds for others to let go, such as the frames of a traceback that is just being removed.
_PATIENCE = 10.0
#: Seconds for an iterator that was left early to end, before the same data is read again.
_GAP = 5.0


class IteratorHandle:
    """The only reference to an iterator's resource that lasts.

    Parameters
    ----------
    dataset : tf.data.Dataset
        What it iterates over.
    resource : tf.Tensor, optional
    """

    __slots__ = ("_ended", "data", "resource")

    def __init__(self, dataset: Any, resource: Any = None) -> None:
        #: All datasets that it reads, by their identity; a cache may be another object's, too.
        self.data: dict[object, Any] = {}
        todo = [dataset]
        while todo:
            one = todo.pop()
            if id(one) not in self.data:
                self.data[id(one)] = one
                todo += one._inputs()
            if type(one).__name__ == "CacheDataset":
                self.data["cache"] = one
        self.resource = resource
        self._ended = threading.Event()

    def end_later(self, early: bool = True) -> None:
        """End what is held in a thread of its own, in which the last reference to it goes.

        With `early` whoever reads the same data next waits for that a little.
        """
        if self.resource is None:
            return
        if early:
            _ending.append(self)
        try:
            # This may be called out of the garbage collection, at any place: no lock may be
            # taken, as the start of a `threading.Thread` does.
            start_new_thread(self._end, ())
        except RuntimeError:  # there can be no more threads: it ends where it is let go
            self._forget()

    def await_earlier(self) -> None:
        """Wait until iterators that were left early do not read the same data any more.

        What they have open may be for one at a time, such as the file of a cache.
        """
        deadline = time.monotonic() + _GAP
        for other in tuple(_ending):
            if not self.data.keys().isdisjoint(other.data):
                other._ended.wait(max(0.0, deadline - time.monotonic()))

    def _end(self) -> None:
        only, self.resource = [self.resource], None
        deadline = time.monotonic() + _PATIENCE
        while _references(only) > _OURS and time.monotonic() < deadline:
            time.sleep(0.01)
        del only
        self._forget()

    def _forget(self) -> None:
        if self in _ending:
            _ending.remove(self)
        self._ended.set()


def _references(only: list[Any]) -> int:
    """Return the number of references to the object in a list, as this Python counts them."""
    return sys.getrefcount(only[0])


#: The references to an object that only a list holds.
_OURS = _references([object()])
#: Those that end and were left early.
_ending: list[IteratorHandle] = []
