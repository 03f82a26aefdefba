"""History of every closure: append-only columns, and a log of state transitions."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import signal
import threading
import time
import weakref
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tfd_notebook.errors import UsageError

#: Observable states of a closure in their order. The store keeps their positions.
STATES = (
    "queued",
    "dispatched",
    "running",
    "fetching",
    "ready",
    "failed",
    "cancelled",
    "retrying",
)
QUEUED, DISPATCHED, RUNNING, FETCHING, READY, FAILED, CANCELLED, RETRYING = range(len(STATES))
ENDED = (READY, FAILED, CANCELLED)
#: Number of lost attempts that are kept.
_MAX_LOST = 1_000
#: Number of closures whose rows are kept.
DEFAULT_KEEP = 1_000_000
#: Number of events that are applied without a query.
_MAX_EVENTS = 10_000
#: Number of transitions in the log.
_MAX_LOG = 400_000
_WAITING = (QUEUED, RETRYING)
_IN_FLIGHT = (DISPATCHED, RUNNING, FETCHING)

#: `time.time` minus `time.perf_counter` at import. Added to a moment, it gives a time that other
#: processes can compare even if the wall clock is changed.
EPOCH = time.time() - time.perf_counter()

#: When a closure was queued, dispatched, started, fetched, finished. 0 for a state not reached.
Times = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class Columns:
    """A copy of the columns of some closures at one moment.

    Times are seconds of `time.perf_counter`, or 0 for a state that was not reached.
    """

    ids: Sequence[int]
    function: array[int]
    state: bytes
    worker: array[int]
    attempts: array[int]
    queued: array[float]
    dispatched: array[float]
    started: array[float]
    fetching: array[float]
    finished: array[float]
    functions: tuple[str, ...]
    errors: dict[int, str]

    def __len__(self) -> int:
        return len(self.state)


@dataclass(frozen=True)
class LostAttempt:
    """A closure that its worker lost. Times are seconds of `time.perf_counter`."""

    id: int
    worker: int
    dispatched: float
    ended: float


def _without_interrupts(work: Callable[[], object]) -> None:
    """Call `work`, and deliver a Ctrl-C that arrives during the call after it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        work()
        return
    pressed: list[object] = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(None))
    try:
        work()
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            signal.raise_signal(signal.SIGINT)


class Store:
    """Thread-safe table of closures, which discards the oldest rows beyond a limit.

    A transition appends one event, without a lock. Queries apply the events to the columns first.

    Parameters
    ----------
    keep : int
        Number of closures whose rows are kept. Totals count all closures.
    """

    def __init__(self, keep: int = DEFAULT_KEEP) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        #: Transitions that are not in the columns yet: time, id, state, worker and details.
        self._events: list[tuple[float, int, int, int, Any]] = []
        self._applied = self._touches = 0
        self._next = self._first = 0
        self._function = array("i")
        self._state = bytearray()
        self._worker = array("h")
        self._attempts = array("H")
        self._queued = array("d")
        self._dispatched = array("d")
        self._started = array("d")
        self._fetching = array("d")
        self._finished = array("d")
        #: In the order of `Columns`.
        self._columns = (
            self._function,
            self._state,
            self._worker,
            self._attempts,
            self._queued,
            self._dispatched,
            self._started,
            self._fetching,
            self._finished,
        )
        self._values: dict[int, weakref.ref[Any]] = {}
        self._max_values = 0
        self._errors: dict[int, str] = {}
        self._functions: dict[str, int] = {}
        self._traces: dict[str, set[str]] = {}
        self._counts = [0] * len(STATES)
        self._by_function: list[int] = []
        self._by_worker: dict[int, list[int]] = {}
        self._resources: dict[int, tuple[int, int]] = {}
        self._log_time = array("d")
        self._log_id = array("q")
        self._log_state = bytearray()
        self._log_dropped = 0
        self._lost: deque[LostAttempt] = deque(maxlen=_MAX_LOST)
        #: Called after every change, by any thread and with locks, so it must return at once.
        self.on_change: Callable[[], object] = lambda: None

    # Record events

    def add(self, function: str, trace: str, value: weakref.ref[Any] | None) -> int:
        """Add a closure that was queued, and return its id."""
        now = time.perf_counter()
        with self._lock:  # the events of new closures are in the order of their ids
            key = self._next
            self._next += 1
            self._events.append((now, key, QUEUED, -1, (function, trace, value)))
        self.on_change()
        return key

    def dispatched(self, key: int, worker: int) -> None:
        """Record that a worker's thread has taken the closure."""
        self._record(key, DISPATCHED, worker)

    def running(self, key: int) -> None:
        """Record that the closure was sent to its worker."""
        self._record(key, RUNNING)

    def fetch(self, key: int) -> None:
        """Record that the closure has run and that its result is being fetched."""
        self._record(key, FETCHING)

    def end(self, key: int, state: int, worker: int = -1, error: str = "") -> None:
        """Record that the closure is ready, failed or cancelled. No-op if it has ended."""
        self._record(key, state, worker, error)
        if len(self._events) > _MAX_EVENTS:
            self._apply(blocking=False)

    def retry(self, key: int, worker: int, why: str) -> None:
        """Record that the closure is queued again, because its worker was lost."""
        self._record(key, RETRYING, worker, why)

    def _record(self, key: int, state: int, worker: int = -1, error: str = "") -> None:
        self._events.append((time.perf_counter(), key, state, worker, error))
        self.on_change()

    def resource(self, worker: int, built: bool) -> None:
        """Record that a resource of a worker, such as a dataset's iterator, was built or failed."""
        with self._lock:
            built_count, failed = self._resources.get(worker, (0, 0))
            self._resources[worker] = (built_count + built, failed + (not built))
        self.touch()

    def touch(self) -> None:
        """Report a change of the closures, or of the coordinator that runs them."""
        with self._lock:
            self._touches += 1
        self.on_change()

    @property
    def version(self) -> int:
        """A number that increases with every change."""
        with self._lock:
            return self._applied + len(self._events) + self._touches

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Hold the lock, with all earlier events in the columns."""
        self._apply()
        with self._lock:
            yield

    def _apply(self, blocking: bool = True) -> None:
        """Apply the events, unless another thread does and `blocking` is false."""

        def work() -> None:
            if self._lock.acquire(blocking):
                try:
                    self._apply_events()
                finally:
                    self._lock.release()

        # KeyboardInterrupt could leave a row incomplete, or the lock held.
        _without_interrupts(work)

    def _apply_events(self) -> None:
        count = len(self._events)  # other threads append more
        if not count:
            return
        events = self._events[:count]
        del self._events[:count]
        self._applied += count
        states, counts = self._state, self._counts
        applied = []
        for event in events:
            now, key, state, worker, details = event
            if state == QUEUED:
                function, trace, value = details
                # Ctrl-C may end `add` before it has recorded the event of its id.
                for unused in range(self._first + len(states), key):
                    self._append_row(now, unused, function, trace, None)
                    states[-1] = CANCELLED
                    counts[CANCELLED] += 1
                self._append_row(now, key, function, trace, value)
            else:
                row = key - self._first
                if row < 0 or states[row] in ENDED:
                    continue
                if state == DISPATCHED:
                    self._dispatched[row] = now
                    if self._attempts[row]:
                        self._started[row] = self._fetching[row] = 0.0  # of an earlier attempt
                    self._worker[row] = worker
                    self._attempts[row] = min(self._attempts[row] + 1, 65_535)
                elif state == RUNNING:
                    self._started[row] = now
                elif state == FETCHING:
                    self._fetching[row] = now
                else:
                    self._leave_worker(row, *event)
                counts[states[row]] -= 1
                states[row] = state
            counts[state] += 1
            applied.append(event)
        self._log_time.extend([event[0] for event in applied])
        self._log_id.extend([event[1] for event in applied])
        self._log_state.extend([event[2] for event in applied])
        max_entries = min(4 * self._keep, _MAX_LOG)
        if len(self._log_time) > max_entries:
            excess = len(self._log_time) - max_entries // 2
            self._log_dropped += excess
            for column in (self._log_time, self._log_id, self._log_state):
                del column[:excess]

    def _leave_worker(
        self, row: int, now: float, key: int, state: int, worker: int, error: str
    ) -> None:
        """Record that a closure has ended or was lost."""
        if state == RETRYING:
            self._lost.append(LostAttempt(key, worker, self._dispatched[row], now))
            self._worker[row] = -1
        else:
            self._finished[row] = now
        if error:
            self._errors[key] = error
        elif state == READY and self._errors:
            self._errors.pop(key, None)
        if worker >= 0:
            self._by_worker.setdefault(worker, [0] * len(STATES))[state] += 1

    def _append_row(
        self, now: float, key: int, function: str, trace: str, value: weakref.ref[Any] | None
    ) -> None:
        number = self._functions.setdefault(function, len(self._functions))
        if number == len(self._by_function):
            self._traces[function] = set()
            self._by_function.append(0)
        self._by_function[number] += 1
        self._traces[function].add(trace)
        if len(self._state) >= 1.25 * self._keep:
            self._drop()
        self._function.append(number)
        self._state.append(QUEUED)
        self._worker.append(-1)
        self._attempts.append(0)
        self._queued.append(now)
        for column in (self._dispatched, self._started, self._fetching, self._finished):
            column.append(0.0)
        if value is not None:
            self._values[key] = value
            if len(self._values) > self._max_values:
                self._forget_values()

    def _forget_values(self) -> None:
        """Discard the references to values that no longer exist."""
        self._values = {
            key: reference
            for key, reference in self._values.items()
            if key >= self._first and reference() is not None
        }
        self._max_values = 2 * len(self._values) + _MAX_EVENTS

    def _drop(self) -> None:
        """Discard the oldest closures, up to the first that has not ended."""
        oldest = self._state[: len(self._state) - self._keep]
        count = len(oldest) - len(oldest.lstrip(bytes(ENDED)))
        for column in self._columns:
            del column[:count]
        for key in range(self._first, self._first + count) if self._errors else ():
            self._errors.pop(key, None)
        self._first += count

    # Queries

    def __len__(self) -> int:
        """Return the number of closures, including those discarded."""
        return self._next

    def counts(self) -> dict[str, int]:
        """Return the number of closures in each state, including those discarded."""
        with self._current():
            return dict(zip(STATES, self._counts, strict=True))

    def workers(self) -> dict[int, dict[str, int]]:
        """Return for each worker the number of closures by final state, and of those it lost."""
        with self._current():
            return {
                worker: dict(zip(STATES, counts, strict=True))
                for worker, counts in sorted(self._by_worker.items())
            }

    def traces(self) -> dict[str, int]:
        """Return the number of traces of each function."""
        with self._current():
            return {name: len(traces) for name, traces in self._traces.items()}

    def functions(self) -> Counter[str]:
        """Return the number of closures of each function, including those discarded."""
        with self._current():
            return Counter(dict(zip(self._functions, self._by_function, strict=True)))

    def resources(self) -> dict[int, tuple[int, int]]:
        """Return for each worker the number of resources built and the number that failed."""
        with self._current():
            return dict(self._resources)

    def value(self, key: int) -> Any:
        """Return the RemoteValue of a closure, or None if it is no longer referenced.

        Raises
        ------
        KeyError
            The closure does not exist, or was discarded.
        """
        with self._current():
            row = key - self._first
            if not 0 <= row < len(self._state):
                raise KeyError(key)
            reference = self._values.get(key)
        return reference() if reference is not None else None

    def state_of(self, key: int) -> int | None:
        """Return the state of a closure, or None if it is unknown."""
        with self._current():
            row = key - self._first
            return self._state[row] if 0 <= row < len(self._state) else None

    def columns(self, latest: int | None = None, ended: bool = False) -> Columns:
        """Return a copy of all rows, or of the `latest`. With `ended`, stop at the last ready."""
        with self._current():
            end = self._state.rfind(READY) + 1 if ended else len(self._state)
            rows = slice(0 if latest is None else max(0, end - latest), end)
            return self._copy(
                range(self._first + rows.start, self._first + end), lambda column: column[rows]
            )

    def columns_of(self, ids: Iterable[int]) -> Columns:
        """Return a copy of the rows of these closures. Unknown closures are left out."""
        import numpy as np

        with self._current():
            known = np.fromiter(ids, dtype=np.int64)
            known = known[(known >= self._first) & (known < self._first + len(self._state))]
            rows = known - self._first

            def select(column: Any) -> Any:
                kind = getattr(column, "typecode", "B")
                return array(kind, np.frombuffer(column, dtype=kind)[rows].tobytes())

            return self._copy(known.tolist(), select if len(rows) else lambda column: column[:0])

    def _copy(self, ids: Sequence[int], part: Callable[[Any], Any]) -> Columns:
        parts: list[Any] = [part(column) for column in self._columns]
        parts[1] = bytes(parts[1])
        return Columns(ids, *parts, tuple(self._functions), self._errors_of(ids))  # type: ignore[call-arg]

    def changes(self, since: int) -> tuple[int, list[int] | None]:
        """Return the closures that changed since an earlier call, and the log's position.

        Parameters
        ----------
        since : int
            Position that the previous call returned. 0 for the first call.

        Returns
        -------
        int, list of int or None
            The position, and the closures. None if the log no longer reaches back to `since`.
        """
        with self._current():
            place = self._log_dropped + len(self._log_id)
            if since < self._log_dropped:
                return place, None
            return place, sorted(set(self._log_id[since - self._log_dropped :]))

    def lost_attempts(self) -> tuple[LostAttempt, ...]:
        """Return the latest attempts that ended because a worker was lost, oldest first."""
        with self._current():
            return tuple(self._lost)

    def _errors_of(self, keys: Sequence[int]) -> dict[int, str]:
        known = self._errors
        if isinstance(keys, range) and len(known) < len(keys):
            return {key: text for key, text in known.items() if key in keys}
        return {key: known[key] for key in keys if key in known}

    def times(self, keys: Sequence[int]) -> list[Times | None]:
        """Return the times of each of these closures, or None for those that are unknown."""
        with self._current():
            rows = [key - self._first for key in keys]
            return [
                tuple(column[row] for column in self._columns[4:])  # type: ignore[misc]
                if 0 <= row < len(self._state)
                else None
                for row in rows
            ]

    def latest_ready(self, count: int) -> Columns:
        """Return a copy of the rows of the closures that became ready last, at most `count`."""
        with self._current():
            ids: list[int] = []
            place = len(self._log_state)
            while len(ids) < count and (place := self._log_state.rfind(READY, 0, place)) >= 0:
                ids.append(self._log_id[place])
        return self.columns_of(reversed(ids))

    def ended_between(self, moments: Sequence[float]) -> list[int]:
        """Return the number of closures that became ready or failed in each interval.

        Parameters
        ----------
        moments : sequence of float
            Bounds of the intervals in ascending order, in seconds of `time.perf_counter`.
        """
        with self._current():
            places = [bisect_left(self._log_time, moment) for moment in moments]
            parts = [self._log_state[a:b] for a, b in itertools.pairwise(places)]
        return [part.count(READY) + part.count(FAILED) for part in parts]

    @property
    def changed_at(self) -> float:
        """`time.perf_counter` of the latest transition, 0 before the first."""
        with self._current():
            return self._log_time[-1] if self._log_time else 0.0

    def unfinished(self) -> tuple[int, int]:
        """Return the number of waiting closures and the number in flight."""
        with self._current():
            return (
                sum(self._counts[state] for state in _WAITING),
                sum(self._counts[state] for state in _IN_FLIGHT),
            )


@functools.lru_cache
def function_name(trace: str) -> str:
    """Return the user's name of a function, from the name of one of its traces."""
    match = re.fullmatch(r"__(?:inference|forward)_(.*)_\d+", trace)
    return match[1] if match else trace


def function_names(functions: Any) -> set[str]:
    """Return the names of one or more functions, each a ``tf.function`` or a name."""
    if functions is None:
        return set()
    if isinstance(functions, str) or not isinstance(functions, (list, tuple, set)):
        functions = (functions,)
    return {each if isinstance(each, str) else _name_of(each) for each in functions}


def _name_of(function: Any) -> str:
    python_function = getattr(function, "python_function", None) or getattr(
        function, "name", function
    )
    name = getattr(python_function, "__name__", None)
    if name is None:
        raise UsageError(f"invalid function {function!r}", fix="pass a tf.function or its name")
    return str(name)
