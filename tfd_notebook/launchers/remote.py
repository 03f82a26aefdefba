"""Base of launchers for other hosts: connect to agents, and open or adopt clusters there."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import (
    AgentLost,
    LaunchError,
    StateError,
    TfdError,
    Unsupported,
    UsageError,
)
from tfd_notebook.launchers import local
from tfd_notebook.launchers.base import ALL_ROLES, AdoptedCluster, Launcher, OnEvent, TaskHost
from tfd_notebook.launchers.client import agent_host, host_addresses, tls_tunnels
from tfd_notebook.launchers.client.agent_client import EndpointOf
from tfd_notebook.launchers.client.agent_host import AgentTaskHost
from tfd_notebook.launchers.client.detached import DetachedClusterRecord
from tfd_notebook.launchers.client.handshake import HostHandshake, read_handshake
from tfd_notebook.launchers.client.multi_host import Place, TaskHostGroup, Tunnels
from tfd_notebook.launchers.client.session import AgentSession, Channel
from tfd_notebook.launchers.client.shared_hosts import prove_identities
from tfd_notebook.model.events import Event, GpusMeasured, Notice, TaskChanged
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.spec import ClusterConfig, Endpoint, Role, TaskSpec, check_seconds
from tfd_notebook.net import proxies


def join_agent(agent: str, start: bool) -> list[str]:
    """Return the arguments of Python on a host that connect its pipes to an agent there.

    Parameters
    ----------
    agent : str
        Id of the agent.
    start : bool
        True to start the agent, False to reconnect to it.
    """
    return ["-u", "-c", stdio.bootstrap("stdio"), agent, "start" if start else "reconnect"]


class RemoteHost(Handle, ABC):
    """One host that a launcher can reach.

    Parameters
    ----------
    label : str
        Name of the host in messages to users.
    """

    #: The session with the agent there, once `open_session` has returned.
    session: AgentSession
    #: Equal for hosts of a cluster that have proven that they share their ports.
    identity: str = ""
    #: True if the host has proven that it shares its ports with this process.
    is_local: bool = False
    #: The ends of this process's connection to the host, of the host and of this process. They are
    #: not stated by the host. Empty if unknown. `connect` sets them.
    peer_address: str = ""
    own_address: str = ""
    #: The address of the host for its peers, or empty; see `host_addresses.find_addresses`.
    address: str = ""

    def __init__(self, label: str) -> None:
        self.label = label
        self.handshake: HostHandshake | None = None

    def open_session(self, agent: str | None, grace: float) -> None:
        """Open a session with an agent; start one if `agent` is None."""
        started = agent is not None
        agent = agent or uuid.uuid4().hex[:12]

        def connect() -> Channel:
            nonlocal started
            channel = self.connect(agent, start=not started)
            started = True
            return channel

        try:
            self.session = AgentSession(agent, self.label, connect, grace=grace)
        except OSError as error:
            raise LaunchError(
                f"connecting to {self.label} failed: {error}",
                fix=self.unreached_fix,
            ) from None

    @property
    def unreached_fix(self) -> str:
        """The next step if the host cannot be reached."""
        return "check that the host is up, and its address"

    def close_session(self) -> None:
        """Close the session, if any, and the resources that outlast a channel."""
        if hasattr(self, "session"):
            self.session.close()
        self.close()

    @abstractmethod
    def connect(self, agent: str, start: bool) -> Channel:
        """Return a channel to the agent, which is started if `start` is true.

        Raises
        ------
        OSError
            The host cannot be reached now. A later attempt may succeed.
        TfdError
            The host can never be reached.
        """

    def read_handshake(self, channel: Channel, reconnect: bool = False) -> None:
        """Read the handshake of the host, the first data on a channel; see `join_agent`.

        Raises
        ------
        LaunchError
            The host cannot run an agent.
        OSError
            It sent a handshake before, according to `reconnect`, and the connection broke at once.
        """
        self.handshake = read_handshake(self.label, channel.lines(), reconnect)

    def warnings(self, grace: float) -> list[str]:
        """Return warnings about the connection as sentences; `grace` as for the launcher."""
        return []

    def close(self) -> None:
        """Close the resources that outlast a channel."""


class RemoteLauncher(Launcher):
    """Tasks on other hosts, each under an agent that outlives the connection to it.

    Parameters
    ----------
    grace : float
        Seconds that tasks keep running after the connection to their host is lost. Default 600.
    place : mapping of str to str or sequence of str, optional
        The hosts that run the tasks of a role, by label. Default: the dispatcher runs on the first
        host, other tasks on all hosts round-robin.
    secure : bool
        True if tasks communicate through encrypted tunnels only, so that no other port is open to
        other hosts. Default false. It requires stunnel on each host, including this one.
    host, allow
        See `Launcher`. By default each host advertises its address.
    """

    roles: ClassVar[frozenset[Role]] = ALL_ROLES
    on_this_host: ClassVar[bool] = False
    #: The owner with which the tasks of a cluster end, such as "its kernel". Empty if they can
    #: outlive the process that started them.
    ends_with: ClassVar[str] = ""

    def __init__(
        self,
        *,
        grace: float = 600.0,
        place: Mapping[str, str | Sequence[str]] | None = None,
        secure: bool = False,
        host: str | Mapping[str, str] = "",
        allow: Iterable[str] = (),
    ) -> None:
        super().__init__(host=host, allow=allow)
        self._grace = float(check_seconds("grace", grace, 1))
        self._place = {
            str(role): (labels,) if isinstance(labels, str) else tuple(labels)
            for role, labels in (place or {}).items()
        }
        self._secure = bool(secure)

    @property
    def options(self) -> dict[str, Any]:
        place = {role: list(labels) for role, labels in self._place.items()}
        return {**super().options, "grace": self._grace, "place": place, "secure": self._secure}

    @abstractmethod
    def hosts(self) -> list[RemoteHost]:
        """Return the hosts in order, without connecting to them."""

    def hosts_for(self, config: ClusterConfig, on_event: OnEvent) -> list[RemoteHost]:
        """Return the hosts of a new cluster. A launcher that starts hosts overrides this."""
        return self.hosts()

    def late_hosts(self, config: ClusterConfig) -> Sequence[RemoteHost]:
        """Return the hosts that may join a cluster, for data workers. Default: none."""
        return ()

    def tunnels(
        self, task_hosts: Sequence[RemoteTaskHost], config: ClusterConfig, on_event: OnEvent
    ) -> Tunnels:
        """Return the tunnels between tasks that need encryption."""
        local_agent = None
        if not any(host.is_local for host in task_hosts):
            local_agent = local.local_tunnel_agent(config, on_event)
        ends = [(host, host.identity, self.address_of(host.remote)) for host in task_hosts]
        try:
            return tls_tunnels.TLSTunnels(ends, local_agent)
        except BaseException:
            if local_agent is not None:
                local_agent.close()
            raise

    def task_environment(self, config: ClusterConfig) -> dict[str, Any]:
        """Return the environment of tasks on a host, in addition to that of a login session."""
        return {"environment": dict(config.env), "directory": None, "path": None}

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[TaskHost, ...]:
        hosts = self.hosts_for(config, on_event)
        errors = self._connect_all(hosts, [None] * len(hosts))
        try:
            if errors:
                raise errors[0]
            return (self._open(hosts, config, on_event),)
        except BaseException:
            RemoteAgents(self, hosts).close()
            raise

    def reconnect(
        self, cluster: str, agents: Sequence[str], addresses: Mapping[str, str] | None = None
    ) -> RemoteAgents:
        if self.ends_with:
            raise Unsupported(
                f"cluster {cluster!r} ends with {self.ends_with} and cannot be attached"
            )
        hosts = self.hosts()
        errors = self._connect_all(hosts, agents)
        reached = RemoteAgents(self, hosts, addresses)
        for error in errors:
            if isinstance(error, AgentLost):
                # The part of the cluster on the other hosts is of no use.
                reached.end(cluster)
                raise error
        if errors:
            reached.close()
            raise errors[0]
        return reached

    def _connect_all(
        self, hosts: Sequence[RemoteHost], agents: Sequence[str | None]
    ) -> list[BaseException]:
        """Open the sessions with all agents, and return the errors."""
        pool = concurrent.futures.ThreadPoolExecutor(len(hosts), "tfd-hosts")
        attempts = [
            pool.submit(host.open_session, agent, self._grace)
            for host, agent in zip(hosts, agents, strict=False)
        ]
        try:
            concurrent.futures.wait(attempts)
        except BaseException:  # Ctrl-C does not end connections in progress
            for host, attempt in zip(hosts, attempts, strict=False):
                attempt.add_done_callback(functools.partial(_close_session, host))
            raise
        finally:
            pool.shutdown(wait=False)
        return [error for attempt in attempts if (error := attempt.exception()) is not None]

    def _open(
        self,
        hosts: Sequence[RemoteHost],
        config: ClusterConfig,
        on_event: OnEvent,
    ) -> TaskHostGroup:
        """Return the hosts of a new cluster."""
        late = [host.label for host in self.late_hosts(config)]
        addresses = self._advertise(hosts)
        networks: list[tuple[str, ...]] = [()] * len(hosts)
        if not self._secure:
            networks = host_addresses.networks_to_allow(hosts, addresses)
        task_hosts = []
        place = self._placement([host.label for host in hosts], late)
        self._preload(hosts, config)
        for position, (host, allowed_networks) in enumerate(zip(hosts, networks, strict=True)):
            endpoint_of = self._endpoint_of(place, position, addresses[position])
            task_hosts.append(self._open_on(host, config, on_event, allowed_networks, endpoint_of))
        return self._group(task_hosts, place, config, on_event)

    def _open_on(
        self,
        host: RemoteHost,
        config: ClusterConfig,
        on_event: OnEvent,
        networks: tuple[str, ...],
        endpoint_of: EndpointOf,
    ) -> RemoteTaskHost:
        """Open a new cluster on one of its hosts, which lets in these networks."""
        directory = agent_host.open_cluster(
            host.session.client,
            config,
            _from_host(host, on_event),
            self.task_environment(config),
            networks,
            endpoint_of,
        )
        for what in host.warnings(self._grace):
            on_event(Notice("warning", what))
        allow = (*config.allow, *networks)
        return RemoteTaskHost(host, config.name, directory, allow, self.ends_with)

    def join(
        self, group: TaskHostGroup, host: RemoteHost, config: ClusterConfig, on_event: OnEvent
    ) -> bool:
        """Add a host to a running cluster without tunnels; return False if the cluster has ended.

        Raises
        ------
        TfdError
        """
        host.open_session(None, self._grace)
        earlier = [cast(RemoteTaskHost, task_host) for task_host in group.hosts]
        hosts = [*(task_host.remote for task_host in earlier), host]
        addresses = self._advertise(hosts)
        *others, own = host_addresses.networks_to_allow(hosts, addresses)
        self._preload([host], config)
        endpoint_of = self._endpoint_of(group.place_of, len(earlier), addresses[-1])
        task_host = self._open_on(host, config, on_event, own, endpoint_of)
        for other, networks in zip(earlier, others, strict=True):
            other.allow(networks)
        if not group.join(task_host):
            task_host.close()
            return False
        return True

    def _preload(self, hosts: Sequence[RemoteHost], config: ClusterConfig) -> None:
        """Import TensorFlow on all hosts concurrently."""
        replies = [agent_host.submit_preload(host.session.client, config.env) for host in hosts]
        for host, reply in zip(hosts, replies, strict=True):
            try:
                agent_host.await_preload(reply, host.label, config.policy.start_timeout)
            except TfdError as error:
                raise _with_host(error, host) from None

    def adopt(
        self,
        hosts: Sequence[RemoteHost],
        config: ClusterConfig,
        on_event: OnEvent,
        recorded: Mapping[str, Endpoint],
    ) -> tuple[TaskHostGroup, list[AdoptedCluster]]:
        """Return the hosts of a running cluster and its state on each; see `RemoteAgents`."""
        addresses = self._advertise(hosts)
        task_hosts, adopted = [], []
        place = self._placement([host.label for host in hosts])
        for task, endpoint in recorded.items():
            role, _, index = task.partition(":")
            position = place(role, int(index))
            address = self.host_of(Role(role)) or addresses[position]
            if address != endpoint.host:
                raise StateError(
                    f"{hosts[position].label} has the address {address}, but {task} was started "
                    f"at {endpoint.host}",
                    fix="attach from the network in which the cluster was started, or stop it: "
                    f"tfd stop {config.name}",
                )
        for position, host in enumerate(hosts):
            part = agent_host.adopt(
                host.session.client,
                config.name,
                _from_host(host, on_event),
                self._endpoint_of(place, position, addresses[position], recorded),
            )
            task_hosts.append(RemoteTaskHost(host, config.name, part.directory))
            adopted.append(part)
        return self._group(task_hosts, place, config, on_event), adopted

    def _endpoint_of(
        self,
        place: Place,
        position: int,
        address: str,
        recorded: Mapping[str, Endpoint] | None = None,
    ) -> EndpointOf:
        """Return the argument `endpoint_of` of `AgentClient.listen` for the host at `position`."""

        def endpoint_of(task: str) -> tuple[str, int] | None:
            role, _, index = task.partition(":")
            if place(role, int(index)) != position:
                return None
            endpoint = (recorded or {}).get(task)
            return self.host_of(Role(role)) or address, endpoint.port if endpoint else 0

        return endpoint_of

    def _group(
        self,
        task_hosts: Sequence[RemoteTaskHost],
        place: Place,
        config: ClusterConfig,
        on_event: OnEvent,
    ) -> TaskHostGroup:
        tunnels = self.tunnels(task_hosts, config, on_event) if self._secure else None
        record = DetachedClusterRecord(
            config.name, self.name, self.options, [host.agent for host in task_hosts]
        )
        return TaskHostGroup(task_hosts, place, tunnels, record)

    def _advertise(self, hosts: Sequence[RemoteHost]) -> list[str]:
        """Set and return the address that the tasks of each host advertise."""
        prove_identities(hosts)
        host_addresses.find_addresses(hosts)
        addresses = ["localhost" if self._secure else self.address_of(host) for host in hosts]
        proxies.bypass([address for address in addresses if address != "localhost"])
        for host, address in zip(hosts, addresses, strict=True):
            host.session.client.host = address
        return addresses

    def address_of(self, host: RemoteHost) -> str:
        """Return the address under which other hosts reach a host."""
        return host.address or host.label.rpartition("@")[2]

    def place_on(self, labels: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """Return the labels of the hosts that run the tasks of a role, by role."""
        return self._place

    def _placement(self, running: Sequence[str], late: Sequence[str] = ()) -> Place:
        """Return the placement on hosts with these labels; `late` ones run data workers only."""
        labels = [*running, *late]
        positions: dict[str, list[int]] = {}
        for role, chosen in self.place_on(labels).items():
            known = labels if role == Role.DATA_WORKER else running
            unknown = [label for label in chosen if label not in known]
            if unknown or not chosen:
                raise UsageError(
                    f"place: unknown host {', '.join(unknown) or 'None'}",
                    fix=f"the hosts of this launcher are {', '.join(labels)}",
                )
            positions[role] = [labels.index(label) for label in chosen]

        def place(role: str, index: int) -> int:
            candidates = positions.get(role)
            if candidates is None:
                count = len(labels if role == Role.DATA_WORKER else running)
                candidates = [0] if role == Role.DISPATCHER else list(range(count))
            return candidates[index % len(candidates)]

        return place


def _with_host(error: TfdError, host: RemoteHost) -> TfdError:
    """Return the error with the host's label in its message."""
    if host.label not in error.what:
        error.what = f"{host.label}: {error.what}"
    return error


def _close_session(host: RemoteHost, _: concurrent.futures.Future[None]) -> None:
    host.close_session()


def _from_host(host: RemoteHost, on_event: OnEvent) -> OnEvent:
    """Return a callback that adds the host's label to its events."""

    def forward(event: Event) -> None:
        if isinstance(event, (GpusMeasured, TaskChanged)):
            event = dataclasses.replace(event, host=host.label)
        on_event(event)

    return forward


class RemoteTaskHost(AgentTaskHost):
    """The tasks of a cluster under the agent of another host."""

    def __init__(
        self,
        host: RemoteHost,
        cluster: str,
        directory: str,
        allowed_networks: tuple[str, ...] = (),
        ends_with: str = "",
    ) -> None:
        client = host.session.client
        super().__init__(client, cluster, directory, host.close_session)
        self.label = host.label
        self.is_local = host.is_local
        self.remote = host
        self.identity = host.identity
        self.agent = client.id
        self.allowed_networks = allowed_networks
        self.peer_address = host.peer_address
        self._ends_with = ends_with

    def request(self, method: str, timeout: float, **arguments: Any) -> Any:
        try:
            return super().request(method, timeout, **arguments)
        except TfdError as error:
            raise _with_host(error, self.remote) from None

    def allow(self, networks: Sequence[str], *, timeout: float = 30.0) -> None:
        super().allow(networks, timeout=timeout)
        self.allowed_networks = tuple(dict.fromkeys((*self.allowed_networks, *networks)))

    def reserve_ports(self, tasks: Sequence[TaskSpec], *, timeout: float = 30.0) -> dict[str, str]:
        specs = [dataclasses.replace(task, host=task.host or self.host) for task in tasks]
        return super().reserve_ports(specs, timeout=timeout)

    def lease(self, seconds: float, renew: bool = False, *, timeout: float = 30.0) -> float:
        if self._ends_with:
            raise Unsupported(f"{self.label}: the cluster ends with {self._ends_with}")
        return super().lease(seconds, renew, timeout=timeout)


class RemoteAgents:
    """Sessions with the agents of all hosts of a cluster.

    Parameters
    ----------
    launcher : RemoteLauncher
    hosts : sequence of RemoteHost
    addresses : mapping of str to str, optional
        The recorded addresses of tasks. Their hosts cannot change them.
    """

    def __init__(
        self,
        launcher: RemoteLauncher,
        hosts: Sequence[RemoteHost],
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        self._launcher = launcher
        self._hosts = hosts
        self._recorded = {task: Endpoint.parse(a) for task, a in (addresses or {}).items()}

    def clusters(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        # All agents have the same data about the cluster as a whole.
        return agent_host.clusters(self._hosts[0].session.client, timeout)

    def adopt(
        self, config: ClusterConfig, on_event: OnEvent
    ) -> tuple[TaskHostGroup, AdoptedCluster]:
        """Receive the events of the cluster from now on, and reopen its tunnels to this host."""
        cluster, parts = self._launcher.adopt(self._hosts, config, on_event, self._recorded)
        events: list[TaskChanged] = []
        for task_host, part in zip(cluster.hosts, parts, strict=True):
            if not part.description:
                raise StateError(
                    f"the description of cluster {config.name!r} on {task_host.label} is "
                    "incomplete",
                    fix=f"tfd stop {config.name}, and start it again",
                )
            events += [dataclasses.replace(event, host=task_host.label) for event in part.tasks]
        try:
            cluster.adopt(events)
        except BaseException:
            cluster.detach()
            raise
        return cluster, dataclasses.replace(parts[0], tasks=events)

    def end(self, cluster: str) -> None:
        """Stop the rest of the cluster; never raises."""
        for host in self._hosts:
            if hasattr(host, "session"):
                AgentTaskHost(host.session.client, cluster).close(30.0)
        self.close()

    def close(self) -> None:
        for host in self._hosts:
            host.close_session()
