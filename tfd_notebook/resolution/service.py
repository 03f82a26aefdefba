"""Resolutions for magics, the command line, and forms in a browser."""

from __future__ import annotations

import itertools
import json
import keyword
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tfd_notebook.errors import UsageError
from tfd_notebook.model.resolution import ResolutionSnapshot, TaskStatus, as_json, records
from tfd_notebook.resolution import factory
from tfd_notebook.resolution.resolution import Resolution, resolve

#: Maximum number of resolutions kept for forms. Each has open connections and a history.
_MAX_RESOLUTIONS = 4


def read_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Return the options of ``NAME=VALUE`` pairs. A value that is not valid JSON is a string.

    Raises
    ------
    UsageError
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not _is_name(name):
            raise UsageError(f"invalid option {pair!r}", fix="write NAME=VALUE, such as port=8470")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


class ResolveService:
    """The commands of forms. Equal requests share a resolution and its history."""

    def __init__(self) -> None:
        self._resolutions: dict[str, tuple[Resolution, TaskTableDelta]] = {}

    def choices(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the choices of resolvers, as JSON values."""
        choices = [{"name": name, "summary": text} for name, text in factory.CHOICES.items()]
        return {"choices": choices}

    def resolve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the snapshot of a resolution, as JSON values.

        Parameters
        ----------
        request : mapping
            ``resolver`` and ``options`` select the resolution. ``probe`` is true to probe the
            tasks of a kept resolution. ``last_number`` is the ``number`` of the front end's last
            answer. The answer then contains only changed tasks and the same ``last_number``. If
            that answer is no longer kept, it contains all tasks, and ``last_number`` is None.
        """
        probe = request.get("probe") is True
        resolution, delta = self._entry(request, fresh=not probe)
        is_resolved = resolution.resolver is not None
        snapshot = resolution.probe(raises=False) if probe and is_resolved else resolution.last
        return {**delta.message(snapshot, request.get("last_number")), "resolved": is_resolved}

    def resolution(self, request: Mapping[str, Any], fresh: bool = False) -> Resolution:
        """Return the resolution of `request`. If `fresh`, discard a kept one first."""
        return self._entry(request, fresh)[0]

    def _entry(self, request: Mapping[str, Any], fresh: bool) -> tuple[Resolution, TaskTableDelta]:
        resolver, options = request.get("resolver", "auto"), request.get("options") or {}
        if not isinstance(resolver, str) or len(resolver) > 1000:
            raise UsageError(f"invalid name of a resolver: {str(resolver)[:100]!r}")
        if not isinstance(options, Mapping) or not all(map(_is_name, options)):
            raise UsageError(f"invalid options {str(options)[:100]!r}", fix='write {"port": 8470}')
        key = json.dumps([resolver, options], sort_keys=True)
        if fresh or key not in self._resolutions:
            self._discard(key)
            self._resolutions[key] = resolve(resolver, **options), TaskTableDelta()
            for oldest in list(self._resolutions)[:-_MAX_RESOLUTIONS]:
                self._discard(oldest)
        return self._resolutions[key]

    def close(self) -> None:
        """Discard all resolutions and close their connections."""
        for key in list(self._resolutions):
            self._discard(key)

    def _discard(self, key: str) -> None:
        entry = self._resolutions.pop(key, None)
        if entry is not None:
            entry[0].close()


def _is_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and name != "resolver"
    )


#: Maximum number of changes in an answer: the number that a front end shows.
_MAX_CHANGES = 20
#: Maximum number of kept tables. Front ends that update at other times have older ones.
_MAX_TABLES = 4
#: A latency counts as changed if it differs by more than this factor and these milliseconds.
_FACTOR, _MILLISECONDS = 2.0, 5.0

#: Numbers of tables. They start at the time, so that a restarted kernel repeats no number.
_numbers = itertools.count(time.time_ns() // 1_000_000)


class TaskTableDelta:
    """Changes of the task table of a cluster since a front end's last answer."""

    def __init__(self) -> None:
        self._tables: dict[int, dict[str, TaskStatus]] = {}

    def message(self, snapshot: ResolutionSnapshot, last_number: Any = None) -> dict[str, Any]:
        """Return `snapshot` as JSON values.

        Parameters
        ----------
        snapshot : ResolutionSnapshot
        last_number : int, optional
            ``number`` of the front end's table. If it has the same tasks in the same order,
            ``tasks`` are the changed ones, and ``last_number`` is returned. Otherwise ``tasks``
            are all, and ``last_number`` is None.
        """
        number, table = self._number(snapshot)
        known = self._tables.get(last_number) if isinstance(last_number, int) else None
        if known is None or list(known) != list(table):
            last_number, known = None, {}
        rows = [task for name, task in table.items() if known.get(name) != task]
        brief = replace(snapshot, tasks=(), changes=snapshot.changes[-_MAX_CHANGES:])
        return {
            **as_json(brief),
            "counts": snapshot.counts,
            "tasks": records(rows),
            "changed": len(snapshot.changes),
            "number": number,
            "last_number": last_number,
        }

    def _number(self, snapshot: ResolutionSnapshot) -> tuple[int, dict[str, TaskStatus]]:
        """Return the number of the table of `snapshot`, new if the table changed, and the table."""
        last, before = next(reversed(self._tables.items()), (0, {}))
        table = {task.name: task for task in snapshot.tasks}
        for name, task in table.items():
            if name in before and _is_similar(before[name], task):
                table[name] = before[name]
        if self._tables and list(table.items()) == list(before.items()):
            return last, before
        number = next(_numbers)
        self._tables[number] = table
        for oldest in list(self._tables)[:-_MAX_TABLES]:
            del self._tables[oldest]
        return number, table


def _is_similar(before: TaskStatus, now: TaskStatus) -> bool:
    """Return True if only the latency differs, within `_FACTOR` or `_MILLISECONDS`."""
    least, most = sorted((before.latency_ms, now.latency_ms))
    is_near = most <= _FACTOR * least or most - least <= _MILLISECONDS
    return is_near and {**vars(before), "latency_ms": 0} == {**vars(now), "latency_ms": 0}
