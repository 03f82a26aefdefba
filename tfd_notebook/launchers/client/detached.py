"""Detached clusters, which outlive their kernels, and connections to their agents."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tfd_notebook.agent.sessions import SOCKET
from tfd_notebook.errors import AgentLost, StateError
from tfd_notebook.launchers import base
from tfd_notebook.launchers.base import AdoptedCluster, OnEvent, TaskHost
from tfd_notebook.launchers.client import agent_host
from tfd_notebook.launchers.client.agent_host import AgentTaskHost
from tfd_notebook.launchers.client.session import AgentSession, SocketChannel
from tfd_notebook.model.spec import ClusterConfig
from tfd_notebook.net import clock, messages, runtime_dir, validation

#: Seconds after the end of a lease at which its file is removed.
_REMOVAL_DELAY_SECONDS = 0.5
_checked_record = validation.record_with(
    {
        "cluster": validation.cluster_name,
        "launcher": validation.text,
        "options": validation.mapping(validation.text, validation.json_value),
        "agents": validation.listing(validation.text),
        "lease": validation.timestamp,
        "planned": validation.integer(),
        "boot": validation.record({"id": validation.text, "expires_at": validation.timestamp}),
        "description": messages.description,
    }
)
#: Timers that remove the files of clusters from which this process has detached.
_timers: dict[Path, threading.Timer] = {}


@dataclass(frozen=True)
class Detached:
    """A detached cluster on this host.

    Parameters
    ----------
    name : str
    lease : float
        End of the lease, in seconds since the epoch.
    agent : str
        Id of the cluster's agent.
    pid : int
        Pid of the agent.
    directory : Path
        Directory of the agent.
    """

    name: str
    lease: float
    agent: str
    pid: int
    directory: Path

    def connect(self) -> AgentConnection:
        """Return a connection to the agent.

        Raises
        ------
        StateError
            The agent ended in the meantime.
        """
        try:
            # A local agent either runs, or has ended together with its tasks.
            return LocalAgent(AgentSession(self.agent, "localhost", self._connect, grace=60.0))
        except OSError as error:
            raise StateError(
                f"the agent of cluster {self.name!r} cannot be reached: {error.strerror or error}",
                fix="it may have ended: see tfd list",
            ) from None

    def _connect(self) -> SocketChannel:
        try:
            return SocketChannel.to(self.directory / SOCKET)
        except (FileNotFoundError, ConnectionRefusedError):
            raise StateError(f"the agent of cluster {self.name!r} has ended") from None


def detached() -> tuple[Detached | RemoteDetachedCluster, ...]:
    """Return this user's detached clusters by name, on this host and from it on other hosts.

    It reads files and sends no requests.
    """
    remote = remote_detached_clusters()
    clusters: list[Detached | RemoteDetachedCluster] = [*remote]
    # Agents of a remote cluster may run on this host, through a local Jupyter server or sshd.
    parts = {agent for cluster in remote for agent in cluster.agents}
    for directory, state in runtime_dir.agent_states():
        pid, leases = state.get("pid") or 0, state.get("clusters")
        agent = state.get("agent")
        if not leases or not agent or not runtime_dir.is_running(state.get("process")):
            continue
        if agent in parts:
            continue
        left = {
            name: expires_at - clock.now()
            for name, expires_at in leases.items()
            if expires_at is not None
        }
        clusters += [
            Detached(name, time.time() + seconds, agent, pid, directory)
            for name, seconds in left.items()
            if seconds > 0
        ]
    return tuple(sorted(clusters, key=lambda cluster: (cluster.name, cluster.pid or 0)))


class LocalAgent:
    """A session with an agent on this host."""

    def __init__(self, session: AgentSession) -> None:
        self._session = session

    def clusters(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        return agent_host.clusters(self._session.client, timeout)

    def adopt(
        self, config: ClusterConfig, on_event: OnEvent
    ) -> tuple[AgentTaskHost, AdoptedCluster]:
        client = self._session.client
        adopted = agent_host.adopt(client, config.name, on_event)
        return AgentTaskHost(client, config.name, adopted.directory, self.close), adopted

    def close(self) -> None:
        self._session.close()


class AgentConnection(Protocol):
    """A connection of this process to the agents of a cluster."""

    def clusters(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        """Return a summary of each cluster of the agents."""

    def adopt(self, config: ClusterConfig, on_event: OnEvent) -> tuple[TaskHost, AdoptedCluster]:
        """Receive the events of a cluster; return its host and its current state."""

    def close(self) -> None:
        """Close the connection; never raises."""


class DetachedClusterRecord:
    """The file of a remote detached cluster, which exists while the cluster has a lease.

    Parameters
    ----------
    cluster : str
    launcher : str
        Name of the launcher.
    options : dict
        Options of the launcher.
    agents : sequence of str
        Ids of the agents, in the order of the launcher's hosts.
    """

    def __init__(
        self, cluster: str, launcher: str, options: dict[str, Any], agents: Sequence[str]
    ) -> None:
        self._record: dict[str, Any] = {
            "cluster": cluster,
            "launcher": launcher,
            "options": options,
            "agents": list(agents),
            "lease": None,
            "planned": 0,
            "description": {},
        }
        self._path = runtime_dir.runtime_dir() / f"detached-{agents[0]}.json"
        self._stop_timer()  # if this process detached from the cluster and attached again

    def set_lease(self, seconds: float) -> None:
        """Set the end of the lease to `seconds` from now."""
        boot = {"id": runtime_dir.boot_id(), "expires_at": clock.now() + seconds}
        self._update(lease=time.time() + seconds, boot=boot)

    def describe(self, description: Mapping[str, Any]) -> None:
        """Store the description of the cluster; see `tfd_notebook.net.messages.description`."""
        self._update(
            planned=sum(description["task_manager"]["counts"].values()),
            description=dict(description),
        )

    def schedule_removal(self) -> None:
        """Remove the file at the end of the lease, if this process still runs then."""
        if self._record["lease"] is not None:
            timer = threading.Timer(
                max(0.0, _seconds_left(self._record)) + _REMOVAL_DELAY_SECONDS,
                remote_detached_clusters,
            )
            timer.name, timer.daemon = "tfd-lease", True
            _timers[self._path] = timer
            timer.start()

    def remove(self) -> None:
        """Remove the file, so that the cluster is no longer listed."""
        self._stop_timer()
        self._path.unlink(missing_ok=True)

    def _stop_timer(self) -> None:
        timer = _timers.pop(self._path, None)
        if timer is not None:
            timer.cancel()

    def _update(self, **changes: Any) -> None:
        """Change the file, which another attached process may have changed in the meantime."""
        kept = runtime_dir.read_private(self._path, _checked_record) or {}
        self._record = {**self._record, **kept, **changes}
        if self._record["lease"] is not None:
            runtime_dir.write_private(self._path, self._record)


@dataclass(frozen=True)
class RemoteDetachedCluster:
    """A detached cluster on other hosts.

    Parameters
    ----------
    name : str
    lease : float
        End of the lease, in seconds since the epoch.
    launcher : str
    options : dict
    agents : tuple of str
    planned : int
        The number of its tasks when the file was written.
    description : dict
        The description of the cluster; empty if there is none yet.
    path : Path
        The cluster's file.
    """

    name: str
    lease: float
    launcher: str
    options: dict[str, Any] = field(repr=False)
    agents: tuple[str, ...]
    planned: int
    description: dict[str, Any]
    path: Path
    #: No process on this host supervises it.
    pid: None = None

    def connect(self) -> AgentConnection:
        """Return a connection to the agents.

        Raises
        ------
        StateError
            The agents ended in the meantime.
        LaunchError
            A host cannot be reached.
        """
        launcher = base.launcher(self.launcher, self.options)
        try:
            addresses = self.description.get("task_manager", {}).get("addresses")
            connection: AgentConnection = launcher.reconnect(self.name, self.agents, addresses)
            return connection
        except AgentLost as error:
            self.path.unlink(missing_ok=True)
            raise StateError(
                f"cluster {self.name!r} has ended: {error.what}", fix="start it again"
            ) from None


def _seconds_left(record: Mapping[str, Any]) -> float:
    """Return the remaining seconds of a lease; by the wall clock if the host has rebooted."""
    boot = record["boot"]
    if boot["id"] == runtime_dir.boot_id():
        return float(boot["expires_at"]) - clock.now()
    return float(record["lease"]) - time.time()


def remote_detached_clusters() -> list[RemoteDetachedCluster]:
    """Return this user's remote clusters with a lease, according to their files."""
    clusters = []
    for path in sorted(runtime_dir.runtime_dir().glob("detached-*.json")):
        record = runtime_dir.read_private(path, _checked_record)
        if record is None:
            continue
        lease = time.time() + _seconds_left(record)
        if lease <= time.time():
            path.unlink(missing_ok=True)
            continue
        clusters.append(
            RemoteDetachedCluster(
                record["cluster"],
                lease,
                record["launcher"],
                record["options"],
                tuple(record["agents"]),
                record["planned"],
                record["description"],
                path,
            )
        )
    return clusters
