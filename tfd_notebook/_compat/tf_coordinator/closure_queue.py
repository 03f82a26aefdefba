"""TensorFlow's queue of closures, with a gate and a record of every transition.

`tfd_notebook._compat.tf_coordinator.fallback` checks the version of TensorFlow's queue.
"""

from __future__ import annotations

import inspect
import queue as queues
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator as tf_coordinator

from tfd_notebook._compat.tf_coordinator import cancellation, closures
from tfd_notebook._compat.tf_coordinator.closure_waits import POLL_SECONDS, Waiting
from tfd_notebook._compat.tf_coordinator.closures import WatchedClosure, WatchedValue
from tfd_notebook.errors import PausedError, StateError, UsageError
from tfd_notebook.model.closure_gate import Gate
from tfd_notebook.model.closure_store import CANCELLED, FAILED, READY, Store, function_name

ClusterCoordinator = tf_coordinator.ClusterCoordinator

#: Seconds within which a worker begins a call.
_BEGIN_SECONDS = 0.25
_construction = threading.RLock()


def with_queue(queue: Any, make: Callable[[], Any]) -> Any:
    """Return the result of `make`, which creates a coordinator with `queue` as its queue."""
    with _construction:
        tf_coordinator._CoordinatedClosureQueue = lambda: queue
        try:
            return make()
        finally:
            tf_coordinator._CoordinatedClosureQueue = closures.Queue


def with_defaults(fn: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a scheduled function, completed with its defaults.

    TensorFlow traces the function with its defaults, and calls it without them if a plain value
    was passed.
    """
    python: Any = getattr(fn, "python_function", None)
    has_defaults = getattr(python, "__defaults__", None) or getattr(python, "__kwdefaults__", None)
    if not has_defaults or not (args or kwargs):
        return args, kwargs
    try:
        bound = inspect.signature(python).bind(*(args or ()), **kwargs)
    except TypeError:  # TensorFlow raises its own error
        return args, kwargs
    bound.apply_defaults()
    return bound.args, bound.kwargs


def is_tracing_left(strategy: Any) -> bool:
    """Return True if a strategy is still in tracing state after an error during tracing."""
    return bool(getattr(strategy.extended, "_being_scheduled", False))


def end_tracing(strategy: Any) -> None:
    """Reset the tracing state of a strategy."""
    strategy.extended._being_scheduled = False


class WatchedQueue(Waiting):
    """TensorFlow's queue of closures, with a gate and a record of every transition.

    Parameters
    ----------
    store : Store
        Records every transition.
    explain : callable, optional
        Adds an explanation to an error that a caller gets.
    check : callable, optional
        Called once with each concrete function before its first closure. It may raise an error.
    """

    def __init__(
        self,
        store: Store,
        explain: Callable[[BaseException], object] = lambda error: None,
        check: Callable[[Any], object] = lambda function: None,
    ) -> None:
        self.explain = explain
        self._check = check
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()
        self.in_flight: dict[int, WatchedClosure] = {}
        self._store = store
        self.gate = Gate(on_change=store.touch)
        self._local = threading.local()
        self._stopped = False
        #: The threads that serve a worker by its index, and those of removed workers.
        self._serving: dict[int, threading.Thread] = {}
        self._leaving: set[threading.Thread] = set()
        #: Names of functions with a closure that reads a dataset on its worker.
        self.reads_input: set[str] = set()
        self.fetch_waits = 0
        self.fetch_seconds = 0.0
        self._delayed_callers = 0
        self._inspection_done = False
        super().__init__()
        self._progress = threading.Condition(self._queue_lock)

    # TensorFlow assigns a new manager after each cancellation.

    @property
    def _cancellation_mgr(self) -> cancellation.Managers:
        return self._managers

    @_cancellation_mgr.setter
    def _cancellation_mgr(self, _: Any) -> None:
        self._managers = cancellation.Managers(self)

    # Called by TensorFlow

    def put(self, closure: Any, tag: int | None = None) -> None:
        if tag is not None:
            closures.watch(closure, self._store)
            super().put(closure, tag)
            return
        if self._queue.full():
            self._await_room()
        self._raise_if_stopped()
        function = getattr(closure, "_concrete_function", None)
        if function is not None and function not in self._checked:
            self._check(function)
            self._checked.add(function)
        self._watch(closure)
        try:
            super().put(closure)
        except BaseException:
            self._store.end(closure.key, CANCELLED)
            raise
        if self.gate.armed or self._stopped:
            with self._queue_lock:
                if self._stopped:  # stopped in the meantime: no worker takes the closure
                    self._drain()
                # The gate may block the worker that TensorFlow woke, so wake all.
                self._closures_queued_condition.notify_all()

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise StateError(
                "this coordinator is stopped", fix="create a new one: cluster.coordinator()"
            )

    def _await_room(self) -> None:
        with self._queue_lock:
            while self._queue.full() and not self._stopped:
                if self.gate.closed and not self.gate.controlled:
                    raise PausedError(
                        f"the coordinator is paused and its queue is full: {self.gate.reason}",
                        fix="coordinator.resume()",
                    )
                self._queue_free_slot_condition.wait(POLL_SECONDS)

    def _watch(self, closure: Any) -> None:
        function = closure._function
        trace = str(getattr(function, "name", getattr(function, "__name__", "function")))
        closure.__class__ = WatchedClosure
        closure.store = self._store
        closure.name = function_name(trace)
        for each in closures.per_worker(closure):
            self.reads_input.add(closure.name)
            if closures.is_external(each, self._store):
                raise UsageError(
                    "an argument of this closure belongs to another coordinator",
                    fix="create it again: iter(coordinator.create_per_worker_dataset(...))",
                )
        reference = closure._output_remote_value_ref
        closure.key = self._store.add(closure.name, trace, reference)
        value = reference() if reference is not None else None
        if value is not None:
            value.__class__ = WatchedValue
            value._tfd_key = closure.key
            value._tfd_queue = self

    def get(self, timeout: float | None = None, tag: int | None = None) -> Any:
        thread = threading.current_thread()
        with self._queue_lock:
            if tag is not None and thread not in self._leaving:
                self._serving[tag] = thread
            while self._should_process_closures:
                if thread in self._leaving:
                    self._leaving.remove(thread)
                    return None
                if tag is not None and not self._tagged_queue[tag].empty():
                    return self._tagged_queue[tag].get(block=False)
                if not self._queue.empty() and self._admits(tag):
                    break
                if not self._closures_queued_condition.wait(timeout=timeout):
                    return None
            else:
                return None
            closure = self._queue.get(block=False)
            self._queue_free_slot_condition.notify()
            self.inflight_closure_count += 1
            closure.worker = -1 if tag is None else tag
            self.in_flight[closure.worker] = closure
        self._local.closure = closure
        self._store.dispatched(closure.key, closure.worker)
        return closure

    def _admits(self, worker: int | None) -> bool:
        if not self.gate.armed:
            return True
        head = self._queue.queue[0]
        was_closed = self.gate.closed
        admitted = self.gate.admits(-1 if worker is None else worker, head.key, head.name)
        if self.gate.closed and not was_closed:
            self._stop_waiting_condition.notify_all()
        return admitted

    def mark_finished(self) -> None:
        closure = self._local.closure
        self._release(closure)
        self._store.end(closure.key, READY, closure.worker)
        super().mark_finished()
        self._notify_progress()

    def mark_failed(self, e: BaseException) -> None:
        closure = self._local.closure
        if closure is None:
            # The closure was put back, and then its worker was not restored. TensorFlow would count
            # it again, or end the worker's thread with a failed assertion.
            with self._queue_lock:
                if self._error is None:
                    self._error = e
                self._stop_waiting_condition.notify_all()
            return
        self._release(closure)
        worker = closure.worker
        if closure.cancelled_by:
            self._end_cancelled(closure)
            return
        cancelled = isinstance(e, tf.errors.CancelledError)
        text = getattr(e, "message", None) or str(e)
        self._store.end(closure.key, CANCELLED if cancelled else FAILED, worker, text)
        if self.gate.break_failure and not cancelled:
            with self._queue_lock:
                where = f"closure {closure.key} ({closure.name}) failed on worker:{worker}"
                self.gate.close(where, by_failure=True)
                self._inspection_done = False
        super().mark_failed(e)
        self._notify_progress()

    def put_back(self, closure: Any) -> None:
        self._release(closure)
        worker = closure.worker
        if self._stopped:  # no worker takes it again
            closure.cancelled_by = closure.cancelled_by or "The coordinator was stopped."
        if closure.cancelled_by:
            self._end_cancelled(closure)
            return
        if self._error is not None or self._stopped:
            self._store.end(closure.key, CANCELLED, worker)  # TensorFlow cancels it next
        else:
            self._store.retry(closure.key, worker, f"put back from worker:{worker}")
            with self._queue_lock:
                self.gate.return_permit(closure.key)
        super().put_back(closure)
        if self.gate.armed:
            with self._queue_lock:
                self._closures_queued_condition.notify_all()
        self._notify_progress()

    def _release(self, closure: WatchedClosure) -> None:
        """Record that this thread no longer runs `closure`."""
        self._local.closure = None
        self.in_flight.pop(closure.worker, None)

    def _end_cancelled(self, closure: WatchedClosure) -> None:
        """End a closure that the user cancelled, without an error for other callers."""
        error = tf.errors.CancelledError(None, None, closure.cancelled_by)
        closure.maybe_call_with_output_remote_value(lambda value: value._set_error(error))
        self._store.end(closure.key, CANCELLED, closure.worker, closure.cancelled_by)
        super().mark_finished()
        self._notify_progress()

    def _notify_progress(self) -> None:
        if getattr(self._progress, "_waiters", True):  # private, other Pythons may lack it
            with self._queue_lock:
                self._progress.notify_all()

    def _cancel_all_closures(self) -> None:
        super()._cancel_all_closures()
        self.gate.permits = 0
        self._inspection_done = False
        if self.gate.by_failure:
            self.gate.open()  # the failed closures to inspect are cancelled now

    # Additional methods

    def pause(self, reason: str = "by request") -> None:
        """Block all closures until `resume`. Running closures continue."""
        with self._queue_lock:
            self.gate.close(reason)

    def resume(self) -> None:
        """Resume. No-op if the coordinator is not paused."""
        with self._queue_lock:
            if self._delayed_callers:
                # The waiting callers raise now and cancel the other closures before one starts.
                self._inspection_done = True
                self._stop_waiting_condition.notify_all()
                return
            self.gate.open()
            self._closures_queued_condition.notify_all()

    def step(self, count: int, timeout: float | None) -> int:
        """Admit `count` closures, wait until they have ended, and return their number."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._queue_lock:
            gate, error = self.gate, self._error
            free = self._queue.qsize() - gate.permits
            expected = min(count, max(free, 0)) if isinstance(count, int) else count
            gate.permit(count)  # validates the count and the state
            gate.permits -= count - expected
            known = frozenset(gate.stepped)
            self._closures_queued_condition.notify_all()
            ended: set[int] = set()
            while gate.closed and not self._stopped and self._error is error:
                ended = {key for key in gate.stepped - known if self._has_ended(key)}
                left = None if deadline is None else deadline - time.monotonic()
                # Some may have been cancelled in the meantime, together with their permits.
                all_ended = not gate.permits and len(ended) == len(gate.stepped - known)
                if len(ended) >= expected or all_ended or (left is not None and left <= 0):
                    break
                self._progress.wait(POLL_SECONDS if left is None else min(left, POLL_SECONDS))
            return len({key for key in gate.stepped - known if self._has_ended(key)} | ended)

    def _has_ended(self, key: int) -> bool:
        return self._store.state_of(key) in (READY, FAILED, CANCELLED, None)

    def hold(self, worker: int, held: bool) -> None:
        """Block closures for a worker, or admit them again."""
        with self._queue_lock:
            (self.gate.hold if held else self.gate.release)(worker)
            self._closures_queued_condition.notify_all()

    def break_on(self, failure: bool, workers: set[int], functions: set[str]) -> None:
        """Set the breakpoints."""
        with self._queue_lock:
            self.gate.break_on(failure, workers, functions)

    def control(self, attached: bool) -> None:
        """Record that a local controller was attached or detached."""
        with self._queue_lock:
            self.gate.controls += 1 if attached else -1
            self._stop_waiting_condition.notify_all()

    def retire(self, worker: int) -> None:
        """Block closures for the thread of a removed worker.

        TensorFlow's thread would take one more closure, cancel it, and count it as running.
        """
        with self._queue_lock:
            thread = self._serving.pop(worker, None)
            if thread is not None:
                self._leaving.add(thread)
            self.gate.release(worker)
            self._closures_queued_condition.notify_all()

    def cancel(self, key: int, why: str) -> bool:
        """Cancel a closure that is queued or runs. Return False if it has ended."""
        with self._queue_lock:
            for closure in self._queue.queue:
                if closure.key == key:
                    self._queue.queue.remove(closure)
                    closure.mark_cancelled()
                    self.gate.permits = min(self.gate.permits, self._queue.qsize())
                    self._queue_free_slot_condition.notify()
                    self._progress.notify_all()
                    if self._idle():
                        self._stop_waiting_condition.notify_all()
                    return True
            running = next((c for c in self.in_flight.values() if c.key == key), None)
            if running is None:
                return False
            running.cancelled_by = why
            # A call that is cancelled before its worker begins would run there indefinitely.
            began = running.began or time.monotonic()
            left = max(0.0, began + _BEGIN_SECONDS - time.monotonic())
            if self._progress.wait_for(lambda: running not in self.in_flight.values(), left):
                return self._store.state_of(key) == CANCELLED
        cancellation.cancel(running)
        return True

    def stop(self) -> None:
        """Stop, and cancel all closures, so that no caller waits for a result."""
        self._stopped = True
        super().stop()
        with self._queue_lock:
            self._drain()
            for worker, closure in list(self.in_flight.items()):
                closure.mark_cancelled()
                self._store.end(closure.key, CANCELLED, worker)
            for condition in (
                self._stop_waiting_condition,
                self._progress,
                self._queue_free_slot_condition,
            ):
                condition.notify_all()

    def _drain(self) -> None:
        for queue in (self._queue, *self._tagged_queue.values()):
            while True:
                try:
                    queue.get(block=False).mark_cancelled()
                except queues.Empty:
                    break
