"""Queues of commands. Commands in a queue run in order, and queues run independently."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable

Work = Callable[[], None]


class CommandQueues:
    """A set of command queues. Each queue that is not empty has a thread.

    Parameters
    ----------
    start_thread : callable
        Starts a thread that runs the given function.
    """

    def __init__(self, start_thread: Callable[[Work], None]) -> None:
        self._start_thread = start_thread
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[Work]] = {}

    def put(self, queue: Hashable, work: Work) -> None:
        """Run `work` after all earlier work of `queue`. `work` must not raise."""
        with self._lock:
            if queue in self._waiting:
                self._waiting[queue].append(work)
                return
            self._waiting[queue] = deque([work])
        try:
            self._start_thread(lambda: self._run(queue))
        except RuntimeError:  # no more threads can be started
            with self._lock:
                del self._waiting[queue]
            raise

    def _run(self, queue: Hashable) -> None:
        while True:
            with self._lock:
                waiting = self._waiting[queue]
                if not waiting:
                    del self._waiting[queue]
                    return
                work = waiting.popleft()
            work()
