"""Decides which worker may take which closure from the queue. Independent of TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tfd_notebook.errors import StateError, UsageError

#: Seconds that a remote controller counts as attached after it resumed the coordinator.
_REMOTE_CONTROL_SECONDS = 10.0


@dataclass
class Gate:
    """Gate between the closure queue and the workers. Callers hold the queue's lock.

    Attributes
    ----------
    reason : str
        Why the gate is closed. Empty while it is open.
    by_failure : bool
        Whether a failure closed it.
    permits : int
        Number of closures that may still pass while it is closed.
    workers : set of int
        Workers that get no closures.
    break_failure : bool
        Whether a failure closes it.
    break_workers : set of int
    break_functions : set of str
        The gate closes before one of these workers, or one of these functions, gets a closure.
    controls : int
        Number of local controls (a widget, a background join) that can open it.
    controlled_until : float
        `time.monotonic` until which a remote controller (a terminal) can open it.
    armed : bool
        False if every closure may pass without a check.
    on_change : callable
        Called after the gate closes or opens, and after a change of its workers or breakpoints.
    """

    reason: str = ""
    by_failure: bool = False
    permits: int = 0
    workers: set[int] = field(default_factory=set)
    break_failure: bool = False
    break_workers: set[int] = field(default_factory=set)
    break_functions: set[str] = field(default_factory=set)
    controls: int = 0
    controlled_until: float = 0.0
    armed: bool = False
    on_change: Callable[[], object] = lambda: None
    #: Closures that passed with a permit since the gate was closed.
    stepped: set[int] = field(default_factory=set)
    _passed: int | None = None

    @property
    def closed(self) -> bool:
        """True if the gate is closed for all workers."""
        return bool(self.reason)

    @property
    def controlled(self) -> bool:
        """True if a controller is attached that can open the gate."""
        return self.controls > 0 or time.monotonic() < self.controlled_until

    def close(self, reason: str, by_failure: bool = False) -> None:
        """Block all closures."""
        if not self.closed:
            self.reason, self.by_failure = reason, by_failure
        self.permits = 0
        self.stepped.clear()
        self._arm()

    def open(self) -> None:
        """Admit all closures again and keep the breakpoints."""
        self.controlled_until = min(
            self.controlled_until, time.monotonic() + _REMOTE_CONTROL_SECONDS
        )
        self.reason, self.by_failure, self.permits = "", False, 0
        self.stepped.clear()
        self._arm()

    def permit(self, count: int) -> None:
        """Admit `count` closures while the gate is closed.

        Raises
        ------
        UsageError
            `count` is not a positive integer.
        StateError
            The gate is open.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"invalid step({count!r}): expected 1 or more closures")
        if not self.closed:
            raise StateError(
                "step failed: the coordinator is not paused", fix="coordinator.pause()"
            )
        self.permits += count

    def hold(self, worker: int) -> None:
        """Block all closures for `worker`."""
        self.workers.add(worker)
        self._arm()

    def release(self, worker: int) -> None:
        """Admit closures for `worker` again."""
        self.workers.discard(worker)
        self._arm()

    def break_on(self, failure: bool, workers: set[int], functions: set[str]) -> None:
        """Replace all breakpoints."""
        self.break_failure = failure
        self.break_workers, self.break_functions = workers, functions
        self._arm()

    def admits(self, worker: int, key: int, function: str) -> bool:
        """Return True if `worker` may take the closure `key`. Close the gate at a breakpoint."""
        if worker in self.workers:
            return False
        if self.closed:
            if self.permits < 1:
                return False
            self.permits -= 1
            self.stepped.add(key)
            self._passed = key
            return True
        if key != self._passed:
            reason = ""
            if worker in self.break_workers:
                reason = f"before closure {key} ({function}) goes to worker:{worker}"
            elif function in self.break_functions:
                reason = f"before closure {key} of {function}"
            if reason:
                self._passed = key
                self.close(reason)
                return False
        return True

    def return_permit(self, key: int) -> None:
        """Return the permit of a closure that is queued again."""
        if key in self.stepped:
            self.stepped.remove(key)
            self.permits += 1

    def _arm(self) -> None:
        self.on_change()
        self.armed = bool(self.closed or self.workers or self.break_workers or self.break_functions)
