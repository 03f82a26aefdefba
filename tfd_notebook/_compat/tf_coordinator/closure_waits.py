"""Waiting for one or all closures, with a timeout and without blocking Ctrl-C."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tfd_notebook._compat.tf_coordinator import cancellation, closures
from tfd_notebook.errors import PausedError, StateError, TimeLimit
from tfd_notebook.model.closure_gate import Gate
from tfd_notebook.model.closure_store import Store

POLL_SECONDS = 0.5


class Waiting(closures.Queue):
    """The waiting methods of the closure queue. `WatchedQueue` provides the state."""

    gate: Gate
    #: Adds an explanation to an error.
    explain: Callable[[BaseException], object]
    #: Number of waits of callers for single results, and the total of their seconds.
    fetch_waits: int
    fetch_seconds: float
    _error: BaseException | None
    _store: Store
    _stopped: bool
    _serving: dict[int, threading.Thread]
    _managers: cancellation.Managers
    #: Number of callers whose error is delayed until a controller has inspected a failure.
    _delayed_callers: int
    #: Whether the controller has finished the inspection.
    _inspection_done: bool

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no closure is queued or runs. Return False after `timeout` seconds.

        Unlike with TensorFlow, other threads can schedule closures during the wait, which then
        includes them.

        Raises
        ------
        PausedError
            The coordinator is paused and idle, `timeout` is None, and no controller can resume it.
        StateError
            The coordinator was stopped during the wait.
        Exception
            The error of a closure.
        """
        stopped = self._stopped
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._queue_lock:
                while self._delays_errors() or (not self._error and not self._idle()):
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return False
                    if left is None:
                        self._raise_if_stuck()
                    delayed = self._delays_errors()
                    self._delayed_callers += delayed
                    try:
                        self._stop_waiting_condition.wait(
                            POLL_SECONDS if left is None else min(left, POLL_SECONDS)
                        )
                    finally:
                        self._delayed_callers -= delayed
                    if self._stopped and not stopped:
                        raise StateError(
                            "this coordinator was stopped before its closures ended",
                            fix="create a new one: cluster.coordinator()",
                        )
            # Raising cancels all closures, so no thread may add closures at the same time.
            with self._put_wait_lock, self._queue_lock:
                if self._error and deadline is not None:
                    self._end_by(deadline)
                if self._error or self._idle():
                    self._raise_if_error()
                    return True

    def _delays_errors(self) -> bool:
        """Return True while an attached controller inspects a failure. `resume` ends this."""
        gate = self.gate
        inspects = gate.closed and gate.by_failure and gate.controlled
        return bool(self._error and inspects and not self._inspection_done)

    def _end_by(self, deadline: float) -> None:
        """Cancel the other running closures after a failure, as TensorFlow does, until a time."""
        self._cancellation_mgr.start_cancel()
        while self._inflight_closure_count and (left := deadline - time.monotonic()) > 0:
            self._no_inflight_closure_condition.wait(min(left, POLL_SECONDS))
        if self._inflight_closure_count:
            raise TimeLimit(
                f"a closure failed ({self._error}). It cancelled {self._inflight_closure_count} "
                "closure(s), which still run",
                fix="call join() again to wait for them and to raise the error. cluster.restart() "
                "ends the task that runs them, see coordinator.values",
            )

    def _idle(self) -> bool:
        return bool(self._queue.empty() and self._inflight_closure_count == 0)

    def _raise_if_stuck(self) -> None:
        if self._inflight_closure_count or self._queue.empty() or self.gate.controlled:
            return
        count = self._queue.qsize()
        if not self.gate.closed and self._serving.keys() <= self.gate.workers:
            raise PausedError(
                f"all workers are paused, with {count} closure(s) queued",
                fix="coordinator.resume_worker(0), or join(timeout=...)",
            )
        if self.gate.closed and not self.gate.permits:
            raise PausedError(
                f"the coordinator is paused ({self.gate.reason}) with {count} closure(s) queued",
                fix="coordinator.resume(), coordinator.step(), or join(timeout=...)",
            )

    def await_value(self, event: threading.Event, key: int) -> None:
        """Wait for a result. Raises PausedError if it cannot arrive."""
        began = time.perf_counter()
        while not event.wait(POLL_SECONDS):
            with self._queue_lock:
                waiting = self._store.state_of(key) in (0, 7)
                if waiting:
                    self._raise_if_stuck()
        self.fetch_waits += 1
        self.fetch_seconds += time.perf_counter() - began
