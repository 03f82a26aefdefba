"""Deletion of iterators in the background, because it can take a minute.

TensorFlow joins the thread that tunes an iterator's pipeline. That thread sleeps for up to 60 s,
and a cancellation may not wake it. `CancellationManager::StartCancel` notifies it first, and only
then sets the flag that the thread checks. On a busy machine this affects about one iterator in ten.
The deletion also waits for the running Python functions of the pipeline.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from _thread import start_new_thread
from typing import Any

from tfd_notebook._compat.tf_data.pipeline_model import inputs_first

#: Seconds to wait for other references, such as those of a traceback that is being deleted.
_RELEASE_SECONDS = 10.0
#: Seconds to wait for an earlier iterator, before the same data is read again.
_EARLIER_SECONDS = 5.0


class IteratorHandle:
    """The only permanent reference to an iterator's resource.

    Parameters
    ----------
    dataset : tf.data.Dataset
        The dataset that is iterated.
    resource : tf.Tensor, optional
    """

    __slots__ = ("_ended", "_functions", "data", "resource")

    def __init__(self, dataset: Any, resource: Any = None) -> None:
        #: References to all datasets that it reads. Another object can own the cache. They are
        #: weak, because a deleted dataset must not exist until the deletion of its iterators.
        self.data: set[object] = set()
        # TensorFlow can call these until the deletion.
        self._functions: list[Any] = []
        for current in inputs_first([dataset], lambda each: each._inputs()):
            self.data.add(weakref.ref(current))
            self._functions += current._functions()
            if type(current).__name__ == "CacheDataset":
                self.data.add("cache")
        self.resource = resource
        self._ended = threading.Event()

    def end_later(self, early: bool = True) -> None:
        """Delete the resource in a separate thread, which removes the last reference to it.

        With `early`, the next reader of the same data waits up to 5 s for the deletion.
        """
        if self.resource is None:
            return
        only, self.resource = [self.resource], None
        if early:
            _ending.append(self)
        try:
            # The garbage collector can call this anywhere, so it must not take a lock. The start of
            # a `threading.Thread` takes one.
            start_new_thread(self._delete, (only,))
        except RuntimeError:  # no more threads can start: delete it with its last reference
            self.resource = only.pop()
            self._mark_ended()

    def await_earlier(self) -> None:
        """Wait until earlier iterators of the same data have ended, up to 5 s.

        Some resources can only be open once, such as the file of a cache.
        """
        deadline = time.monotonic() + _EARLIER_SECONDS
        for other in tuple(_ending):
            if not self.data.isdisjoint(other.data):
                other._ended.wait(max(0.0, deadline - time.monotonic()))

    def _delete(self, only: list[Any]) -> None:
        deadline = time.monotonic() + _RELEASE_SECONDS
        while _references(only) > _SINGLE_REFERENCE and time.monotonic() < deadline:
            time.sleep(0.01)
        only.clear()
        self._mark_ended()

    def _mark_ended(self) -> None:
        if self in _ending:
            _ending.remove(self)
        self._ended.set()


def _references(only: list[Any]) -> int:
    """Return the reference count of the object in a list, as this Python counts it."""
    return sys.getrefcount(only[0])


#: The reference count of an object that only a list refers to.
_SINGLE_REFERENCE = _references([object()])
#: Handles whose iterators were left early and are being deleted.
_ending: list[IteratorHandle] = []
