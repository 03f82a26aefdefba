"""Start of a cluster into a variable, for ``%tfd_cluster start`` and for forms in a browser."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfd_notebook.cluster import registry
from tfd_notebook.errors import UsageError
from tfd_notebook.model import command_table
from tfd_notebook.model.command import Argument
from tfd_notebook.ui.argparsing import CommandLine, make_cluster
from tfd_notebook.ui.magics import lookup

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster

PROG = "%tfd_cluster start"

_START = command_table.commands("%tfd_cluster")["start"]
#: The arguments of the form, and its defaults where they differ from those of the magic.
_FIELDS = {
    argument.name: argument for argument in _START.arguments("%tfd_cluster") if argument.label
}
_DEFAULTS = {"data_workers": 2, "name": "cluster"}


@dataclass(frozen=True)
class Started:
    """A started cluster, the variable that holds it, and a message for the user."""

    cluster: Cluster
    variable: str
    reused: bool
    message: str


def start(shell: Any, options: argparse.Namespace) -> Started:
    """Start the cluster that `options` describe, or reuse the running one. Bind a variable."""
    variable = lookup.check_variable(options.output)
    before = list(registry.running_clusters().values())
    cluster = make_cluster(options)
    bound = lookup.bind(shell.user_ns, variable, cluster)
    reused = any(c is cluster for c in before)
    action = "is already running" if reused else "started"
    taken = f" ({variable!r} holds another value)" if bound != variable else ""
    if cluster.detached:
        action += f", detached until {time.ctime(cluster.snapshot().lease)}"
    message = f"cluster {cluster.name!r} {action}; it is in the variable {bound!r}{taken}"
    return Started(cluster, bound, reused, message)


class Requests(lookup.ShellCommands):
    """Requests of forms and panels that start a cluster."""

    def launchers(self) -> dict[str, Any]:
        """Return the fields of the form for a new cluster, as JSON values."""
        # Import time: panels import this module before they show the form.
        from tfd_notebook.launchers import base

        launchers = {
            name: launcher
            for name, launcher in base.available_launchers().items()
            if launcher.offered
        }
        fields = []
        for name, argument in _FIELDS.items():
            default = _DEFAULTS.get(name, argument.default)
            field: dict[str, Any] = {"name": name, "kind": _kind(argument), "default": default}
            field |= {"label": argument.label, "help": argument.help}
            fields.append(field | {"choices": list(launchers)} if name == "launcher" else field)
        return {
            "launchers": [
                {"name": name, "summary": launcher.summary} for name, launcher in launchers.items()
            ],
            "fields": fields,
            "line": PROG,
        }

    def start(self, options: Any) -> dict[str, Any]:
        """Start the cluster that a user entered in the form. See `launchers`."""
        tokens = tokens_of(options)
        started = start(self._shell, CommandLine("%tfd_cluster").parser("start").read(tokens))
        line = " ".join((PROG, *map(_readable, tokens)))
        return {**vars(started), "cluster": started.cluster.name, "line": line}


def _kind(argument: Argument) -> str:
    """Return the kind of the field for an argument."""
    if argument.kind is float:
        return "hours" if argument.metavar == "HOURS" else "seconds"
    if argument.source == "launchers":
        return "choice"
    return {bool: "flag", int: "count"}.get(argument.kind or str, "text")


def tokens_of(options: Any) -> list[str]:
    """Return the arguments of ``%tfd_cluster start`` for the values of a form."""
    if not isinstance(options, Mapping) or not options.keys() <= _FIELDS.keys():
        raise UsageError(f"invalid options {options!r}", fix=f"use {', '.join(_FIELDS)}")
    tokens = []
    for name, value in options.items():
        option, default = _FIELDS[name].flags[-1], _FIELDS[name].default
        if value in (None, "", False, default) or (name == "name" and value == _DEFAULTS[name]):
            continue
        if value is True and _FIELDS[name].kind is bool:
            tokens.append(option)
        elif isinstance(value, (str, int, float)) and len(str(value)) <= 200:
            tokens.append(f"{option}={value}")
        else:
            raise UsageError(f"invalid value for {name}: {value!r}")
    return tokens


def _readable(token: str) -> str:
    """Return ``--workers 2`` for the token ``--workers=2``."""
    option, sign, value = token.partition("=")
    return f"{option} {shlex.quote(value)}" if sign else option
