"""Resolutions for magics, the command line, and forms in a browser."""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tfd_notebook.errors import UsageError
from tfd_notebook.model.resolution import ResolutionSnapshot, as_json
from tfd_notebook.resolvers import factory
from tfd_notebook.resolvers.resolution import Resolution, resolve

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
        self._resolutions: dict[str, Resolution] = {}

    def choices(self) -> dict[str, Any]:
        """Return the choices of resolvers, as JSON values."""
        choices = [{"name": name, "summary": text} for name, text in factory.CHOICES.items()]
        return {"choices": choices}

    def resolve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the snapshot of a resolution, as JSON values.

        Parameters
        ----------
        request : mapping
            ``resolver`` and ``options`` select the resolution. ``probe`` is true to probe the
            tasks of a kept resolution.
        """
        probe = request.get("probe") is True
        resolution = self._resolution(request, fresh=not probe)
        if probe and resolution.resolver is not None:
            return _reply(resolution, resolution.probe(raises=False))
        return _reply(resolution, resolution.last)

    def resolution(self, request: Mapping[str, Any]) -> Resolution:
        """Return the resolution of `request`."""
        return self._resolution(request, fresh=False)

    def _resolution(self, request: Mapping[str, Any], fresh: bool) -> Resolution:
        resolver, options = request.get("resolver", "auto"), request.get("options") or {}
        if not isinstance(resolver, str) or len(resolver) > 1000:
            raise UsageError(f"invalid name of a resolver: {str(resolver)[:100]!r}")
        if not isinstance(options, Mapping) or not all(map(_is_name, options)):
            raise UsageError(f"invalid options {str(options)[:100]!r}", fix='write {"port": 8470}')
        key = json.dumps([resolver, options], sort_keys=True)
        if fresh or key not in self._resolutions:
            self._discard(key)
            self._resolutions[key] = resolve(resolver, **options)
            for oldest in list(self._resolutions)[:-_MAX_RESOLUTIONS]:
                self._discard(oldest)
        return self._resolutions[key]

    def close(self) -> None:
        """Discard all resolutions and close their connections."""
        for key in list(self._resolutions):
            self._discard(key)

    def _discard(self, key: str) -> None:
        resolution = self._resolutions.pop(key, None)
        if resolution is not None:
            resolution.close()


def _is_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and name != "resolver"
    )


#: Maximum number of changes in a reply: the number that a front end shows.
_MAX_CHANGES = 20


def _reply(resolution: Resolution, snapshot: ResolutionSnapshot) -> dict[str, Any]:
    brief = replace(snapshot, tasks=(), changes=snapshot.changes[-_MAX_CHANGES:])
    return {
        **as_json(brief),
        "counts": snapshot.counts,
        "tasks": [vars(task) for task in snapshot.tasks],
        "changed": len(snapshot.changes),
        "resolved": resolution.resolver is not None,
    }
