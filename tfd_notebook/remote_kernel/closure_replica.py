"""Replica of the closures of a coordinator in another kernel."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfd_notebook.bus import closure_feed
from tfd_notebook.model.closure_store import EPOCH, STATES, Columns, LostAttempt

_TIMES = ("queued", "dispatched", "started", "fetching", "finished")
_CODES = {"function": "i", "worker": "h", "attempts": "H"}
#: Changes that are kept. A reader that is further behind has to read all rows.
_KEPT_CHANGES = 100


class ClosureStoreReplica:
    """Read-only replica of a `tfd_notebook.model.closure_store.Store` in another kernel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table: dict[str, Any] = {}
        self._functions: tuple[str, ...] = ()
        self._errors: dict[int, str] = {}
        self._lost: tuple[LostAttempt, ...] = ()
        self._counts: dict[str, int] = {}
        self._position = 0
        self._changes: deque[tuple[int, list[int]]] = deque(maxlen=_KEPT_CHANGES)
        self._last_full = 0
        #: True while queued closures are not dispatched.
        self.paused = False

    def apply(self, head: Mapping[str, Any], buffers: Sequence[bytes]) -> None:
        """Apply a message of the kind ``values``."""
        part = {
            name: np.frombuffer(buffer, dtype=f"<{kind}")
            for (name, kind), buffer in zip(head["columns"], buffers, strict=True)
        }
        is_full = head["full"] or not self._table
        # The limits of the sender, which may not keep them.
        most = closure_feed.MAX_ROWS if is_full else closure_feed.MAX_CHANGED
        if any(len(column) > most for column in part.values()):
            raise ValueError(f"more than {most} rows")
        with self._lock:
            self._position += 1
            self._functions = tuple(head["functions"])
            errors = self._errors | {int(key): text for key, text in head["errors"].items()}
            self._errors = dict(list(errors.items())[-closure_feed.MAX_ERRORS :])
            self._lost = tuple(
                LostAttempt(int(key), int(worker), start - EPOCH, end - EPOCH)
                for key, worker, start, end in head["lost"]
            )
            self.paused = bool(head["paused"])
            if is_full:
                self._table = {name: column.copy() for name, column in part.items()}
                self._last_full = self._position
                self._changes.clear()
            else:
                self._merge(part)
                self._changes.append((self._position, part["id"].astype(int).tolist()))

    def _merge(self, part: Mapping[str, Any]) -> None:
        known, ids = self._table["id"], part["id"]
        positions = np.searchsorted(known, ids)
        is_known = np.zeros(len(ids), dtype=bool)
        inside = positions < len(known)
        is_known[inside] = known[positions[inside]] == ids[inside]
        for name, column in part.items():
            self._table[name][positions[is_known]] = column[is_known]
            if not is_known.all():
                joined = np.concatenate([self._table[name], column[~is_known]])
                self._table[name] = joined[-closure_feed.MAX_ROWS :].copy()

    def count(self, counts: Mapping[str, int]) -> None:
        """Set the number of closures by state, of all closures ever scheduled."""
        self._counts = dict(counts)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def counts(self) -> dict[str, int]:
        """Return the number of closures by state, of all closures ever scheduled."""
        counts = {state: self._counts.get(state, 0) for state in STATES}
        counts["queued"] += self._counts.get("paused", 0)
        return counts

    def value(self, key: int) -> Any:
        """Return None, because results stay in the other kernel."""
        if not len(self.columns_of([key])):
            raise KeyError(key)
        return None

    def columns(self, latest: int | None = None) -> Columns:
        """Return all known rows, or the `latest` ones."""
        with self._lock:
            rows = len(self._table.get("id", ()))
            return self._copy(np.arange(0 if latest is None else max(0, rows - latest), rows))

    def columns_of(self, ids: Iterable[int]) -> Columns:
        """Return the known rows of these closures."""
        with self._lock:
            known = self._table.get("id", np.empty(0))
            return self._copy(np.flatnonzero(np.isin(known, np.fromiter(ids, dtype=float))))

    def _copy(self, rows: Any) -> Columns:
        table = self._table
        if not table:
            empty: dict[str, Any] = {name: array(code) for name, code in _CODES.items()}
            times: dict[str, Any] = {name: array("d") for name in _TIMES}
            return Columns([], state=b"", functions=(), errors={}, **empty, **times)
        ids = table["id"][rows].astype(int).tolist()
        columns: dict[str, Any] = {
            name: array(code, table[name][rows].astype(code).tobytes())
            for name, code in _CODES.items()
        }
        for name in _TIMES:
            times_s = np.nan_to_num(table[name][rows] - EPOCH, nan=0.0)
            columns[name] = array("d", times_s.tobytes())
        return Columns(
            ids,
            state=table["state"][rows].astype("u1").tobytes(),
            functions=self._functions,
            errors={key: self._errors[key] for key in ids if key in self._errors},
            **columns,
        )

    def changes(self, since: int) -> tuple[int, list[int] | None]:
        """Return the current position, and the closures that changed after position `since`.

        None instead of closures means that all rows must be read.
        """
        with self._lock:
            oldest = self._changes[0][0] - 1 if self._changes else self._position
            if since < max(self._last_full, oldest):
                return self._position, None
            changed = {key for position, ids in self._changes if position > since for key in ids}
            return self._position, sorted(changed)

    def lost_attempts(self) -> tuple[LostAttempt, ...]:
        """Return the latest attempts that ended because a worker was lost."""
        return self._lost
