"""The closures of a coordinator as typed columns: all of them once, then those that changed."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

from tfd_notebook.model.closure_store import EPOCH, Columns, Store

#: What travels of each closure, and as what; times are seconds since the epoch, NaN for never.
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
#: Closures that are sent; of more, the latest.
MOST = 100_000
_MOST_ERRORS = 1_000
_MOST_ERROR = 300
#: More changes than this at once are sent as a whole.
_MOST_CHANGED = 20_000

Message = tuple[dict[str, Any], list[bytes]]


class ColumnFeed:
    """What a reader has been told of the closures in `store`, and what changed since.

    Parameters
    ----------
    store : Store
    paused : callable
        Whether what is queued does not move now.
    """

    def __init__(self, store: Store, paused: Callable[[], bool] = lambda: False) -> None:
        self.store = store
        self._paused = paused
        self._place: int | None = None
        self._was_paused = False

    def whole(self) -> Message:
        """Return all closures that are sent, from which the next changes count."""
        self._place, _ = self.store.changes(0)
        return self._message(self.store.columns(MOST), whole=True)

    def changes(self) -> Message | None:
        """Return the closures that changed, None where none did."""
        if self._place is None:
            return self.whole()
        place, ids = self.store.changes(self._place)
        if ids is None or len(ids) > _MOST_CHANGED:
            return self.whole()
        paused = self._paused()
        if not ids and paused == self._was_paused:
            return None
        self._place = place
        return self._message(self.store.columns_of(ids), whole=False)

    def _message(self, seen: Columns, whole: bool) -> Message:
        self._was_paused = self._paused()
        errors = {
            str(key): text[:_MOST_ERROR] for key, text in list(seen.errors.items())[-_MOST_ERRORS:]
        }
        head = {
            "whole": whole,
            "count": len(seen),
            "columns": [list(column) for column in COLUMNS],
            "functions": list(seen.functions),
            "errors": errors,
            "lost": [
                [lost.id, lost.worker, lost.dispatched + EPOCH, lost.ended + EPOCH]
                for lost in self.store.lost_attempts()
            ],
            "paused": self._was_paused,
            "now": time.perf_counter() + EPOCH,
            "most": MOST,
        }
        return head, [_bytes(seen, name, kind) for name, kind in COLUMNS]


def _bytes(seen: Columns, name: str, kind: str) -> bytes:
    if name == "id":
        return array("d", seen.ids).tobytes()
    column = getattr(seen, name)
    if isinstance(column, bytes):
        return column
    if kind != "f8":
        return bytes(column.tobytes())
    import numpy as np

    moments = np.frombuffer(column, dtype=np.float64)
    return np.where(moments > 0, moments + EPOCH, np.nan).tobytes()
