"""Find what a magic's words name: clusters, tasks, streams, variables."""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfd_notebook._compat import ipykernel
from tfd_notebook.cluster.registry import running_clusters as running_clusters
from tfd_notebook.errors import StateError, UnknownName, UsageError
from tfd_notebook.ui.argparsing import nearest

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster
    from tfd_notebook.coordinator.coordinator import Coordinator
    from tfd_notebook.data.consume.stream import Stream


def pick(name: str | None) -> Cluster:
    """Return the cluster of that name, or the only one there is.

    Raises
    ------
    StateError, UsageError
        No cluster lives; several do and none is named; none has that name.
    """
    clusters = running_clusters()
    if name is not None and name not in clusters:
        raise UnknownName(
            f"there is no cluster {name!r}",
            fix=nearest(name, clusters) + f"clusters: {', '.join(clusters) or 'none'}",
        )
    if not clusters:
        raise StateError("no cluster lives here", fix="%tfd_cluster start --data-workers 2")
    if name is None and len(clusters) > 1:
        raise UsageError(
            f"{len(clusters)} clusters live here, and none is named",
            fix=f"add one of these names: {', '.join(clusters)}",
        )
    chosen: Cluster = clusters[name if name is not None else next(iter(clusters))]
    return chosen


def coordinated() -> dict[str, Cluster]:
    """Return the clusters that have a coordinator, by name."""
    return {
        name: cluster for name, cluster in running_clusters().items() if cluster.has_coordinator
    }


def pick_coordinator(name: str | None) -> Coordinator:
    """Return the coordinator of the cluster of that name, or the only one there is.

    Raises
    ------
    StateError, UsageError
        As `pick`; or the cluster has no coordinator.
    """
    found = coordinated()
    if name is None and len(found) == 1:
        name = next(iter(found))
    return pick(name).present_coordinator()


def pick_task(words: Sequence[str], need_task: bool) -> tuple[Cluster, str | None]:
    """Read ``[NAME] [TASK]`` in any order: a task is the word with a colon.

    Raises
    ------
    StateError, UsageError
        As `pick`; a task is missing, unknown, or one word is too many.
    """
    tasks = [word for word in words if ":" in word]
    names = [word for word in words if ":" not in word]
    if len(tasks) > 1 or len(names) > 1:
        raise UsageError(f"{' '.join(words)!r} names too much", fix="write [NAME] [TASK]")
    cluster = pick(names[0] if names else None)
    known = [row.task for row in cluster.snapshot().tasks]
    if not tasks:
        if need_task:
            raise UsageError("which task?", fix=f"add one of {', '.join(known)}")
        return cluster, None
    if tasks[0] not in known:
        raise UnknownName(
            f"cluster {cluster.name!r} has no task {tasks[0]!r}",
            fix=nearest(tasks[0], known) + f"tasks: {', '.join(known)}",
        )
    return cluster, tasks[0]


def streams() -> dict[str, Stream]:
    """Return the streams of all living clusters, by name; shared names as ``cluster/name``."""
    found = [
        (cluster.name, name, stream)
        for cluster in running_clusters().values()
        for name, stream in cluster.streams.items()
    ]
    names = [name for _, name, _ in found]
    return {
        name if names.count(name) == 1 else f"{cluster}/{name}": stream
        for cluster, name, stream in found
    }


def pick_stream(name: str | None) -> Stream:
    """Return the stream of that name, or the only one that has not ended.

    Raises
    ------
    StateError, UsageError
    """
    known = streams()
    if name is not None and name not in known:
        raise UnknownName(
            f"there is no stream {name!r}",
            fix=nearest(name, known) + f"streams: {', '.join(known) or 'none'}",
        )
    if name is not None:
        return known[name]
    alive = {n: s for n, s in known.items() if s.state in ("new", "running", "paused")}
    if not alive:
        raise StateError("no stream runs", fix="%tfd_stream start DATASET")
    if len(alive) > 1:
        raise UsageError(
            f"{len(alive)} streams run, and none is named",
            fix=f"add one of these names: {', '.join(alive)}",
        )
    return next(iter(alive.values()))


def check_variable(name: str) -> str:
    """Return `name` if a variable can have it, else raise UsageError."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"-o {name}: no variable can have that name", fix="use letters and digits")
    return name


def bind(namespace: dict[str, Any], wish: str, cluster: Cluster) -> str:
    """Put `cluster` into a variable and return the variable's name.

    A variable that holds something else than a cluster of that name is left alone: then it is
    the next free one of ``wish_2``, ``wish_3``, ...
    """
    name, number = wish, 2
    while name in namespace and not _replaceable(namespace[name], cluster):
        name, number = f"{wish}_{number}", number + 1
    namespace[name] = cluster
    return name


def _replaceable(value: Any, cluster: Cluster) -> bool:
    return type(value) is type(cluster) and value.name == cluster.name


def evaluate(shell: Any, words: str, kind: str = "a dataset") -> Any:
    """Return the value of an expression in the notebook's namespace.

    Parameters
    ----------
    shell : InteractiveShell
    words : str
    kind : str
        What a variable should hold, for the error.

    Raises
    ------
    UnknownName
        It is the name of no variable.
    """
    if words.isidentifier() and words not in shell.user_ns:
        hidden = ipykernel.hidden_names(shell)  # what IPython put there itself
        variables = [n for n in shell.user_ns if not n.startswith("_") and n not in hidden]
        raise UnknownName(
            f"there is no variable {words!r}",
            fix=nearest(words, variables) + f"name a variable that holds {kind}",
        )
    return shell.ev(words)
