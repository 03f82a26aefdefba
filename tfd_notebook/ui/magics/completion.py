"""Tab completion of the magics: subcommands, options, and names of existing objects."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

from IPython.core.completer import SimpleCompletion

from tfd_notebook.cluster import registry
from tfd_notebook.coordinator.values import VALUE_STATES
from tfd_notebook.launchers import base
from tfd_notebook.resolution import factory
from tfd_notebook.resolvers import providers
from tfd_notebook.ui.argparsing import CommandLine, SingleCommand
from tfd_notebook.ui.magics import lookup


def complete(line: CommandLine, shell: Any, text: str) -> dict[str, Any]:
    """Return the completions at the end of `text`.

    Parameters
    ----------
    line : CommandLine
        The magic's subcommands.
    shell : InteractiveShell
        The shell whose variables are offered.
    text : str
        The text between the magic's name and the cursor.

    Returns
    -------
    dict
        A ``SimpleMatcherResult`` of IPython's completer.
    """
    before, _, fragment = text.rpartition(" ")
    words = _candidates(line, before.split(), fragment, _sources(shell))
    return {
        "completions": [
            SimpleCompletion(text=word, type="argument")
            for word in words
            if word.startswith(fragment)
        ],
        # IPython would start a new word at the colon in the name of a task.
        "matched_fragment": fragment,
        "suppress": True,
    }


def _candidates(
    line: CommandLine,
    words: list[str],
    fragment: str,
    sources: Mapping[str, Callable[[], Iterable[str]]],
) -> list[str]:
    single = isinstance(line, SingleCommand)
    if not words and not single:
        return list(line.commands)
    if not single and words[0] not in line.commands:
        return []

    def values(action: argparse.Action) -> list[str]:
        return sorted(sources[action.dest]()) if action.dest in sources else []

    parser = line.parser(words[0] if words else "")
    last = next((a for a in parser._actions if words and words[-1] in a.option_strings), None)
    if last is not None and last.nargs != 0:
        return values(last)
    if fragment.startswith("-"):
        return list(parser.options)
    positional = [a for a in parser._actions if not a.option_strings]
    return [
        *(value for action in positional for value in values(action)),
        *(option for option in parser.options if option not in words),
    ]


def _sources(shell: Any) -> dict[str, Callable[[], Iterable[str]]]:
    """Return functions that list the values of an argument, by its name in the parser."""
    return {
        "name": registry.running_clusters,
        "cluster": registry.running_clusters,
        "words": _clusters_and_tasks,
        "stream": lookup.streams,
        "dataset": lambda: _datasets(shell.user_ns),
        "launcher": _launchers,
        "number": registry.running_clusters,
        "function": lambda: _functions(shell.user_ns),
        "state": _states,
        "id": _unfinished,
        "resolver": lambda: factory.CHOICES,
        "onspark": _on_spark,
        "rows": lambda: _rows(shell.user_ns),
    }


def _clusters_and_tasks() -> list[str]:
    clusters = registry.running_clusters()
    tasks = [row.task for cluster in clusters.values() for row in cluster.snapshot().tasks]
    return [*clusters, *tasks]


def _datasets(namespace: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in list(namespace.items())
        if not name.startswith("_") and hasattr(type(value), "element_spec")
    ]


def _functions(namespace: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in list(namespace.items())
        if not name.startswith("_") and hasattr(type(value), "get_concrete_function")
    ]


def _states() -> Iterable[str]:
    return VALUE_STATES


def _on_spark() -> list[str]:
    return list(providers.spark_clusters())


def _rows(namespace: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in list(namespace.items())
        if not name.startswith("_") and hasattr(value, "toDF")
    ]


def _unfinished() -> list[str]:
    return [
        str(record["id"])
        for cluster in lookup.coordinated().values()
        for state in ("running", "queued", "paused")
        for record in cluster.current_coordinator().values.records(10, state)
    ]


def _launchers() -> list[str]:
    return [point.name for point in entry_points(group=base.ENTRY_POINTS)]
