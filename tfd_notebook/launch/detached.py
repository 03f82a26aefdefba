"""Agents of this host that outlive their kernels, and the clusters in their care."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfd_notebook.errors import StateError
from tfd_notebook.launch import runtime
from tfd_notebook.launch.base import OnEvent
from tfd_notebook.launch.client import AgentNode
from tfd_notebook.launch.link import Link, SocketChannel
from tfd_notebook.launch.sessions import SOCKET


@dataclass(frozen=True)
class Detached:
    """A cluster that stays without a kernel.

    Parameters
    ----------
    name : str
    lease : float
        Until when, in seconds since the epoch.
    agent : str
        Id of the agent that looks after it.
    pid : int
        The agent's.
    directory : Path
        The agent's.
    """

    name: str
    lease: float
    agent: str
    pid: int
    directory: Path

    def link(self) -> Link:
        """Return a session with the agent.

        Raises
        ------
        StateError
            It has ended meanwhile.
        """
        try:
            # An agent on this host is there, or has ended and all with it.
            return Link(self.agent, "localhost", self._connect, grace=60.0)
        except OSError as error:
            raise StateError(
                f"the agent of cluster {self.name!r} cannot be reached: {error.strerror or error}",
                fix="see tfd list: it may have ended",
            ) from None

    def _connect(self) -> SocketChannel:
        try:
            return SocketChannel.to(self.directory / SOCKET)
        except (FileNotFoundError, ConnectionRefusedError):
            raise StateError(f"the agent of cluster {self.name!r} has ended") from None


def detached() -> tuple[Detached, ...]:
    """Return the clusters of this user on this host that have a lease, by name.

    Reads the agents' state files and asks nobody.
    """
    found = []
    for directory, state in runtime.agent_states():
        pid, clusters = state.get("pid", 0), state.get("clusters")
        if not isinstance(clusters, dict) or not runtime.runs(pid, state.get("start")):
            continue
        found += [
            Detached(name, lease, str(state["agent"]), pid, directory)
            for name, lease in clusters.items()
            if isinstance(lease, (int, float)) and lease > time.time()
        ]
    return tuple(sorted(found, key=lambda one: (one.name, one.agent)))


class LinkedNode(AgentNode):
    """A cluster's part on an agent to which this process has a session for it alone.

    Parameters
    ----------
    link : Link
        Closed when this process has no more to do with the cluster.
    """

    def __init__(self, link: Link, cluster: str, directory: str) -> None:
        super().__init__(link.client, cluster, directory)
        self._link = link

    def _last(self, do: str, timeout: float) -> None:
        super()._last(do, timeout)
        self._link.close()


def adopt(link: Link, cluster: str, on_event: OnEvent) -> tuple[LinkedNode, dict[str, Any]]:
    """Hear of a cluster from now on; return its node and what the agent says of it."""
    link.client.listen(cluster, on_event)
    found = link.client.request("adopt", 30.0, cluster=cluster)
    return LinkedNode(link, cluster, found["directory"]), found


def briefs(where: Detached, timeout: float = 5.0) -> list[dict[str, Any]]:
    """Return what the agent says of each of its clusters, in a few words."""
    link = where.link()
    try:
        said: list[dict[str, Any]] = link.client.request("clusters", timeout)
        return said
    finally:
        link.close()
