"""`Values`: every RemoteValue of a coordinator, as counts, as a table, one by one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfd_notebook import views
from tfd_notebook.errors import UnknownName, UsageError, ValueGone
from tfd_notebook.model.closure_store import EPOCH, STATES, Columns, Store

if TYPE_CHECKING:
    import pandas as pd

#: Columns of ``coordinator.values.to_frame()``, promised to other programs.
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

#: What `Values.counts` counts.
VALUE_STATES = ("queued", "paused", *STATES[1:])


class Values:
    """What became of the closures that a coordinator was given.

    Parameters
    ----------
    store : Store
    paused : callable
        Whether what is queued does not move now.
    """

    def __init__(self, store: Store, paused: Callable[[], bool]) -> None:
        self._store = store
        self._paused = paused

    def __len__(self) -> int:
        return len(self._store)

    def counts(self) -> dict[str, int]:
        """Return how many closures are in each state, for all that were ever scheduled.

        While the coordinator is paused those that are queued count as ``paused``.
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
            There is no such closure, or it is too long ago.
        ValueGone
            Nobody else holds it any more.
        """
        try:
            found = self._store.value(id)
        except KeyError:
            raise _unknown(id) from None
        if found is None:
            raise ValueGone(
                f"nobody holds the RemoteValue of closure {id} any more, so its result is gone",
                fix="keep what schedule() returns, or schedule the function again",
            )
        return found

    def to_frame(self, latest: int | None = None) -> pd.DataFrame:
        """Return a row for each closure that is kept, or for the `latest`.

        Returns
        -------
        pandas.DataFrame
            With the columns `VALUE_COLUMNS`. Times are in UTC; durations are in milliseconds and of
            the latest attempt; `worker` is -1 where none has it.
        """
        import numpy as np
        import pandas as pd

        seen = self._store.columns(latest)
        times = {
            name: np.array(getattr(seen, name), dtype=float)
            for name in ("queued", "dispatched", "started", "fetching", "finished")
        }
        times = {name: np.where(column > 0, column, np.nan) for name, column in times.items()}
        states = np.array(STATES, dtype=object)[np.frombuffer(seen.state, dtype=np.uint8)]
        if self._paused():
            states[states == "queued"] = "paused"

        def stamp(name: str) -> Any:
            return pd.to_datetime(_wall(times[name]) * 1e9)

        return pd.DataFrame(
            {
                "id": np.array(seen.ids, dtype=int),
                "function": pd.Categorical.from_codes(
                    np.array(seen.function, dtype=int), list(seen.functions)
                ),
                "state": states,
                "worker": np.array(seen.worker, dtype=int),
                "attempts": np.array(seen.attempts, dtype=int),
                "queued": stamp("queued"),
                "dispatched": stamp("dispatched"),
                "started": stamp("started"),
                "finished": stamp("finished"),
                "queue_ms": (times["dispatched"] - times["queued"]) * 1e3,
                "run_ms": (times["fetching"] - times["started"]) * 1e3,
                "fetch_ms": (times["finished"] - times["fetching"]) * 1e3,
                "error": [seen.errors.get(key, "") for key in seen.ids],
            },
            columns=list(VALUE_COLUMNS),
        )

    def records(
        self, latest: int, state: str | None = None, worker: int | None = None
    ) -> list[dict[str, Any]]:
        """Return up to `latest` rows that fit, the latest last, as JSON values."""
        seen = self._store.columns(latest if state is None and worker is None else None)
        paused = self._paused()
        found: list[dict[str, Any]] = []
        for row in range(len(seen) - 1, -1, -1):
            word = STATES[seen.state[row]]
            word = "paused" if paused and word == "queued" else word
            if state not in (None, word) or worker not in (None, seen.worker[row]):
                continue
            found.append(_record(seen, row, word))
            if len(found) == latest:
                break
        return found[::-1]

    def record(self, id: int) -> dict[str, Any]:
        """Return what is known of one closure, as JSON values with the names of `VALUE_COLUMNS`.

        Raises
        ------
        UnknownName
            There is no such closure, or it is too long ago.
        """
        seen = self._store.columns_of([id])
        if not len(seen):
            raise _unknown(id)
        word = STATES[seen.state[0]]
        return _record(seen, 0, "paused" if self._paused() and word == "queued" else word)

    def table(
        self, rows: int = 20, state: str | None = None, worker: int | None = None
    ) -> views.Table:
        """Return the latest closures that fit, the latest last, and how many there are in all.

        Parameters
        ----------
        rows : int
            At most so many. Default 20.
        state : str, optional
            Only those in this state, one of `VALUE_STATES`.
        worker : int, optional
            Only those that this worker has or had last.

        Raises
        ------
        UsageError
            `rows` is not 1 or more, or there is no such state.
        """
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise UsageError(f"rows={rows!r} must be 1 or more")
        if state is not None and state not in VALUE_STATES:
            raise UnknownName(
                f"closures have no state {state!r}", fix=f"use {', '.join(VALUE_STATES)}"
            )
        return views.values_table(self.records(rows, state, worker), self.counts())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        table = self.table()
        return {"text/plain": f"{self!r}\n{table.text()}", "text/html": table.html()}

    def __repr__(self) -> str:
        counts = ", ".join(f"{count:,} {state}" for state, count in self.counts().items() if count)
        return f"<{len(self):,} RemoteValues: {counts or 'none yet'}>"


def _unknown(id: Any) -> UnknownName:
    return UnknownName(
        f"there is no closure {id!r}, or it is too long ago",
        fix="see %tfd_values for those that are known",
    )


#: Seconds by which the wall clock has to differ before the time that is shown follows it.
_STEP_SECONDS = 1.0


def _wall(moment: Any) -> Any:
    """Return a moment of `time.perf_counter` in seconds since the epoch, for display.

    It is `EPOCH` later, unless the wall clock has made a step or the host was suspended since.
    """
    offset = time.time() - time.perf_counter()
    return moment + (offset if abs(offset - EPOCH) > _STEP_SECONDS else EPOCH)


def _record(seen: Columns, row: int, state: str) -> dict[str, Any]:
    def between(start: float, end: float) -> float | None:
        return round((end - start) * 1e3, 3) if start and end and end >= start else None

    def stamp(moment: float) -> float | None:
        return float(_wall(moment)) if moment else None

    return {
        "id": seen.ids[row],
        "function": seen.functions[seen.function[row]],
        "state": state,
        "worker": seen.worker[row],
        "attempts": seen.attempts[row],
        "queued": stamp(seen.queued[row]),
        "dispatched": stamp(seen.dispatched[row]),
        "started": stamp(seen.started[row]),
        "finished": stamp(seen.finished[row]),
        "queue_ms": between(seen.queued[row], seen.dispatched[row]),
        "run_ms": between(seen.started[row], seen.fetching[row]),
        "fetch_ms": between(seen.fetching[row], seen.finished[row]),
        "error": seen.errors.get(seen.ids[row], ""),
    }


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """Return the 50th, 90th and 99th percentile; NaN where there is nothing."""
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return (math.nan, math.nan, math.nan)
    last = len(ordered) - 1
    return tuple(ordered[round(share * last)] for share in (0.5, 0.9, 0.99))  # type: ignore[return-value]
