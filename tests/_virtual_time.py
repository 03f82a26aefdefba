"""An event loop whose time takes no time: it advances when nothing else can run."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class _Selector(selectors.DefaultSelector):
    """A selector that calls a function instead of waiting."""

    def __init__(self, on_idle: Callable[[float | None], float | None]) -> None:
        super().__init__()
        self._on_idle = on_idle

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        return super().select(self._on_idle(timeout))


class InlineExecutor(ThreadPoolExecutor):
    """An executor that calls each function at once. With threads, timers would expire first."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` starts at 0 and advances to the next timer when it is idle.

    `asyncio.sleep`, `asyncio.wait_for` and `call_later` take no real time. Pass `loop.time` as the
    clock of other objects. `run_until_complete` advances as far as needed, `advance` by a number of
    seconds.

    Work of threads and processes takes no virtual time. The loop waits for it in real time only if
    no timer is pending.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._end = math.inf
        super().__init__(_Selector(self._wait))

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Run everything that is due in the next `seconds`, then stop at exactly that time."""
        self._end = self._now + seconds
        try:
            self.run_forever()
        finally:
            self._end = math.inf

    def settle(self) -> None:
        """Run until all tasks wait, without advancing the time."""
        self.advance(0.0)

    def close(self) -> None:
        """Cancel the remaining tasks, then close the loop."""
        if not self.is_closed():
            for task in asyncio.all_tasks(self):
                task.cancel()
            self.settle()
        super().close()

    def _wait(self, timeout: float | None) -> float | None:
        """Advance to the next timer or to the end; return the real seconds to wait."""
        due = math.inf if timeout is None else self._now + timeout
        if due == self._end == math.inf:
            return None
        self._now = min(due, self._end)
        if due > self._end:
            self.stop()
        return 0
