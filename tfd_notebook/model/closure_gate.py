"""Which closure may be taken from the queue, by which worker: a decision without TensorFlow."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tfd_notebook.errors import StateError, UsageError

#: Seconds that somebody afar is still taken for present after it was opened.
_STAYS = 10.0


@dataclass
class Gate:
    """What stands between the queue and the workers; whoever uses it holds the queue's lock.

    Attributes
    ----------
    reason : str
        Why it is closed; empty while it is open.
    by_failure : bool
        Whether a failure closed it.
    permits : int
        Closures that may still pass while it is closed.
    workers : set of int
        Workers that get nothing.
    break_failure : bool
        Whether a failure closes it.
    break_workers : set of int
    break_functions : set of str
        It closes before a closure goes to one of these workers, or of one of these functions.
    controls : int
        How many live controls (a widget, a background join) can open it.
    controlled_until : float
        `time.monotonic` until which somebody from afar (a terminal) can open it.
    armed : bool
        Whether there is anything to decide at all.
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
    #: The closures that passed by a permit since the gate was closed.
    stepped: set[int] = field(default_factory=set)
    _passed: int | None = None

    @property
    def closed(self) -> bool:
        """Whether it is closed for all."""
        return bool(self.reason)

    @property
    def controlled(self) -> bool:
        """Whether somebody is there who can open it."""
        return self.controls > 0 or time.monotonic() < self.controlled_until

    def close(self, reason: str, by_failure: bool = False) -> None:
        """Let nothing more pass."""
        if not self.closed:
            self.reason, self.by_failure = reason, by_failure
        self.permits = 0
        self.stepped.clear()
        self._arm()

    def open(self) -> None:
        """Let everything pass again; breakpoints stay."""
        self.controlled_until = min(self.controlled_until, time.monotonic() + _STAYS)
        self.reason, self.by_failure, self.permits = "", False, 0
        self.stepped.clear()
        self._arm()

    def permit(self, count: int) -> None:
        """Let so many closures pass.

        Raises
        ------
        UsageError
            `count` is no number of closures.
        StateError
            It is open.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"step({count!r}) must be 1 or more closures")
        if not self.closed:
            raise StateError("the coordinator is not paused", fix="coordinator.pause() first")
        self.permits += count

    def hold(self, worker: int) -> None:
        """Give `worker` nothing more."""
        self.workers.add(worker)
        self._arm()

    def release(self, worker: int) -> None:
        """Give `worker` closures again."""
        self.workers.discard(worker)
        self._arm()

    def break_on(self, failure: bool, workers: set[int], functions: set[str]) -> None:
        """Set all breakpoints anew."""
        self.break_failure = failure
        self.break_workers, self.break_functions = workers, functions
        self._arm()

    def admits(self, worker: int, key: int, function: str) -> bool:
        """Whether `worker` may take the closure `key`; closes where a breakpoint is met."""
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
            met = ""
            if worker in self.break_workers:
                met = f"before closure {key} ({function}) goes to worker:{worker}"
            elif function in self.break_functions:
                met = f"before closure {key} of {function}"
            if met:
                self._passed = key
                self.close(met)
                return False
        return True

    def back(self, key: int) -> None:
        """Note that a closure that had passed is queued again: its permit counts again."""
        if key in self.stepped:
            self.stepped.remove(key)
            self.permits += 1

    def _arm(self) -> None:
        self.armed = bool(self.closed or self.workers or self.break_workers or self.break_functions)
