"""What became of every closure: columns that only grow at their end, and a log of transitions."""

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

#: What can be seen of a closure, in the order of its life; the position is what is stored.
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
#: Attempts that came to nothing, of which the latest are known.
_KEPT_LOST = 1_000
_WAITING = (QUEUED, RETRYING)
_IN_FLIGHT = (DISPATCHED, RUNNING, FETCHING)

#: `time.time` less `time.perf_counter`, once and for all: with it moments stay comparable when they
#: are sent, whatever steps the wall clock makes.
EPOCH = time.time() - time.perf_counter()

#: When a closure was queued, dispatched, started, fetched, finished; 0 for what has not happened.
Times = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class Columns:
    """A copy of the columns of some closures at one moment.

    Times are seconds of `time.perf_counter`, 0 for what has not happened.
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
    """A closure that was at a worker and went back to the queue; seconds of `time.perf_counter`."""

    id: int
    worker: int
    dispatched: float
    ended: float


@dataclass(frozen=True)
class Transitions:
    """A copy of the log: when, which closure, into which state, at which worker (-1: none)."""

    time: array[float]
    id: array[int]
    state: array[int]
    worker: array[int]


class Store:
    """Rows of closures, the oldest dropped when there are too many; safe from any thread.

    Parameters
    ----------
    keep : int
        Closures of which everything is known; totals count all of them.
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
        self._log_worker = array("h")
        self._log_dropped = 0
        self._lost: deque[LostAttempt] = deque(maxlen=_KEPT_LOST)
        #: Grows with every change.
        self.version = 0

    # What happens

    def add(self, function: str, trace: str, value: weakref.ref[Any] | None) -> int:
        """Take in a closure that was queued; return its id."""
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
            self._note(now, key, QUEUED, -1)
        return key

    def dispatched(self, key: int, worker: int) -> None:
        """Note that a worker's thread has taken the closure."""
        now = time.perf_counter()
        with self._lock:
            row = key - self._first
            if row >= 0:
                self._dispatched[row] = now
                self._started[row] = self._fetching[row] = 0.0  # of an earlier attempt
                self._worker[row] = worker
                self._attempts[row] = min(self._attempts[row] + 1, 65_535)
            self._enter(now, key, DISPATCHED, worker)

    def running(self, key: int, worker: int) -> None:
        """Note that it is sent to its worker."""
        now = time.perf_counter()
        with self._lock:
            row = key - self._first
            if row >= 0:
                self._started[row] = now
            self._enter(now, key, RUNNING, worker)

    def fetch(self, key: int, worker: int) -> None:
        """Note that it has run, and that its result is on its way."""
        now = time.perf_counter()
        with self._lock:
            row = key - self._first
            if row >= 0:
                self._fetching[row] = now
            self._enter(now, key, FETCHING, worker)

    def end(self, key: int, state: int, worker: int = -1, error: str = "") -> None:
        """Note that it is ready, failed or cancelled."""
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
            self._enter(now, key, state, worker)
            if worker >= 0:
                counts = self._by_worker.setdefault(worker, [0] * len(STATES))
                counts[state] += 1

    def retry(self, key: int, worker: int, why: str) -> None:
        """Note that it goes back to the queue, because its worker was lost."""
        now = time.perf_counter()
        with self._lock:
            row = key - self._first
            if row >= 0:
                self._lost.append(LostAttempt(key, worker, self._dispatched[row], now))
                self._worker[row] = -1
                self._errors[key] = why
            self._enter(now, key, RETRYING, worker)
            if worker >= 0:
                counts = self._by_worker.setdefault(worker, [0] * len(STATES))
                counts[RETRYING] += 1

    def resource(self, worker: int, built: bool) -> None:
        """Note that a resource of a worker, such as its dataset's iterator, was built or failed."""
        with self._lock:
            done, failed = self._resources.get(worker, (0, 0))
            self._resources[worker] = (done + built, failed + (not built))
            self.version += 1

    def _enter(self, now: float, key: int, state: int, worker: int) -> None:
        row = key - self._first
        if row < 0:
            return
        self._counts[self._state[row]] -= 1
        self._counts[state] += 1
        self._state[row] = state
        self._note(now, key, state, worker)

    def _note(self, now: float, key: int, state: int, worker: int) -> None:
        self.version += 1
        self._log_time.append(now)
        self._log_id.append(key)
        self._log_state.append(state)
        self._log_worker.append(worker)
        if len(self._log_time) > 4 * self._keep:
            half = 2 * self._keep
            self._log_dropped += half
            for column in (self._log_time, self._log_id, self._log_state, self._log_worker):
                del column[:half]

    def _drop(self) -> None:
        """Forget the oldest closures, up to the first that has not ended."""
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

    # What is known

    def __len__(self) -> int:
        """How many closures there were, those dropped included."""
        return self._first + len(self._state)

    def counts(self) -> dict[str, int]:
        """Return how many closures are in each state, those dropped included."""
        with self._lock:
            return dict(zip(STATES, self._counts, strict=True))

    def workers(self) -> dict[int, dict[str, int]]:
        """Return for each worker how many ended there in which state, and how many it lost."""
        with self._lock:
            return {
                worker: dict(zip(STATES, counts, strict=True))
                for worker, counts in sorted(self._by_worker.items())
            }

    def traces(self) -> dict[str, int]:
        """Return how often each function was traced."""
        with self._lock:
            return {name: len(traces) for name, traces in self._traces.items()}

    def functions(self) -> Counter[str]:
        """Return how many closures of each function there were, those dropped included."""
        with self._lock:
            return Counter(dict(zip(self._functions, self._by_function, strict=True)))

    def resources(self) -> dict[int, tuple[int, int]]:
        """Return for each worker how many resources were built there, and how many failed."""
        with self._lock:
            return dict(self._resources)

    def value(self, key: int) -> Any:
        """Return the RemoteValue of a closure; None if nobody holds it any more.

        Raises
        ------
        KeyError
            There is no such closure, or it was dropped.
        """
        with self._lock:
            row = key - self._first
            if not 0 <= row < len(self._values):
                raise KeyError(key)
            reference = self._values[row]
        return reference() if reference is not None else None

    def state_of(self, key: int) -> int | None:
        """Return the state of a closure; None where it is not known."""
        with self._lock:
            row = key - self._first
            return self._state[row] if 0 <= row < len(self._state) else None

    def columns(self, latest: int | None = None, ended: bool = False) -> Columns:
        """Return a copy of all rows, or of the `latest`; with `ended`, up to the last one ready."""
        with self._lock:
            end = self._state.rfind(READY) + 1 if ended else len(self._state)
            rows = slice(0 if latest is None else max(0, end - latest), end)
            return self._copy(
                range(self._first + rows.start, self._first + end), lambda column: column[rows]
            )

    def columns_of(self, ids: Iterable[int]) -> Columns:
        """Return a copy of the rows of these closures, without those that are not known."""
        import numpy as np

        with self._lock:
            known = np.fromiter(ids, dtype=np.int64)
            known = known[(known >= self._first) & (known < self._first + len(self._state))]
            rows = known - self._first

            def taken(column: Any) -> Any:
                kind = column.typecode if isinstance(column, array) else "B"
                copied = np.frombuffer(column, dtype=kind)[rows].tobytes()
                return array(kind, copied) if isinstance(column, array) else copied

            return self._copy(known.tolist(), taken if len(rows) else lambda column: column[:0])

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
        """Return which closures changed since an earlier call, and the place to go on from.

        Parameters
        ----------
        since : int
            What the call before returned first; 0 at the beginning.

        Returns
        -------
        int, list of int or None
            None where that is too long ago to be known.
        """
        with self._lock:
            place = self._log_dropped + len(self._log_id)
            if since < self._log_dropped:
                return place, None
            return place, sorted(set(self._log_id[since - self._log_dropped :]))

    def lost_attempts(self) -> tuple[LostAttempt, ...]:
        """Return the latest attempts that ended because a worker was lost, the oldest first."""
        with self._lock:
            return tuple(self._lost)

    def _errors_of(self, keys: Sequence[int]) -> dict[int, str]:
        known = self._errors
        if isinstance(keys, range) and len(known) < len(keys):
            return {key: text for key, text in known.items() if key in keys}
        return {key: known[key] for key in keys if key in known}

    def times(self, keys: Sequence[int]) -> list[Times | None]:
        """Return when each of these closures was where; None for those that are not known."""
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
        """Return when the closures that were ready last were where, at most `count` of them."""
        with self._lock:
            places: list[int] = []
            states, place = self._log_state.tobytes(), len(self._log_state)
            while len(places) < count and (place := states.rfind(READY, 0, place)) >= 0:
                places.append(place)
            found = [self._times(self._log_id[place] - self._first) for place in places[::-1]]
        return [times for times in found if times is not None]

    def ended_between(self, moments: Sequence[float]) -> list[int]:
        """Return how many closures became ready or failed between each two of these moments.

        Parameters
        ----------
        moments : sequence of float
            In their order, in seconds of `time.perf_counter`.
        """
        with self._lock:
            places = [bisect_left(self._log_time, moment) for moment in moments]
            parts = [self._log_state[a:b].tobytes() for a, b in itertools.pairwise(places)]
        return [part.count(READY) + part.count(FAILED) for part in parts]

    def transitions(self, latest: int | None = None) -> Transitions:
        """Return a copy of the log, or of its `latest` entries."""
        with self._lock:
            start = 0 if latest is None else max(0, len(self._log_time) - latest)
            return Transitions(
                self._log_time[start:],
                self._log_id[start:],
                self._log_state[start:],
                self._log_worker[start:],
            )

    def unfinished(self) -> tuple[int, int]:
        """Return how many closures wait, and how many are in flight."""
        with self._lock:
            return (
                sum(self._counts[state] for state in _WAITING),
                sum(self._counts[state] for state in _IN_FLIGHT),
            )


def function_name(trace: str) -> str:
    """Return how the user called a function, from the name of one of its traces."""
    found = re.fullmatch(r"__(?:inference|forward)_(.*)_\d+", trace)
    return found[1] if found else trace


def function_names(functions: Any) -> set[str]:
    """Return the names of one or more functions, each a ``tf.function`` or a name; None is none."""
    if functions is None:
        return set()
    if isinstance(functions, str) or not isinstance(functions, (list, tuple, set)):
        functions = (functions,)
    return {each if isinstance(each, str) else _name_of(each) for each in functions}


def _name_of(function: Any) -> str:
    written = getattr(function, "python_function", None) or getattr(function, "name", function)
    name = getattr(written, "__name__", None)
    if name is None:
        raise UsageError(f"invalid function {function!r}", fix="pass a tf.function or its name")
    return str(name)
