"""Lookup of the clusters, tasks, streams and variables that a magic names."""

from __future__ import annotations

import argparse
import ast
import keyword
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tfd_notebook._compat import ipykernel
from tfd_notebook.cluster import registry
from tfd_notebook.errors import (
    StateError,
    UnknownName,
    Unsupported,
    UsageError,
    nearest,
    unknown_task,
)
from tfd_notebook.net import validation

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster
    from tfd_notebook.cluster.view import ClusterView, CoordinatorView
    from tfd_notebook.data.consume.stream import Stream

_Named = TypeVar("_Named")


class ShellCommands:
    """Base of the classes that perform the commands of a shell, or of a cell magic over `cell`."""

    def __init__(self, shell: Any, cell: str | None = None) -> None:
        self._shell = shell
        self._cell = cell


def report(text: str) -> None:
    """Print a message as output of the cell, without sequences that control a terminal."""
    print(validation.terminal_output(text))  # noqa: T201


def pick(name: str | None) -> ClusterView:
    """Return the running cluster with this name, or the only running one.

    Raises
    ------
    StateError
        No cluster is running.
    UsageError
        Several clusters are running and `name` is None.
    UnknownName
        No running cluster has this name.
    """
    clusters = registry.running_clusters()
    if name is not None:
        return named(name, clusters, "cluster")
    start = "%tfd_cluster start --data-workers 2"
    return only(clusters, "clusters are running", "no running cluster", start)


def named(name: str, known: Mapping[str, _Named], kind: str, place: str = "") -> _Named:
    """Return the object with this name, or raise UnknownName for an object of this kind."""
    if name not in known:
        raise UnknownName(
            f"no {kind} {name!r}{place}",
            fix=nearest(name, known) + f"{kind}s: {', '.join(known) or 'none'}",
        )
    return known[name]


def only(known: Mapping[str, _Named], several: str, none: str, fix: str) -> _Named:
    """Return the only object.

    Raises
    ------
    StateError
        There is none; the error is `none`, with the next step `fix`.
    UsageError
        There are several; the error is their number and `several`.
    """
    if not known:
        raise StateError(none, fix=fix)
    if len(known) > 1:
        raise UsageError(
            f"{len(known)} {several}; name one of them",
            fix=f"add one of these names: {', '.join(known)}",
        )
    return next(iter(known.values()))


def pick_own(name: str | None) -> Cluster:
    """Return the cluster as `pick` does, if this kernel started or attached it.

    Raises
    ------
    StateError, UsageError, UnknownName
        As for `pick`.
    Unsupported
        The cluster belongs to another kernel, or runs on Spark.
    """
    name = pick(name).name
    own = registry.clusters()
    if name not in own:
        raise Unsupported(
            f"this command needs a cluster of this kernel, and {name!r} belongs to another "
            "process or runs on Spark",
            fix=f"name one of these clusters: {', '.join(own)}" if own else "%tfd_cluster start",
        )
    return cast("Cluster", own[name])


def coordinated() -> dict[str, ClusterView]:
    """Return the running clusters that have a coordinator, by name."""
    return {
        name: cluster
        for name, cluster in registry.running_clusters().items()
        if cluster.has_coordinator
    }


def pick_coordinated(name: str | None) -> ClusterView:
    """Return the cluster with this name, or the only one that has a coordinator.

    Raises
    ------
    StateError, UsageError, UnknownName
        As for `pick`.
    """
    clusters = coordinated()
    if name is None and len(clusters) == 1:
        name = next(iter(clusters))
    return pick(name)


def pick_coordinator(name: str | None) -> CoordinatorView:
    """Return the coordinator of `pick_coordinated`.

    Raises
    ------
    StateError, UsageError, UnknownName
        As for `pick`. StateError also if the cluster has no coordinator.
    """
    return pick_coordinated(name).current_coordinator()


def pick_task(options: argparse.Namespace, need_task: bool = True) -> tuple[ClusterView, Any]:
    """Return the cluster and the task that `options` name. The task may be None if not needed.

    Raises
    ------
    StateError, UsageError, UnknownName
        As for `pick`. UsageError also if the task is missing. UnknownName also if the cluster has
        no such task.
    """
    cluster, task = pick(options.name), options.task
    known = [row.task for row in cluster.snapshot().tasks]
    if task is None and need_task:
        raise UsageError("no task named", fix=f"add one of {', '.join(known)}")
    if task is not None and task not in known:
        raise unknown_task(cluster.name, task, known)
    return cluster, task


def streams() -> dict[str, Stream]:
    """Return the streams of all running clusters by name.

    A name that several clusters use becomes ``cluster/name``.
    """
    entries = [
        (cluster.name, name, stream)
        for cluster in registry.running_clusters().values()
        for name, stream in cluster.streams.items()
    ]
    names = [name for _, name, _ in entries]
    return {
        name if names.count(name) == 1 else f"{cluster}/{name}": stream
        for cluster, name, stream in entries
    }


def pick_stream(name: str | None) -> Stream:
    """Return the stream with this name, or the only one that has not ended.

    Raises
    ------
    StateError, UsageError, UnknownName
    """
    known = streams()
    if name is not None:
        return named(name, known, "stream")
    running = {n: s for n, s in known.items() if s.state in ("new", "running", "paused")}
    return only(running, "streams are running", "no running stream", "%tfd_stream start DATASET")


def check_variable(name: str) -> str:
    """Return `name` if it is a valid name of a variable, else raise UsageError."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"invalid name of a variable: -o {name}", fix="use letters and digits")
    return name


def bind(namespace: dict[str, Any], variable: str, cluster: Cluster) -> str:
    """Assign `cluster` to a variable and return the variable's name.

    A variable is only overwritten if it holds a cluster of the same name. Otherwise the next free
    name of ``variable_2``, ``variable_3``, ... is used.
    """
    name, number = variable, 2
    while name in namespace and not _replaceable(namespace[name], cluster):
        name, number = f"{variable}_{number}", number + 1
    namespace[name] = cluster
    return name


def _replaceable(value: Any, cluster: Cluster) -> bool:
    return type(value) is type(cluster) and value.name == cluster.name


def evaluate(shell: Any, source: str, kind: str = "a dataset") -> Any:
    """Return the value of an expression in the notebook's namespace.

    Parameters
    ----------
    shell : InteractiveShell
    source : str
    kind : str
        The expected kind of value, for the error.

    Raises
    ------
    UnknownName
        The expression is a name, and no variable has it.
    UsageError
        It is not a valid expression.
    """
    if source.isidentifier() and source not in shell.user_ns:
        hidden = ipykernel.hidden_names(shell)  # variables that IPython itself defines
        variables = [n for n in shell.user_ns if not n.startswith("_") and n not in hidden]
        raise UnknownName(
            f"no variable {source!r}",
            fix=nearest(source, variables) + f"name a variable that holds {kind}",
        )
    try:
        ast.parse(source.strip(), mode="eval")
    except SyntaxError as error:
        what = f"invalid expression {source!r}: {error.msg}"
        raise UsageError(what, fix=f"name {kind}") from None
    return shell.ev(source)
