"""Resolving by request: for lines, whose values are words, and for forms in a browser."""

from __future__ import annotations

import itertools
import json
import keyword
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tfd_notebook.errors import UsageError
from tfd_notebook.model import resolution
from tfd_notebook.model.resolution import ResolutionSnapshot, TaskStatus
from tfd_notebook.resolution import factory
from tfd_notebook.resolution.resolution import Resolution, resolve

#: Resolutions that are kept for forms: each has open connections, and a history.
_MOST_KEPT = 4


def read_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Return what ``NAME=VALUE`` says; a value is JSON where it can be read so, else text.

    Raises
    ------
    UsageError
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not _is_name(name):
            raise UsageError(f"{pair!r} sets nothing", fix="write NAME=VALUE, such as port=8470")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


class ResolveService:
    """Answers forms: the same question again is the same resolution, with its history."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Resolution, TaskTableDelta]] = {}

    def choices(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what can be chosen, as JSON values."""
        return {
            "choices": [{"name": name, "summary": said} for name, said in factory.CHOICES.items()]
        }

    def resolve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is seen, as JSON values.

        Parameters
        ----------
        request : mapping
            ``resolver``, ``options``, ``again``: whether to look at what was found before, and
            ``since``: the ``number`` of the answer that is known, to be told only of tasks that
            changed (the answer has the same ``since`` then, and else None).
        """
        again = request.get("again") is True
        found, told = self._entry(request, fresh=not again)
        look = found.glance() if again and found.resolver is not None else found.last
        return {**told.tell(look, request.get("since")), "found": found.resolver is not None}

    def found(self, request: Mapping[str, Any], fresh: bool = False) -> Resolution:
        """Return the resolution that `request` means, anew if `fresh`."""
        return self._entry(request, fresh)[0]

    def _entry(self, request: Mapping[str, Any], fresh: bool) -> tuple[Resolution, TaskTableDelta]:
        resolver, options = request.get("resolver", "auto"), request.get("options") or {}
        if not isinstance(resolver, str) or len(resolver) > 1000:
            raise UsageError(f"{str(resolver)[:100]!r} is no name of a resolver")
        if not isinstance(options, Mapping) or not all(map(_is_name, options)):
            raise UsageError(f"{str(options)[:100]!r} are no options", fix='write {"port": 8470}')
        key = json.dumps([resolver, options], sort_keys=True)
        if fresh or key not in self._kept:
            self._forget(key)
            self._kept[key] = resolve(resolver, **options), TaskTableDelta()
            for oldest in list(self._kept)[:-_MOST_KEPT]:
                self._forget(oldest)
        return self._kept[key]

    def close(self) -> None:
        """Keep nothing, and close all connections."""
        for key in list(self._kept):
            self._forget(key)

    def _forget(self, key: str) -> None:
        known = self._kept.pop(key, None)
        if known is not None:
            known[0].close()


def _is_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and name != "resolver"
    )


#: The latest changes, which are all that a front end shows.
_MOST_CHANGES = 20
#: Tables that are remembered: front ends that look at other times have older ones.
_MOST_TABLES = 4
#: Latencies are told again when they differ by more than this factor, and these milliseconds.
_FACTOR, _MILLISECONDS = 2.0, 5.0

#: Numbers of tables. A kernel that was restarted gives none again that a front end still has.
_numbers = itertools.count(time.time_ns() // 1_000_000)


class TaskTableDelta:
    """What front ends know of one cluster."""

    def __init__(self) -> None:
        self._tables: dict[int, dict[str, TaskStatus]] = {}

    def tell(self, look: ResolutionSnapshot, since: Any = None) -> dict[str, Any]:
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

    def _number(self, look: ResolutionSnapshot) -> tuple[int, dict[str, TaskStatus]]:
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


def _alike(before: TaskStatus, now: TaskStatus) -> bool:
    """Whether only the latency differs, and not by much."""
    least, most = sorted((before.latency_ms, now.latency_ms))
    near = most <= _FACTOR * least or most - least <= _MILLISECONDS
    return near and {**vars(before), "latency_ms": 0} == {**vars(now), "latency_ms": 0}
