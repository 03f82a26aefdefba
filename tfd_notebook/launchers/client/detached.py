"""Clusters that outlive their kernels, and the agents in whose care they are."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tfd_notebook.agent.sessions import SOCKET
from tfd_notebook.errors import AgentLost, InvalidMessage, StateError
from tfd_notebook.launchers import base
from tfd_notebook.launchers.base import Node, OnEvent
from tfd_notebook.launchers.client.agent_client import AgentNode
from tfd_notebook.launchers.client.session import AgentSession, SocketChannel
from tfd_notebook.model.spec import ClusterConfig
from tfd_notebook.net import clock, messages, runtime_dir


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

    def reach(self) -> AgentConnection:
        """Return a way to the agent.

        Raises
        ------
        StateError
            It has ended meanwhile.
        """
        try:
            # An agent on this host is there, or has ended and all with it.
            return LocalAgent(AgentSession(self.agent, "localhost", self._connect, grace=60.0))
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


def detached() -> tuple[Detached | RemoteDetachedCluster, ...]:
    """Return the clusters that this user let stay, here and from here on other hosts, by name.

    Reads files and asks nobody.
    """
    found: list[Detached | RemoteDetachedCluster] = [*remote_detached_clusters()]
    # Of a cluster with agents elsewhere some may be here: a server or sshd of this very host.
    parts = {
        agent for one in found if isinstance(one, RemoteDetachedCluster) for agent in one.agents
    }
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

    def __init__(self, link: AgentSession, cluster: str, directory: str) -> None:
        super().__init__(link.client, cluster, directory)
        self._link = link

    def _last(self, do: str, timeout: float) -> None:
        super()._last(do, timeout)
        self._link.close()


class LocalAgent:
    """A session with an agent on this host."""

    def __init__(self, link: AgentSession) -> None:
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


#: Seconds after the end of a lease at which its file is removed.
_LATE_SECONDS = 0.5
#: What removes the files of clusters that this process has left.
_timers: dict[Path, threading.Timer] = {}


class AgentConnection(Protocol):
    """Who looks after a cluster, reached by this process."""

    def clusters(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        """Return what is said of each cluster there, in a few words."""

    def adopt(self, config: ClusterConfig, on_event: OnEvent) -> tuple[Node, dict[str, Any]]:
        """Hear of a cluster from now on; return its node and what its agents say of it."""

    def close(self) -> None:
        """Have no more to do with them; never raises."""


class DetachedClusterRecord:
    """The file of one cluster, which is there while the cluster stays.

    Parameters
    ----------
    cluster : str
    launcher : str
        The launcher's own name.
    options : dict
        What it is made with.
    agents : sequence of str
        Their ids, in the order of the launcher's hosts.
    """

    def __init__(
        self, cluster: str, launcher: str, options: dict[str, Any], agents: Sequence[str]
    ) -> None:
        self._said: dict[str, Any] = {
            "cluster": cluster,
            "launcher": launcher,
            "options": options,
            "agents": list(agents),
            "lease": None,
            "planned": 0,
            "about": {},
        }
        self._path = runtime_dir.runtime_dir() / f"away-{agents[0]}.json"
        self._stop_timer()  # of a cluster that this process left and has attached to again

    def keep(self, seconds: float) -> None:
        """Set the end of the lease to `seconds` from now."""
        boot = {"id": runtime_dir.boot_id(), "moment": clock.now() + seconds}
        self._update(lease=time.time() + seconds, boot=boot)

    def describe(self, about: Mapping[str, Any]) -> None:
        """Store the description of the cluster; see `tfd_notebook.net.messages.description`."""
        self._update(planned=sum(about["fleet"]["counts"].values()), about=dict(about))

    def leave(self) -> None:
        """Remove the file at the end of the lease, if this process still runs then."""
        if self._said["lease"] is not None:
            timer = threading.Timer(
                max(0.0, _seconds_left(self._said)) + _LATE_SECONDS, remote_detached_clusters
            )
            timer.name, timer.daemon = "tfd-lease", True
            _timers[self._path] = timer
            timer.start()

    def forget(self) -> None:
        """Remove the file, so that the cluster is not found any more."""
        self._stop_timer()
        self._path.unlink(missing_ok=True)

    def _stop_timer(self) -> None:
        timer = _timers.pop(self._path, None)
        if timer is not None:
            timer.cancel()

    def _update(self, **changes: Any) -> None:
        """Change the file, which another process that is attached may have changed meanwhile."""
        stored: Any = None
        with contextlib.suppress(OSError, ValueError):
            stored = json.loads(self._path.read_text())
        kept = stored if isinstance(stored, dict) else {}
        self._said = {**self._said, **kept, **changes}
        if self._said["lease"] is not None:
            runtime_dir.write_private(self._path, self._said)


@dataclass(frozen=True)
class RemoteDetachedCluster:
    """A cluster on other hosts that stays without a kernel.

    Parameters
    ----------
    name : str
    lease : float
        Until when, in seconds since the epoch.
    launcher : str
    options : dict
    agents : tuple of str
    planned : int
        How many tasks it had when that was written.
    about : dict
        The description of the cluster; empty if there is none yet.
    path : Path
        The file that says so.
    """

    name: str
    lease: float
    launcher: str
    options: dict[str, Any] = field(repr=False)
    agents: tuple[str, ...]
    planned: int
    about: dict[str, Any]
    path: Path
    #: No process of this host looks after it.
    pid: None = None

    def reach(self) -> AgentConnection:
        """Return a way to its agents.

        Raises
        ------
        StateError
            They have ended meanwhile.
        LaunchError
            A host cannot be reached.
        """
        made = base.launcher(self.launcher, self.options)
        try:
            reached: AgentConnection = made.reconnect(self.name, self.agents)
            return reached
        except AgentLost as error:
            self.path.unlink(missing_ok=True)
            raise StateError(
                f"cluster {self.name!r} has ended: {error.what}", fix="start it again"
            ) from None


def _seconds_left(said: Mapping[str, Any]) -> float:
    """Return the seconds that are left of a lease; by the wall clock if the host has rebooted."""
    boot = said["boot"]
    if boot["id"] == runtime_dir.boot_id():
        return float(boot["moment"]) - clock.now()
    return float(said["lease"]) - time.time()


def remote_detached_clusters() -> list[RemoteDetachedCluster]:
    """Return the clusters of this user on other hosts that have a lease, by what files say."""
    found = []
    for path in sorted(runtime_dir.runtime_dir().glob("away-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, InvalidMessage):
            said = json.loads(path.read_text())
            lease = time.time() + _seconds_left(said)
            if lease <= time.time():
                path.unlink()
                continue
            found.append(
                RemoteDetachedCluster(
                    said["cluster"],
                    lease,
                    said["launcher"],
                    said["options"],
                    tuple(said["agents"]),
                    int(said["planned"]),
                    messages.description(said.get("about", {}), "about"),
                    path,
                )
            )
    return found
