"""Tab completion of the magics: subcommands, options, and names of existing objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

from IPython.core.completer import SimpleCompletion

from tfd_notebook.cluster import registry
from tfd_notebook.coordinator.values import VALUE_STATES
from tfd_notebook.launchers import base
from tfd_notebook.model.command import Argument
from tfd_notebook.resolvers import factory, providers
from tfd_notebook.ui.argparsing import CommandLine
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
    words = _candidates(line, before.split(), fragment, shell)
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


def _candidates(line: CommandLine, words: list[str], fragment: str, shell: Any) -> list[str]:
    if line.single_command:
        words = [line.single_command, *words]
    if not words:
        return list(line.commands)
    if words[0] not in line.commands:
        return []

    def values(argument: Argument) -> list[str]:
        if argument.choices is not None:
            return list(argument.choices)
        return sorted(SOURCES[argument.source](shell.user_ns)) if argument.source else []

    parser = line.parser(words[0])
    flag, sign, _ = fragment.partition("=")
    option = flag if sign else words[-1]
    last = next((argument for argument in parser.arguments if option in argument.flags), None)
    if last is not None and last.kind is not bool:
        return [f"{flag}={value}" if sign else value for value in values(last)]
    if fragment.startswith("-"):
        return list(parser.options)
    return [
        *(
            value
            for argument in parser.arguments
            if not argument.flags
            for value in values(argument)
        ),
        *(option for option in parser.options if option not in words),
    ]


def _variables(namespace: Mapping[str, Any], is_offered: Callable[[Any], bool]) -> list[str]:
    return [n for n, value in list(namespace.items()) if n[:1] != "_" and is_offered(value)]


def _clusters_and_tasks() -> list[str]:
    clusters = registry.running_clusters()
    tasks = [row.task for cluster in clusters.values() for row in cluster.snapshot().tasks]
    return [*clusters, *tasks]


def _unfinished() -> list[str]:
    return [
        str(record["id"])
        for cluster in lookup.coordinated().values()
        for state in ("running", "queued", "paused")
        for record in cluster.current_coordinator().values.records(10, state)
    ]


#: Functions that list the values of an argument by its source. They take the shell's variables.
SOURCES: Mapping[str, Callable[[Mapping[str, Any]], Iterable[str]]] = {
    "clusters": lambda _: registry.running_clusters(),
    "tasks": lambda _: _clusters_and_tasks(),
    "streams": lambda _: lookup.streams(),
    "datasets": lambda names: _variables(names, lambda v: hasattr(type(v), "element_spec")),
    "functions": lambda names: _variables(
        names, lambda v: hasattr(type(v), "get_concrete_function")
    ),
    "rows": lambda names: _variables(names, lambda v: hasattr(v, "toDF")),
    "launchers": lambda _: entry_points(group=base.ENTRY_POINTS).names,
    "states": lambda _: VALUE_STATES,
    "closures": lambda _: _unfinished(),
    "resolvers": lambda _: factory.CHOICES,
    "spark": lambda _: providers.spark_clusters(),
}
