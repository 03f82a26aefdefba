"""Starting a cluster into a variable: for ``%tfd_cluster start`` and for forms in a browser."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfd_notebook.errors import UsageError
from tfd_notebook.ui.argparsing import Parser, add_detach_option, add_start_options, make_cluster
from tfd_notebook.ui.magics import lookup

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster

PROG = "%tfd_cluster start"

#: What a form asks for: option, kind, label, help, default.
_FIELDS = (
    ("data_workers", "count", "data workers", "workers of a tf.data service", 2),
    ("workers", "count", "workers", "training workers, each a tf.distribute.Server", 0),
    ("ps", "count", "parameter servers", "needed by ParameterServerStrategy", 0),
    ("evaluator", "flag", "evaluator", "a server of its own for evaluation", False),
    ("gpus", "text", "GPUs", 'auto, 0 for none, numbers as "0,1", or "worker=1"', "auto"),
    ("launcher", "choice", "where", "where the tasks run", "local"),
    ("name", "text", "name", "how the cluster is called", "cluster"),
    ("output", "text", "variable", "Python variable that holds it", "cluster"),
    ("time_limit", "seconds", "time limit", "seconds after which it stops; empty for none", None),
    ("detach", "hours", "outlives this kernel", "for so many hours; empty: ends with it", None),
)


@dataclass(frozen=True)
class Started:
    """A cluster, the variable that holds it, and what there is to say."""

    cluster: Cluster
    variable: str
    reused: bool
    said: str


def add_options(parser: Parser) -> None:
    """Add what ``%tfd_cluster start`` takes."""
    add_start_options(parser)
    add_detach_option(parser)
    add_output_option(parser)


def add_output_option(parser: Parser) -> None:
    """Add the variable that shall hold a cluster."""
    parser.add_argument(
        "-o",
        "--output",
        default="cluster",
        metavar="VAR",
        help="variable for the cluster (default: cluster); never overwrites anything else",
    )


def start(shell: Any, options: argparse.Namespace) -> Started:
    """Start the cluster that `options` describe, or use the one that lives; bind a variable."""
    variable = lookup.check_variable(options.output)
    before = list(lookup.running_clusters().values())
    cluster = make_cluster(options)
    bound = lookup.bind(shell.user_ns, variable, cluster)
    reused = any(c is cluster for c in before)
    done = "lives already and is used" if reused else "started"
    taken = f" ({variable!r} holds something else)" if bound != variable else ""
    if cluster.detached:
        done += f", stays until {time.ctime(cluster.snapshot().lease)}"
    said = f"cluster {cluster.name!r} {done}; it is in the variable {bound!r}{taken}"
    return Started(cluster, bound, reused, said)


def commands(shell: Any) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
    """Return what can be asked of a kernel, besides `tfd_notebook.cluster.commands`, by a form."""
    return {"kinds": lambda request: form(), "start": lambda request: start_by(shell, request)}


def form() -> dict[str, Any]:
    """Return what a form for a new cluster consists of, as JSON values."""
    from tfd_notebook.launchers import base

    kinds = {name: kind for name, kind in base.kinds().items() if kind.offered}
    fields = []
    for name, kind, label, words, default in _FIELDS:
        field = {"name": name, "kind": kind, "label": label, "help": words, "default": default}
        fields.append({**field, "choices": list(kinds)} if kind == "choice" else field)
    return {
        "launchers": [{"name": name, "summary": kind.summary} for name, kind in kinds.items()],
        "fields": fields,
        "line": PROG,
    }


def start_by(shell: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Start what a form was filled in with; see `form`.

    Parameters
    ----------
    shell : InteractiveShell
    request : mapping
        With ``options``, values by the names of fields.
    """
    tokens = tokens_of(request.get("options"))
    parser = Parser(PROG)
    add_options(parser)
    started = start(shell, parser.read(tokens))
    return {
        "cluster": started.cluster.name,
        "variable": started.variable,
        "reused": started.reused,
        "said": started.said,
        "line": " ".join((PROG, *map(_written, tokens))),
    }


def tokens_of(options: Any) -> list[str]:
    """Return the words after ``%tfd_cluster start`` that say what was filled in."""
    known = {name: (kind, default) for name, kind, _, _, default in _FIELDS}
    if not isinstance(options, Mapping) or not options.keys() <= known.keys():
        raise UsageError(f"{options!r} are no options", fix=f"use {', '.join(known)}")
    tokens = []
    for name, value in options.items():
        kind, default = known[name]
        option = f"--{name.replace('_', '-')}"
        # What the magic does untold need not be said; of tasks it starts none, whatever the form
        # begins with.
        usual = 0 if kind == "count" else default
        if value in (None, "", False) or value == usual:
            continue
        if kind == "flag":
            tokens.append(option)
        elif isinstance(value, (str, int, float)) and len(str(value)) <= 200:
            tokens.append(f"{option}={value}")
        else:
            raise UsageError(f"{name}={value!r} cannot be meant")
    return tokens


def _written(token: str) -> str:
    """Return a word as people write it: ``--workers=2`` is ``--workers 2``."""
    option, sign, value = token.partition("=")
    return f"{option} {shlex.quote(value)}" if sign else option
