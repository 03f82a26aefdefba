"""History of every closure: append-only columns, and a log of state transitions."""

from __future__ import annotations

import itertools
import re
import threading
import time
import weakref
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
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


class Store:
    """Thread-safe table of closures, which discards the oldest rows beyond a limit.

    Parameters
    ----------
    keep : int
        Number of closures whose rows are kept. Totals count all closures.
    """

    def __init__(self, keep: int = 200_000) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._first = 0
        self._function = array("i")
        self._state = bytearray()
        self._worker = array("h")
        self._attempts = array("H")
        self._queued = array("d")
        self._dispatched = array("d")
        self._started = array("d")
        self._fetching = array("d")
        self._finished = array("d")
        self._values: list[weakref.ref[Any] | None] = []
        self._errors: dict[int, str] = {}
        self._functions: dict[str, int] = {}
        self._traces: dict[str, set[str]] = {}
        self._counts = [0] * len(STATES)
        self._by_function: list[int] = []
        self._by_worker: dict[int, list[int]] = {}
        self._resources: dict[int, tuple[int, int]] = {}
        self._log_time = array("d")
        self._log_id = array("q")
        self._log_state = array("b")
        self._log_dropped = 0
        self._lost: deque[LostAttempt] = deque(maxlen=_MAX_LOST)
        #: Increases with every change.
        self.version = 0
        #: Called after every change, by any thread and with locks, so it must return at once.
        self.on_change: Callable[[], object] = lambda: None

    # Record events

    def add(self, function: str, trace: str, value: weakref.ref[Any] | None) -> int:
        """Add a closure that was queued, and return its id."""
        now = time.perf_counter()
        with self._lock:
            number = self._functions.get(function)
            if number is None:
                number = self._functions[function] = len(self._functions)
                self._traces[function] = set()
                self._by_function.append(0)
            self._by_function[number] += 1
            self._traces[function].add(trace)
            if len(self._state) >= 1.25 * self._keep:
                self._drop()
            key = self._first + len(self._state)
            self._function.append(number)
            self._state.append(QUEUED)
            self._worker.append(-1)
            self._attempts.append(0)
            self._queued.append(now)
            for column in (self._dispatched, self._started, self._fetching, self._finished):
                column.append(0.0)
            self._values.append(value)
            self._counts[QUEUED] += 1
            self._append_log(now, key, QUEUED)
        return key

    def dispatched(self, key: int, worker: int) -> None:
        """Record that a worker's thread has taken the closure."""
        now = time.perf_counter()
        with self._lock:
            row = key - self._first
            if row >= 0:
                self._dispatched[row] = now
                self._started[row] = self._fetching[row] = 0.0  # of an earlier attempt
                self._worker[row] = worker
                self._attempts[row] = min(self._attempts[row] + 1, 65_535)
            self._enter(now, key, DISPATCHED)

    def running(self, key: int, worker: int) -> None:
        """Record that the closure was sent to its worker."""
        now = time.perf_counter()
        with self._lock:
            row = key - self._first
            if row >= 0:
                self._started[row] = now
            self._enter(now, key, RUNNING)

    def fetch(self, key: int, worker: int) -> None:
        """Record that the closure has run and that its result is being fetched."""
        now = time.perf_counter()
        with self._lock:
            row = key - self._first
            if row >= 0:
                self._fetching[row] = now
            self._enter(now, key, FETCHING)

    def end(self, key: int, state: int, worker: int = -1, error: str = "") -> None:
        """Record that the closure is ready, failed or cancelled."""
        now = time.perf_counter()
        with self._lock:
            row = key - self._first
            if row >= 0:
                if self._state[row] in ENDED:
                    return
                self._finished[row] = now
                if error:
                    self._errors[key] = error
                elif state == READY:
                    self._errors.pop(key, None)
            self._enter(now, key, state)
            if worker >= 0:
                counts = self._by_worker.setdefault(worker, [0] * len(STATES))
                counts[state] += 1

    def retry(self, key: int, worker: int, why: str) -> None:
        """Record that the closure is queued again, because its worker was lost."""
        now = time.perf_counter()
        with self._lock:
            row = key - self._first
            if row >= 0:
                self._lost.append(LostAttempt(key, worker, self._dispatched[row], now))
                self._worker[row] = -1
                self._errors[key] = why
            self._enter(now, key, RETRYING)
            if worker >= 0:
                counts = self._by_worker.setdefault(worker, [0] * len(STATES))
                counts[RETRYING] += 1

    def resource(self, worker: int, built: bool) -> None:
        """Record that a resource of a worker, such as a dataset's iterator, was built or failed."""
        with self._lock:
            built_count, failed = self._resources.get(worker, (0, 0))
            self._resources[worker] = (built_count + built, failed + (not built))
            self.touch()

    def _enter(self, now: float, key: int, state: int) -> None:
        row = key - self._first
        if row < 0:
            return
        self._counts[self._state[row]] -= 1
        self._counts[state] += 1
        self._state[row] = state
        self._append_log(now, key, state)

    def touch(self) -> None:
        """Report a change of the closures, or of the coordinator that runs them."""
        self.version += 1
        self.on_change()

    def _append_log(self, now: float, key: int, state: int) -> None:
        self.touch()
        self._log_time.append(now)
        self._log_id.append(key)
        self._log_state.append(state)
        if len(self._log_time) > 4 * self._keep:
            half = 2 * self._keep
            self._log_dropped += half
            for column in (self._log_time, self._log_id, self._log_state):
                del column[:half]

    def _drop(self) -> None:
        """Discard the oldest closures, up to the first that has not ended."""
        most = len(self._state) - self._keep
        count = next((row for row in range(most) if self._state[row] not in ENDED), most)
        for column in (
            self._function,
            self._state,
            self._worker,
            self._attempts,
            self._queued,
            self._dispatched,
            self._started,
            self._fetching,
            self._finished,
            self._values,
        ):
            del column[:count]
        for key in range(self._first, self._first + count):
            self._errors.pop(key, None)
        self._first += count

    # Queries

    def __len__(self) -> int:
        """Return the number of closures, including those discarded."""
        return self._first + len(self._state)

    def counts(self) -> dict[str, int]:
        """Return the number of closures in each state, including those discarded."""
        with self._lock:
            return dict(zip(STATES, self._counts, strict=True))

    def workers(self) -> dict[int, dict[str, int]]:
        """Return for each worker the number of closures by final state, and of those it lost."""
        with self._lock:
            return {
                worker: dict(zip(STATES, counts, strict=True))
                for worker, counts in sorted(self._by_worker.items())
            }

    def traces(self) -> dict[str, int]:
        """Return the number of traces of each function."""
        with self._lock:
            return {name: len(traces) for name, traces in self._traces.items()}

    def functions(self) -> Counter[str]:
        """Return the number of closures of each function, including those discarded."""
        with self._lock:
            return Counter(dict(zip(self._functions, self._by_function, strict=True)))

    def resources(self) -> dict[int, tuple[int, int]]:
        """Return for each worker the number of resources built and the number that failed."""
        with self._lock:
            return dict(self._resources)

    def value(self, key: int) -> Any:
        """Return the RemoteValue of a closure, or None if it is no longer referenced.

        Raises
        ------
        KeyError
            The closure does not exist, or was discarded.
        """
        with self._lock:
            row = key - self._first
            if not 0 <= row < len(self._values):
                raise KeyError(key)
            reference = self._values[row]
        return reference() if reference is not None else None

    def state_of(self, key: int) -> int | None:
        """Return the state of a closure, or None if it is unknown."""
        with self._lock:
            row = key - self._first
            return self._state[row] if 0 <= row < len(self._state) else None

    def columns(self, latest: int | None = None, ended: bool = False) -> Columns:
        """Return a copy of all rows, or of the `latest`. With `ended`, stop at the last ready."""
        with self._lock:
            end = self._state.rfind(READY) + 1 if ended else len(self._state)
            rows = slice(0 if latest is None else max(0, end - latest), end)
            return self._copy(
                range(self._first + rows.start, self._first + end), lambda column: column[rows]
            )

    def columns_of(self, ids: Iterable[int]) -> Columns:
        """Return a copy of the rows of these closures. Unknown closures are left out."""
        import numpy as np

        with self._lock:
            known = np.fromiter(ids, dtype=np.int64)
            known = known[(known >= self._first) & (known < self._first + len(self._state))]
            rows = known - self._first

            def select(column: Any) -> Any:
                kind = column.typecode if isinstance(column, array) else "B"
                copied = np.frombuffer(column, dtype=kind)[rows].tobytes()
                return array(kind, copied) if isinstance(column, array) else copied

            return self._copy(known.tolist(), select if len(rows) else lambda column: column[:0])

    def _copy(self, ids: Sequence[int], part: Callable[[Any], Any]) -> Columns:
        return Columns(
            ids,
            part(self._function),
            bytes(part(self._state)),
            part(self._worker),
            part(self._attempts),
            part(self._queued),
            part(self._dispatched),
            part(self._started),
            part(self._fetching),
            part(self._finished),
            tuple(self._functions),
            self._errors_of(ids),
        )

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
        with self._lock:
            place = self._log_dropped + len(self._log_id)
            if since < self._log_dropped:
                return place, None
            return place, sorted(set(self._log_id[since - self._log_dropped :]))

    def lost_attempts(self) -> tuple[LostAttempt, ...]:
        """Return the latest attempts that ended because a worker was lost, oldest first."""
        with self._lock:
            return tuple(self._lost)

    def _errors_of(self, keys: Sequence[int]) -> dict[int, str]:
        known = self._errors
        if isinstance(keys, range) and len(known) < len(keys):
            return {key: text for key, text in known.items() if key in keys}
        return {key: known[key] for key in keys if key in known}

    def times(self, keys: Sequence[int]) -> list[Times | None]:
        """Return the times of each of these closures, or None for those that are unknown."""
        with self._lock:
            return [self._times(key - self._first) for key in keys]

    def _times(self, row: int) -> Times | None:
        if not 0 <= row < len(self._state):
            return None
        return (
            self._queued[row],
            self._dispatched[row],
            self._started[row],
            self._fetching[row],
            self._finished[row],
        )

    def latest_ready(self, count: int) -> list[Times]:
        """Return the times of the closures that became ready last, at most `count`."""
        with self._lock:
            places: list[int] = []
            states, place = self._log_state.tobytes(), len(self._log_state)
            while len(places) < count and (place := states.rfind(READY, 0, place)) >= 0:
                places.append(place)
            times_of_ready = [
                self._times(self._log_id[place] - self._first) for place in places[::-1]
            ]
        return [times for times in times_of_ready if times is not None]

    def ended_between(self, moments: Sequence[float]) -> list[int]:
        """Return the number of closures that became ready or failed in each interval.

        Parameters
        ----------
        moments : sequence of float
            Bounds of the intervals in ascending order, in seconds of `time.perf_counter`.
        """
        with self._lock:
            places = [bisect_left(self._log_time, moment) for moment in moments]
            parts = [self._log_state[a:b].tobytes() for a, b in itertools.pairwise(places)]
        return [part.count(READY) + part.count(FAILED) for part in parts]

    @property
    def changed_at(self) -> float:
        """`time.perf_counter` of the latest transition, 0 before the first."""
        with self._lock:
            return self._log_time[-1] if self._log_time else 0.0

    def unfinished(self) -> tuple[int, int]:
        """Return the number of waiting closures and the number in flight."""
        with self._lock:
            return (
                sum(self._counts[state] for state in _WAITING),
                sum(self._counts[state] for state in _IN_FLIGHT),
            )


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
