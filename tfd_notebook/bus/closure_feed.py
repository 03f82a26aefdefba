"""The closures of a coordinator as typed columns: first all of them, then the changed ones."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

from tfd_notebook.model.closure_store import EPOCH, Columns, Store
from tfd_notebook.views import short_error

#: Name and type of each sent column. Times are in seconds since the epoch, NaN for never.
COLUMNS = (
    ("id", "f8"),
    ("function", "i4"),
    ("state", "u1"),
    ("worker", "i2"),
    ("attempts", "u2"),
    ("queued", "f8"),
    ("dispatched", "f8"),
    ("started", "f8"),
    ("fetching", "f8"),
    ("finished", "f8"),
)
#: Maximum number of sent closures. If there are more, the latest are sent.
MAX_ROWS = 100_000
MAX_ERRORS = 1_000
#: If more closures have changed, all of them are sent.
MAX_CHANGED = 20_000

Message = tuple[dict[str, Any], list[bytes]]


class ColumnFeed:
    """Encoder of a store's closures, which sends only changes after the first message.

    Parameters
    ----------
    store : Store
    paused : callable
        Returns True while queued closures are not dispatched.
    """

    def __init__(self, store: Store, paused: Callable[[], bool] = lambda: False) -> None:
        self.store = store
        self._paused = paused
        self._position: int | None = None
        self._was_paused = False

    def full(self) -> Message:
        """Return the latest closures, and restart the tracking of changes."""
        self._position, _ = self.store.changes(0)
        return self._message(self.store.columns(MAX_ROWS), full=True)

    def changes(self) -> Message | None:
        """Return the closures that have changed, or None if none have."""
        if self._position is None:
            return self.full()
        position, ids = self.store.changes(self._position)
        if ids is None or len(ids) > MAX_CHANGED:
            return self.full()
        paused = self._paused()
        if not ids and paused == self._was_paused:
            return None
        self._position = position
        return self._message(self.store.columns_of(ids), full=False)

    def _message(self, columns: Columns, full: bool) -> Message:
        self._was_paused = self._paused()
        errors = {
            str(key): short_error(text) for key, text in list(columns.errors.items())[-MAX_ERRORS:]
        }
        head = {
            "full": full,
            "count": len(columns),
            "columns": [list(column) for column in COLUMNS],
            "functions": list(columns.functions),
            "errors": errors,
            "lost": [
                [lost.id, lost.worker, lost.dispatched + EPOCH, lost.ended + EPOCH]
                for lost in self.store.lost_attempts()
            ],
            "paused": self._was_paused,
            "now": time.perf_counter() + EPOCH,
            "max_rows": MAX_ROWS,
        }
        return head, [_bytes(columns, name, kind) for name, kind in COLUMNS]


def _bytes(columns: Columns, name: str, kind: str) -> bytes:
    if name == "id":
        return array("d", columns.ids).tobytes()
    column = getattr(columns, name)
    if isinstance(column, bytes):
        return column
    if kind != "f8":
        return bytes(column.tobytes())
    import numpy as np

    moments = np.frombuffer(column, dtype=np.float64)
    return np.where(moments > 0, moments + EPOCH, np.nan).tobytes()
