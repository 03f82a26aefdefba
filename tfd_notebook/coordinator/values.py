"""`Values`: the RemoteValues of a coordinator as counts, as tables, and by id."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfd_notebook import views
from tfd_notebook.errors import UnknownName, UsageError, ValueGone, one_of
from tfd_notebook.model.closure_store import EPOCH, STATES, Columns, Store
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.spec import check_count
from tfd_notebook.views.formatting import plural

if TYPE_CHECKING:
    import pandas as pd

#: Columns of ``coordinator.values.to_frame()``, a public interface.
VALUE_COLUMNS = (
    "id",
    "function",
    "state",
    "worker",
    "attempts",
    "queued",
    "dispatched",
    "started",
    "finished",
    "queue_ms",
    "run_ms",
    "fetch_ms",
    "error",
)

#: The number of `numpy.datetime64` for a missing time.
_NOT_A_TIME = -(2.0**63)

#: Number of the latest closures that `Values.records` searches before it searches all.
_FIRST_ROWS = 10_000

#: Keys of `Values.counts`.
VALUE_STATES = ("queued", "paused", *STATES[1:])


class Values(Handle):
    """The closures of a coordinator, their states and results.

    Parameters
    ----------
    store : Store
    paused : callable
        Returns True while queued closures are not dispatched.
    """

    def __init__(self, store: Store, paused: Callable[[], bool]) -> None:
        self._store = store
        self._paused = paused

    def __len__(self) -> int:
        return len(self._store)

    def counts(self) -> dict[str, int]:
        """Return the number of closures in each state, for all closures ever scheduled.

        While the coordinator is paused, queued closures count as ``paused``.
        """
        counts = {"paused": 0, **self._store.counts()}
        if self._paused():
            counts["paused"], counts["queued"] = counts["queued"], 0
        return {state: counts[state] for state in VALUE_STATES}

    def value(self, id: int) -> Any:
        """Return the RemoteValue of a closure.

        Raises
        ------
        UnknownName
            The closure does not exist, or its record was discarded.
        ValueGone
            The RemoteValue was garbage-collected.
        """
        try:
            remote_value = self._store.value(id)
        except KeyError:
            raise _unknown(id) from None
        if remote_value is None:
            raise ValueGone(
                f"the RemoteValue of closure {id} was garbage-collected with its result",
                fix="keep the result of schedule(), or schedule the function again",
            )
        return remote_value

    def to_frame(self, latest: int | None = None) -> pd.DataFrame:
        """Return a row for each recorded closure, or for the `latest`.

        Returns
        -------
        pandas.DataFrame
            Has the columns `VALUE_COLUMNS`. Times are in UTC. Durations are those of the latest
            attempt, in milliseconds. ``worker`` is -1 if the closure was not dispatched.
        """
        import numpy as np
        import pandas as pd

        if latest is not None:
            check_count("latest", latest, None, 1)
        columns = self._store.columns(latest)
        times = {
            name: np.frombuffer(getattr(columns, name), dtype=float)
            for name in ("queued", "dispatched", "started", "fetching", "finished")
        }
        # A failed closure has no result to fetch.
        times["ran_until"] = np.where(times["fetching"] > 0, times["fetching"], times["finished"])
        names = ["paused" if self._paused() and name == "queued" else name for name in STATES]
        errors = np.full(len(columns), "", dtype=object)
        for row, key in enumerate(columns.ids) if columns.errors else ():
            errors[row] = columns.errors.get(key, "")

        def stamp(name: str) -> Any:
            nanoseconds = np.where(times[name] > 0, _wall(times[name]) * 1e9, _NOT_A_TIME)
            return nanoseconds.astype(np.int64).view("datetime64[ns]")

        def between(start: str, end: str) -> Any:
            is_known = (times[start] > 0) & (times[end] > 0)
            return np.where(is_known, (times[end] - times[start]) * 1e3, np.nan)

        return pd.DataFrame(
            {
                "id": np.array(columns.ids, dtype=int),
                "function": pd.Categorical.from_codes(
                    np.array(columns.function, dtype=int), list(columns.functions)
                ),
                "state": np.array(names, dtype=object)[np.frombuffer(columns.state, np.uint8)],
                "worker": np.array(columns.worker, dtype=int),
                "attempts": np.array(columns.attempts, dtype=int),
                "queued": stamp("queued"),
                "dispatched": stamp("dispatched"),
                "started": stamp("started"),
                "finished": stamp("finished"),
                "queue_ms": between("queued", "dispatched"),
                "run_ms": between("started", "ran_until"),
                "fetch_ms": between("fetching", "finished"),
                "error": errors,
            },
            columns=list(VALUE_COLUMNS),
        )

    def records(
        self, latest: int, state: str | None = None, worker: int | None = None
    ) -> list[dict[str, Any]]:
        """Return up to `latest` matching rows, the latest last, as JSON values."""
        import numpy as np

        paused = self._paused()
        names = ["paused" if paused and name == "queued" else name for name in STATES]
        for count in (max(latest, _FIRST_ROWS), None):  # the latest are usually enough
            columns = self._store.columns(count)
            fits = np.ones(len(columns), dtype=bool)
            if state is not None:
                code = names.index(state) if state in names else -1
                fits &= np.frombuffer(columns.state, dtype=np.uint8) == code
            if worker is not None:
                fits &= np.frombuffer(columns.worker, dtype=columns.worker.typecode) == worker
            rows = np.flatnonzero(fits)[-latest:].tolist()
            if len(rows) == latest:
                break
        return [_record(columns, row, names[columns.state[row]]) for row in rows]

    def record(self, id: int) -> dict[str, Any]:
        """Return the record of a closure, as JSON values with the names of `VALUE_COLUMNS`.

        Raises
        ------
        UnknownName
            The closure does not exist, or its record was discarded.
        UsageError
            `id` is not an integer, 0 or more.
        """
        check_count("id", id, None)
        columns = self._store.columns_of([id] if id < len(self._store) else [])
        if not len(columns):
            raise _unknown(id)
        name = STATES[columns.state[0]]
        return _record(columns, 0, "paused" if self._paused() and name == "queued" else name)

    def table(
        self, rows: int = 20, state: str | None = None, worker: int | None = None
    ) -> views.Table:
        """Return the table of the latest matching closures, the latest last, with the totals.

        Parameters
        ----------
        rows : int
            Maximum number of rows. Default 20.
        state : str, optional
            Only closures in this state, one of `VALUE_STATES`.
        worker : int, optional
            Only closures that were last dispatched to this worker.

        Raises
        ------
        UsageError
            `rows` is not 1 or more, or the state is unknown.
        """
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise UsageError(f"invalid rows {rows!r}: expected 1 or more")
        if state is not None and state not in VALUE_STATES:
            raise UnknownName(
                f"unknown state {state!r} of closures", fix=one_of(state, VALUE_STATES)
            )
        return views.values_table(self.records(rows, state, worker), self.counts())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        table = self.table()
        return {"text/plain": f"{self!r}\n{table.text()}", "text/html": table.html()}

    def __repr__(self) -> str:
        counts = ", ".join(f"{count:,} {state}" for state, count in self.counts().items() if count)
        return f"<{plural(len(self), 'RemoteValue')}: {counts or 'none yet'}>"


def _unknown(id: Any) -> UnknownName:
    return UnknownName(
        f"unknown closure {id!r}, or its record was discarded",
        fix="see %tfd_values for the recorded closures",
    )


#: Difference in seconds from the wall clock above which displayed times are corrected.
_STEP_SECONDS = 1.0


def _wall(moment: Any) -> Any:
    """Convert a `time.perf_counter` value to seconds since the epoch, for display.

    The offset is `EPOCH`, unless the wall clock was set or the host was suspended since.
    """
    offset = time.time() - time.perf_counter()
    return moment + (offset if abs(offset - EPOCH) > _STEP_SECONDS else EPOCH)


def _record(columns: Columns, row: int, state: str) -> dict[str, Any]:
    def between(start: float, end: float) -> float | None:
        return round((end - start) * 1e3, 3) if start and end and end >= start else None

    def stamp(moment: float) -> float | None:
        return float(_wall(moment)) if moment else None

    return {
        "id": columns.ids[row],
        "function": columns.functions[columns.function[row]],
        "state": state,
        "worker": columns.worker[row],
        "attempts": columns.attempts[row],
        "queued": stamp(columns.queued[row]),
        "dispatched": stamp(columns.dispatched[row]),
        "started": stamp(columns.started[row]),
        "finished": stamp(columns.finished[row]),
        "queue_ms": between(columns.queued[row], columns.dispatched[row]),
        "run_ms": between(columns.started[row], columns.fetching[row] or columns.finished[row]),
        "fetch_ms": between(columns.fetching[row], columns.finished[row]),
        "error": columns.errors.get(columns.ids[row], ""),
    }


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """Return p50, p90 and p99, or NaN if there are no values."""
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return (math.nan, math.nan, math.nan)
    last = len(ordered) - 1
    return tuple(ordered[round(share * last)] for share in (0.5, 0.9, 0.99))  # type: ignore[return-value]
