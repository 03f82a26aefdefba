"""Resolutions for magics, the command line, and forms in a browser."""

from __future__ import annotations

import itertools
import json
import keyword
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tfd_notebook.bus.snapshot_feed import difference
from tfd_notebook.errors import UsageError
from tfd_notebook.model.resolution import ResolutionSnapshot, as_json
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
        self._resolutions: dict[str, tuple[Resolution, _Feed]] = {}

    def choices(self) -> dict[str, Any]:
        """Return the choices of resolvers, as JSON values."""
        choices = [{"name": name, "summary": text} for name, text in factory.CHOICES.items()]
        return {"choices": choices}

    def resolve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the snapshot of a resolution, as JSON values in ``state``.

        Parameters
        ----------
        request : mapping
            ``resolver`` and ``options`` select the resolution. ``probe`` is true to probe the
            tasks of a kept resolution. ``last_number`` is the ``number`` of the front end's last
            reply. ``state`` is then a merge patch, and the reply has the same ``last_number``. If
            that reply is no longer kept, ``state`` is complete, and ``last_number`` is None.
        """
        probe = request.get("probe") is True
        resolution, feed = self._entry(request, fresh=not probe)
        is_resolved = resolution.resolver is not None
        snapshot = resolution.probe(raises=False) if probe and is_resolved else resolution.last
        return feed.reply(snapshot, is_resolved, request.get("last_number"))

    def resolution(self, request: Mapping[str, Any]) -> Resolution:
        """Return the resolution of `request`."""
        return self._entry(request, fresh=False)[0]

    def _entry(self, request: Mapping[str, Any], fresh: bool) -> tuple[Resolution, _Feed]:
        resolver, options = request.get("resolver", "auto"), request.get("options") or {}
        if not isinstance(resolver, str) or len(resolver) > 1000:
            raise UsageError(f"invalid name of a resolver: {str(resolver)[:100]!r}")
        if not isinstance(options, Mapping) or not all(map(_is_name, options)):
            raise UsageError(f"invalid options {str(options)[:100]!r}", fix='write {"port": 8470}')
        key = json.dumps([resolver, options], sort_keys=True)
        if fresh or key not in self._resolutions:
            self._discard(key)
            self._resolutions[key] = resolve(resolver, **options), _Feed()
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


#: Maximum number of changes in a reply: the number that a front end shows.
_MAX_CHANGES = 20
#: Maximum number of kept replies. Front ends that update at other times have older ones.
_MAX_REPLIES = 8
#: A latency counts as changed if it differs by more than this factor and these milliseconds.
_LATENCY_FACTOR, _LATENCY_MS = 2.0, 5.0

#: Numbers of replies. They start at the time, so that a restarted kernel repeats no number.
_numbers = itertools.count(time.time_ns() // 1_000_000)


class _Feed:
    """Recent replies about a resolution, which are the bases of merge patches."""

    def __init__(self) -> None:
        self._replies: dict[int, dict[str, Any]] = {}

    def reply(
        self, snapshot: ResolutionSnapshot, is_resolved: bool, last_number: Any
    ) -> dict[str, Any]:
        """Return a reply with a complete state, or a patch of the reply `last_number`."""
        before: dict[str, Any] = next(reversed(self._replies.values()), {}).get("tasks", {})
        tasks = {task.name: dict(vars(task)) for task in snapshot.tasks}
        for name, task in tasks.items():
            if name in before and _is_near(before[name]["latency_ms"], task["latency_ms"]):
                task["latency_ms"] = before[name]["latency_ms"]
        brief = replace(snapshot, tasks=(), changes=snapshot.changes[-_MAX_CHANGES:])
        state = {
            **as_json(brief),
            "counts": snapshot.counts,
            "tasks": tasks,
            "order": list(tasks),
            "changed": len(snapshot.changes),
            "resolved": is_resolved,
        }
        known = self._replies.get(last_number) if isinstance(last_number, int) else None
        number = next(_numbers)
        self._replies[number] = state
        for oldest in list(self._replies)[:-_MAX_REPLIES]:
            del self._replies[oldest]
        return {
            "number": number,
            "last_number": None if known is None else last_number,
            "state": state if known is None else difference(known, state),
        }


def _is_near(before: float, now: float) -> bool:
    """Return True if two latencies differ within `_LATENCY_FACTOR` or `_LATENCY_MS`."""
    least, most = sorted((before, now))
    return most <= _LATENCY_FACTOR * least or most - least <= _LATENCY_MS
