"""Clusters that outlive their kernels, and the agents in whose care they are."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfd_notebook.agent.sessions import SOCKET
from tfd_notebook.errors import StateError
from tfd_notebook.launchers.base import OnEvent
from tfd_notebook.launchers.client.agent_client import AgentNode
from tfd_notebook.launchers.client.remote_detached import Away, Reached, away
from tfd_notebook.launchers.client.session import Link, SocketChannel
from tfd_notebook.model.spec import ClusterConfig
from tfd_notebook.net import clock, runtime_dir


@dataclass(frozen=True)
class Detached:
    """A cluster on this host that stays without a kernel.

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

    def reach(self) -> Reached:
        """Return a way to the agent.

        Raises
        ------
        StateError
            It has ended meanwhile.
        """
        try:
            # An agent on this host is there, or has ended and all with it.
            return _ReachedHere(Link(self.agent, "localhost", self._connect, grace=60.0))
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


def detached() -> tuple[Detached | Away, ...]:
    """Return the clusters that this user let stay, here and from here on other hosts, by name.

    Reads files and asks nobody.
    """
    found: list[Detached | Away] = [*away()]
    # Of a cluster with agents elsewhere some may be here: a server or sshd of this very host.
    parts = {agent for one in found if isinstance(one, Away) for agent in one.agents}
    for directory, state in runtime_dir.agent_states():
        pid, clusters = state.get("pid", 0), state.get("clusters")
        if not isinstance(clusters, dict) or not runtime_dir.is_running(state.get("process")):
            continue
        if state.get("agent") in parts:
            continue
        left = {
            name: moment - clock.now()
            for name, moment in clusters.items()
            if isinstance(moment, (int, float))
        }
        found += [
            Detached(name, time.time() + seconds, str(state["agent"]), pid, directory)
            for name, seconds in left.items()
            if seconds > 0
        ]
    return tuple(sorted(found, key=lambda one: (one.name, one.pid or 0)))


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


class _ReachedHere:
    """A session with an agent on this host."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def clusters(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = self._link.client.request("clusters", timeout)
        return said

    def adopt(self, config: ClusterConfig, on_event: OnEvent) -> tuple[LinkedNode, dict[str, Any]]:
        self._link.client.listen(config.name, on_event)
        found = self._link.client.request("adopt", 30.0, cluster=config.name)
        return LinkedNode(self._link, config.name, found["directory"]), found

    def close(self) -> None:
        self._link.close()
