"""Where a node's inbox is, and which of several a task of Spark feeds."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tfd_notebook.errors import SparkError
from tfd_notebook.net import secure_channel


@dataclass(frozen=True)
class Place:
    """Where the rows for one node go. It travels in the closures of tasks, and nowhere else.

    Parameters
    ----------
    cluster : str
        The cluster's id.
    role : str
    index : int
        The node's index in its role.
    host : str
        Name of the node's host, as `socket.gethostname` gives it there.
    executor : str
        Spark's id of its executor; may be empty.
    jvm : int
        Process id of its executor's JVM on that host; 0 if unknown.
    path : str
        The inbox's address: the path of its socket.
    secret : bytes
        Who does not know it cannot feed.
    """

    cluster: str
    role: str
    index: int
    host: str
    executor: str
    jvm: int
    path: str
    secret: bytes = field(repr=False)

    @property
    def node(self) -> str:
        """The node's name, such as ``worker:0``."""
        return f"{self.role}:{self.index}"


#: Where rows may go: a node, those of which `choose` takes one, or what tells a task of them.
Where: TypeAlias = "Place | Sequence[Place] | Callable[[], Sequence[Place]]"


def choose(places: Sequence[Place]) -> Place:
    """Return the node that a task in this process feeds.

    That is the node of its own executor; where that has none, one of this host. Of several, the
    one with the fewest chunks waiting, and tasks that ask at the same time begin with different
    ones. Rows do not leave the host.

    Parameters
    ----------
    places : sequence of Place

    Raises
    ------
    SparkError
        No node of the cluster is on this host.
    """
    host = socket.gethostname()
    here = [place for place in places if place.host == host and os.path.exists(place.path)]
    above = {os.getpid(), *_ancestors()}
    here = [place for place in here if place.jvm in above] or here
    if len(here) > 1:
        first = _partition() % len(here)
        return min([*here[first:], *here[:first]], key=_load)
    if here:
        return here[0]
    nodes = ", ".join(f"{place.node} on {place.host}" for place in places) or "none"
    raise SparkError(
        f"no node of this cluster that takes rows is on the host {host}; there are: {nodes}",
        fix="give the cluster as many nodes as there are executors, or keep other executors away",
    )


def _partition() -> int:
    """Return the number of the partition that this process feeds; 0 outside of Spark's tasks."""
    if "pyspark" not in sys.modules:
        return 0
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def _load(place: Place) -> tuple[int, int]:
    try:
        with secure_channel.connect(f"unix:{place.path}", place.secret) as channel:
            channel.send({"op": "load"})
            said, _ = channel.receive(10)
            return int(said["depth"]), int(said["feeders"])
    except (OSError, EOFError, KeyError, TypeError, ValueError):
        return 1 << 30, 1 << 30


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    for _ in range(64):
        if pid <= 1:
            return
        yield pid
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        pid = int(stat.rpartition(")")[2].split()[1])
