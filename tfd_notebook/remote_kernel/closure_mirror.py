"""Closures of a coordinator in another kernel, as its bus tells of them."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfd_notebook.model.closure_store import EPOCH, STATES, Columns, LostAttempt

_TIMES = ("queued", "dispatched", "started", "fetching", "finished")
_CODES = {"function": "i", "worker": "h", "attempts": "H"}
#: Changes that a reader may be behind before it has to read everything.
_KEPT_CHANGES = 100


class ClosureStoreReplica:
    """What can be read of a `tfd_notebook.model.closure_store.Store`, of one that is elsewhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table: dict[str, Any] = {}
        self._functions: tuple[str, ...] = ()
        self._errors: dict[int, str] = {}
        self._lost: tuple[LostAttempt, ...] = ()
        self._counts: dict[str, int] = {}
        self._place = 0
        self._changes: deque[tuple[int, list[int]]] = deque(maxlen=_KEPT_CHANGES)
        self._whole_since = 0
        #: Whether what is queued does not move.
        self.paused = False

    def apply(self, head: Mapping[str, Any], buffers: Sequence[bytes]) -> None:
        """Take a message of the kind ``values``."""
        part = {
            name: np.frombuffer(buffer, dtype=f"<{kind}")
            for (name, kind), buffer in zip(head["columns"], buffers, strict=True)
        }
        with self._lock:
            self._place += 1
            self._functions = tuple(head["functions"])
            self._errors.update({int(key): text for key, text in head["errors"].items()})
            self._lost = tuple(
                LostAttempt(int(key), int(worker), start - EPOCH, end - EPOCH)
                for key, worker, start, end in head["lost"]
            )
            self.paused = bool(head["paused"])
            if head["whole"] or not self._table:
                self._table = {name: column.copy() for name, column in part.items()}
                self._whole_since = self._place
                self._changes.clear()
            else:
                self._merge(part)
                self._changes.append((self._place, part["id"].astype(int).tolist()))

    def _merge(self, part: Mapping[str, Any]) -> None:
        known, ids = self._table["id"], part["id"]
        at = np.searchsorted(known, ids)
        is_known = np.zeros(len(ids), dtype=bool)
        inside = at < len(known)
        is_known[inside] = known[at[inside]] == ids[inside]
        for name, column in part.items():
            self._table[name][at[is_known]] = column[is_known]
            if not is_known.all():
                self._table[name] = np.concatenate([self._table[name], column[~is_known]])

    def count(self, counts: Mapping[str, int]) -> None:
        """Learn how many closures are in each state, of all that there ever were."""
        self._counts = dict(counts)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def counts(self) -> dict[str, int]:
        """Return how many closures are in each state, for all that were ever scheduled."""
        counts = {state: self._counts.get(state, 0) for state in STATES}
        counts["queued"] += self._counts.get("paused", 0)
        return counts

    def value(self, key: int) -> Any:
        """Return None: results stay where they are."""
        if not len(self.columns_of([key])):
            raise KeyError(key)
        return None

    def columns(self, latest: int | None = None) -> Columns:
        """Return all rows that are known, or the `latest`."""
        with self._lock:
            rows = len(self._table.get("id", ()))
            return self._copy(np.arange(0 if latest is None else max(0, rows - latest), rows))

    def columns_of(self, ids: Iterable[int]) -> Columns:
        """Return the rows of these closures, without those that are not known."""
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
        taken: dict[str, Any] = {
            name: array(code, table[name][rows].astype(code).tobytes())
            for name, code in _CODES.items()
        }
        for name in _TIMES:
            moments = np.nan_to_num(table[name][rows] - EPOCH, nan=0.0)
            taken[name] = array("d", moments.tobytes())
        return Columns(
            ids,
            state=table["state"][rows].astype("u1").tobytes(),
            functions=self._functions,
            errors={key: self._errors[key] for key in ids if key in self._errors},
            **taken,
        )

    def changes(self, since: int) -> tuple[int, list[int] | None]:
        """Return which closures changed since an earlier call, and the place to go on from."""
        with self._lock:
            oldest = self._changes[0][0] - 1 if self._changes else self._place
            if since < max(self._whole_since, oldest):
                return self._place, None
            found = {key for place, ids in self._changes if place > since for key in ids}
            return self._place, sorted(found)

    def lost_attempts(self) -> tuple[LostAttempt, ...]:
        """Return the latest attempts that ended because a worker was lost."""
        return self._lost
