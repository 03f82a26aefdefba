"""Tables of tasks for front ends that look each second: whole at first, then what changed."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

from tfd_notebook.model import resolution
from tfd_notebook.model.resolution import Look, Sighting

#: The latest changes, which are all that a front end shows.
_MOST_CHANGES = 20
#: Tables that are remembered: front ends that look at other times have older ones.
_MOST_TABLES = 4
#: Latencies are told again when they differ by more than this factor, and these milliseconds.
_FACTOR, _MILLISECONDS = 2.0, 5.0

#: Numbers of tables. A kernel that was restarted gives none again that a front end still has.
_numbers = itertools.count(time.time_ns() // 1_000_000)


class Told:
    """What front ends know of one cluster."""

    def __init__(self) -> None:
        self._tables: dict[int, dict[str, Sighting]] = {}

    def tell(self, look: Look, since: Any = None) -> dict[str, Any]:
        """Return `look` as JSON values.

        Parameters
        ----------
        look : Look
        since : int, optional
            ``number`` of the table that the front end has. If it has the same tasks, ``tasks`` are
            those that changed, and ``since`` says so; else all, and ``since`` is None.
        """
        number, table = self._number(look)
        known = self._tables.get(since) if isinstance(since, int) else None
        if known is None or list(known) != list(table):
            since, known = None, {}
        rows = [task for name, task in table.items() if known.get(name) != task]
        brief = replace(look, tasks=(), changes=look.changes[-_MOST_CHANGES:])
        return {
            **resolution.as_json(brief),
            "counts": look.counts,
            "tasks": resolution.records(rows),
            "changed": len(look.changes),
            "number": number,
            "since": since,
        }

    def _number(self, look: Look) -> tuple[int, dict[str, Sighting]]:
        """Return the table that is told for `look`, and its number: a new one if it is another."""
        last, before = next(reversed(self._tables.items()), (0, {}))
        table = {task.name: task for task in look.tasks}
        for name, task in table.items():
            if name in before and _alike(before[name], task):
                table[name] = before[name]
        if self._tables and list(table.items()) == list(before.items()):
            return last, before
        number = next(_numbers)
        self._tables[number] = table
        for oldest in list(self._tables)[:-_MOST_TABLES]:
            del self._tables[oldest]
        return number, table


def _alike(before: Sighting, now: Sighting) -> bool:
    """Whether only the latency differs, and not by much."""
    least, most = sorted((before.latency_ms, now.latency_ms))
    near = most <= _FACTOR * least or most - least <= _MILLISECONDS
    return near and {**vars(before), "latency_ms": 0} == {**vars(now), "latency_ms": 0}
