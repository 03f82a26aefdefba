"""Start of a cluster into a variable, for ``%tfd_cluster start`` and for forms in a browser."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfd_notebook.cluster import registry
from tfd_notebook.errors import UsageError
from tfd_notebook.ui.argparsing import Parser, add_detach_option, add_start_options, make_cluster
from tfd_notebook.ui.magics import lookup

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster

PROG = "%tfd_cluster start"

#: Fields of the form: option, kind, label, help, default.
_FIELDS = (
    ("data_workers", "count", "data workers", "workers of a tf.data service", 2),
    ("workers", "count", "workers", "training workers, each a tf.distribute.Server", 0),
    ("ps", "count", "parameter servers", "required by ParameterServerStrategy", 0),
    ("evaluator", "flag", "evaluator", "a separate server for evaluation", False),
    ("gpus", "text", "GPUs", "auto, 0 for none, indices such as 0,1, or worker=1", "auto"),
    ("launcher", "choice", "launcher", "where the tasks run", "local"),
    ("name", "text", "name", "name of the cluster", "cluster"),
    ("output", "text", "variable", "Python variable for the cluster", "cluster"),
    ("time_limit", "seconds", "time limit", "seconds until the cluster stops; empty: none", None),
    ("detach", "hours", "detach", "hours to keep it after the kernel; empty: stop with it", None),
)


@dataclass(frozen=True)
class Started:
    """A started cluster, the variable that holds it, and a message for the user."""

    cluster: Cluster
    variable: str
    reused: bool
    message: str


def add_options(parser: Parser) -> None:
    """Add the options of ``%tfd_cluster start``."""
    add_start_options(parser)
    add_detach_option(parser)
    add_output_option(parser)


def add_output_option(parser: Parser) -> None:
    """Add the option that names the variable for a cluster."""
    parser.add_argument(
        "-o",
        "--output",
        default="cluster",
        metavar="VAR",
        help="variable for the cluster (default: cluster); never overwrites anything else",
    )


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


def commands(shell: Any) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
    """Return the commands of the form, in addition to `tfd_notebook.cluster.commands`."""
    return {"launchers": lambda request: form(), "start": lambda request: start_by(shell, request)}


def form() -> dict[str, Any]:
    """Return the fields of the form for a new cluster, as JSON values."""
    # Import time: panels import this module before they show the form.
    from tfd_notebook.launchers import base

    launchers = {
        name: launcher for name, launcher in base.available_launchers().items() if launcher.offered
    }
    fields = []
    for name, kind, label, text, default in _FIELDS:
        field = {"name": name, "kind": kind, "label": label, "help": text, "default": default}
        fields.append({**field, "choices": list(launchers)} if kind == "choice" else field)
    return {
        "launchers": [
            {"name": name, "summary": launcher.summary} for name, launcher in launchers.items()
        ],
        "fields": fields,
        "line": PROG,
    }


def start_by(shell: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Start the cluster that a user entered in the form. See `form`.

    Parameters
    ----------
    shell : InteractiveShell
    request : mapping
        Its key ``options`` holds the values by the names of the fields.
    """
    tokens = tokens_of(request.get("options"))
    parser = Parser(PROG)
    add_options(parser)
    started = start(shell, parser.read(tokens))
    return {
        "cluster": started.cluster.name,
        "variable": started.variable,
        "reused": started.reused,
        "message": started.message,
        "line": " ".join((PROG, *map(_readable, tokens))),
    }


def tokens_of(options: Any) -> list[str]:
    """Return the arguments of ``%tfd_cluster start`` for the values of a form."""
    known = {name: (kind, default) for name, kind, _, _, default in _FIELDS}
    if not isinstance(options, Mapping) or not options.keys() <= known.keys():
        raise UsageError(f"invalid options {options!r}", fix=f"use {', '.join(known)}")
    tokens = []
    for name, value in options.items():
        kind, default = known[name]
        option = f"--{name.replace('_', '-')}"
        # The magic's default for a number of tasks is 0, which can differ from the form's.
        magic_default = 0 if kind == "count" else default
        if value in (None, "", False) or value == magic_default:
            continue
        if kind == "flag":
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
