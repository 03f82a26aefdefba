"""What launchers for other hosts share: agents that are reached, compared, opened and joined."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import (
    AgentLost,
    InvalidMessage,
    LaunchError,
    StartTimeout,
    StateError,
    TfdError,
    Unsupported,
    UsageError,
)
from tfd_notebook.launchers import local
from tfd_notebook.launchers.base import ALL_ROLES, Launcher, Node, OnEvent
from tfd_notebook.launchers.client import tls_tunnels
from tfd_notebook.launchers.client.agent_client import AgentNode
from tfd_notebook.launchers.client.detached import DetachedClusterRecord
from tfd_notebook.launchers.client.handshake import HostHandshake, read_handshake
from tfd_notebook.launchers.client.multi_host import MultiHostNode, Tunnels
from tfd_notebook.launchers.client.session import AgentSession, Channel
from tfd_notebook.model.spec import ClusterConfig, Role
from tfd_notebook.net import proxies, validation

if TYPE_CHECKING:
    pass


def join_agent(agent: str, start: bool) -> list[str]:
    """Return what Python is to be given on a host, so that its pipes lead to an agent there.

    Parameters
    ----------
    agent : str
        Its id.
    start : bool
        Whether to start it.
    """
    return ["-u", "-c", stdio.bootstrap("relay"), agent, "start" if start else "again"]


class RemoteHost:
    """One host that a launcher can reach.

    Parameters
    ----------
    label : str
        How it is called where a person reads it.
    """

    #: Whether what runs there can outlive the process that started it.
    lasts: ClassVar[bool] = True

    def __init__(self, label: str) -> None:
        self.label = label
        self.greeting: HostHandshake | None = None

    @abstractmethod
    def connect(self, agent: str, start: bool) -> Channel:
        """Return a channel to the agent, started there if that is wished.

        Raises
        ------
        OSError
            The host cannot be reached now.
        TfdError
            It never will be.
        """

    def greet(self, channel: Channel, again: bool = False) -> None:
        """Hear what the host says of itself, first of all; see `join_agent`.

        Raises
        ------
        LaunchError
            It cannot run an agent.
        OSError
            It has greeted before, `reconnect` says, and the connection broke at once.
        """
        self.greeting = read_handshake(self.label, channel.lines(), again)

    def warnings(self, grace: float) -> list[str]:
        """Return what may become of the way to it, in sentences; `grace` as for the launcher."""
        return []

    def close(self) -> None:
        """Let go of what outlasts a channel."""


class RemoteLauncher(Launcher):
    """Tasks on other hosts, each under an agent that outlives the way to it.

    Parameters
    ----------
    grace : float
        Seconds for which tasks go on when the way to their host is lost. Default 600.
    place : mapping of str to str or sequence of str, optional
        Which hosts run the tasks of a role, by label. Default: the dispatcher and everything of
        which there is one on the first host, all else in turn.
    secure : bool
        Whether tasks reach each other through encrypted tunnels only, so that nothing else listens
        for other hosts. Default false. Each host needs stunnel for it, and this one, too.
    host, allow
        See `Launcher`. By default each host advertises its own address.
    """

    roles: ClassVar[frozenset[Role]] = ALL_ROLES
    on_this_host: ClassVar[bool] = False

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
        if isinstance(grace, bool) or not isinstance(grace, (int, float)) or grace < 1:
            raise UsageError(f"grace={grace!r} must be a second or more")
        self._grace = float(grace)
        self._wishes = {
            str(role): (labels,) if isinstance(labels, str) else tuple(labels)
            for role, labels in (place or {}).items()
        }
        self._secure = bool(secure)

    @property
    def options(self) -> dict[str, Any]:
        place = {role: list(labels) for role, labels in self._wishes.items()}
        return {**super().options, "grace": self._grace, "place": place, "secure": self._secure}

    @abstractmethod
    def hosts(self) -> list[RemoteHost]:
        """Return the hosts, in order; nothing is connected yet."""

    def tunnels(
        self, nodes: Sequence[RemoteNode], config: ClusterConfig, on_event: OnEvent
    ) -> Tunnels:
        """Return what makes tasks reach each other where that is to be encrypted."""
        here = None
        if not any(node.is_local for node in nodes):
            here = local.local_tunnel_agent(config, on_event)
        ends = [(node, node.identity, self.address_of(node.remote)) for node in nodes]
        try:
            return tls_tunnels.TLSTunnels(ends, here)
        except BaseException:
            if here is not None:
                here.close()
            raise

    def surroundings(self, config: ClusterConfig) -> dict[str, Any]:
        """Return what tasks on a host get besides what its own sessions have."""
        return {"environment": dict(config.env), "directory": None, "path": None}

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[Node, ...]:
        hosts = self.hosts()
        links, errors = self._reach_all(hosts, [None] * len(hosts))
        reached = RemoteAgents(self, hosts, links)
        try:
            if errors:
                raise errors[0]
            return (self._join(hosts, links, config, on_event),)
        except BaseException:
            reached.close()
            raise

    def reconnect(self, cluster: str, agents: Sequence[str]) -> RemoteAgents:
        hosts = self.hosts()
        links, errors = self._reach_all(hosts, agents)
        reached = RemoteAgents(self, hosts, links)
        for error in errors:
            if isinstance(error, AgentLost):
                # Nobody could use what is left of it on the other hosts.
                reached.end(cluster)
                raise error
        if errors:
            reached.close()
            raise errors[0]
        return reached

    def _reach_all(
        self, hosts: Sequence[RemoteHost], agents: Sequence[str | None]
    ) -> tuple[list[AgentSession], list[BaseException]]:
        """Return the sessions with the agents that could be reached, and why others could not."""
        pool = concurrent.futures.ThreadPoolExecutor(len(hosts), "tfd-hosts")
        made = list(map(pool.submit, [self._reach] * len(hosts), hosts, agents))
        try:
            concurrent.futures.wait(made)
        except BaseException:  # Ctrl-C, which does not end what was begun
            for host, one in zip(hosts, made, strict=True):
                one.add_done_callback(functools.partial(_let_go, host))
            raise
        finally:
            pool.shutdown(wait=False)
        errors = [error for one in made if (error := one.exception()) is not None]
        return [one.result() for one in made if one.exception() is None], errors

    def _reach(self, host: RemoteHost, agent: str | None) -> AgentSession:
        """Return a session with an agent, a new one where none is named."""
        started = agent is not None
        agent = agent or uuid.uuid4().hex[:12]

        def connect() -> Channel:
            nonlocal started
            channel = host.connect(agent, start=not started)
            started = True
            return channel

        try:
            return AgentSession(agent, host.label, connect, grace=self._grace)
        except OSError as error:
            raise LaunchError(
                f"{host.label} cannot be reached: {error}", fix="is it up, and its address right?"
            ) from None

    def _join(
        self,
        hosts: Sequence[RemoteHost],
        links: Sequence[AgentSession],
        config: ClusterConfig,
        on_event: OnEvent,
    ) -> MultiHostNode:
        """Return the hosts of a new cluster."""
        addresses = self._advertise(hosts, links)
        let_in = () if self._secure else self._let_in(hosts, addresses)
        nodes = []
        self._preload(hosts, links, config)
        for host, link in zip(hosts, links, strict=True):
            surroundings = self.surroundings(config)
            nodes.append(RemoteNode.open_at(link, host, config, on_event, surroundings, let_in))
            for what in host.warnings(self._grace):
                body = {"event": "notice", "severity": "warning", "task": None, "fix": None}
                on_event({**body, "cluster": config.name, "what": what})
        return self._together(nodes, config, on_event)

    def _preload(
        self, hosts: Sequence[RemoteHost], links: Sequence[AgentSession], config: ClusterConfig
    ) -> None:
        """Have all hosts import TensorFlow, beside each other."""
        asked = [link.client.submit("preload", environment=dict(config.env)) for link in links]
        for host, one in zip(hosts, asked, strict=True):
            try:
                one.result(config.policy.start_timeout)
            except concurrent.futures.TimeoutError:
                raise StartTimeout(
                    f"{host.label} did not import TensorFlow within "
                    f"{config.policy.start_timeout:g} s",
                    fix="tfd.Policy(start_timeout=...) gives it longer",
                ) from None
            except TfdError as error:
                raise _named(error, host) from None

    def rejoin(
        self,
        hosts: Sequence[RemoteHost],
        links: Sequence[AgentSession],
        config: ClusterConfig,
        on_event: OnEvent,
    ) -> MultiHostNode:
        """Return the hosts of a cluster that lives; see `RemoteAgents`."""
        self._advertise(hosts, links)
        nodes = []
        for host, link in zip(hosts, links, strict=True):
            link.client.listen(config.name, _from_host(host, on_event))
            found = link.client.request("adopt", 30.0, cluster=config.name)
            nodes.append(RemoteNode(link, host, config.name, found["directory"]))
        return self._together(nodes, config, on_event)

    def _together(
        self, nodes: Sequence[RemoteNode], config: ClusterConfig, on_event: OnEvent
    ) -> MultiHostNode:
        place = self._placer([node.label for node in nodes], config)
        tunnels = self.tunnels(nodes, config, on_event) if self._secure else None
        record = DetachedClusterRecord(
            config.name, self.name, self.options, [node.agent for node in nodes]
        )
        return MultiHostNode(nodes, place, tunnels, record)

    def _advertise(self, hosts: Sequence[RemoteHost], links: Sequence[AgentSession]) -> list[str]:
        """Settle under which address the tasks of each host are known."""
        addresses = ["localhost" if self._secure else self.address_of(host) for host in hosts]
        proxies.bypass([address for address in addresses if address != "localhost"])
        for link, address in zip(links, addresses, strict=True):
            link.client.host = address
        return addresses

    def address_of(self, host: RemoteHost) -> str:
        """Return the address at which a host is reached by its peers."""
        assert host.greeting is not None
        # Where the connection from here arrived.
        way = host.greeting.way.split()
        return way[2] if way else host.label.rpartition("@")[2]

    def _let_in(self, hosts: Sequence[RemoteHost], addresses: Sequence[str]) -> tuple[str, ...]:
        """Return the addresses of the cluster's hosts, and of this one.

        Raises
        ------
        Refused
            The administrator's policy does not allow one of them.
        """
        found = set()
        for host, address in zip(hosts, addresses, strict=True):
            assert host.greeting is not None
            from_here = host.greeting.way.split()[:1]
            for one in (address, *from_here):
                # One that is a name lets nothing in.
                with contextlib.suppress(InvalidMessage):
                    found.add(validation.ip_address(one, "address").partition("%")[0])
        limits().check_allow(sorted(found))
        return tuple(sorted(found))

    def _placer(self, labels: list[str], config: ClusterConfig) -> Callable[[str, int], int]:
        wishes: dict[str, list[int]] = {}
        for role, chosen in self._wishes.items():
            unknown = [label for label in chosen if label not in labels]
            if unknown or not chosen:
                raise UsageError(
                    f"place: {', '.join(unknown) or 'nothing'} is no host of this launcher",
                    fix=f"its hosts are {', '.join(labels)}",
                )
            wishes[role] = [labels.index(label) for label in chosen]

        def place(role: str, index: int) -> int:
            among = wishes.get(role)
            if among is None:
                among = [0] if role == Role.DISPATCHER else list(range(len(labels)))
            return among[index % len(among)]

        return place


def _named(error: TfdError, host: RemoteHost) -> TfdError:
    """Return an error that says on which host it came about."""
    if host.label not in error.what:
        error.what = f"{host.label}: {error.what}"
    return error


def _let_go(host: RemoteHost, made: concurrent.futures.Future[AgentSession]) -> None:
    """End a session that nobody waits for any more, as soon as it has begun."""
    if made.exception() is None:
        made.result().close()
    host.close()


def _from_host(host: RemoteHost, on_event: OnEvent) -> OnEvent:
    """Return what takes the events of a host, and says where they come from."""

    def heard(body: dict[str, Any]) -> None:
        on_event({**body, "host": host.label})

    return heard


class RemoteNode(AgentNode):
    """A cluster's part on an agent of another host."""

    def __init__(self, link: AgentSession, host: RemoteHost, cluster: str, directory: str) -> None:
        super().__init__(link.client, cluster, directory)
        self.label = host.label
        assert host.greeting is not None
        self.is_local = host.greeting.is_here
        self._link = link
        self.remote = host
        self.identity = host.greeting.identity
        self.agent = link.client.id
        #: Networks that may connect to its tasks.
        self.let_in: tuple[str, ...] = ()

    @classmethod
    def open_at(
        cls,
        link: AgentSession,
        host: RemoteHost,
        config: ClusterConfig,
        on_event: OnEvent,
        surroundings: dict[str, Any],
        allow: Sequence[str],
    ) -> RemoteNode:
        """Have the agent of a host take in a new cluster."""
        link.client.listen(config.name, _from_host(host, on_event))
        directory = link.client.request(
            "open",
            30.0,
            cluster=config.name,
            policy=vars(config.policy),
            preload=list(config.preload),
            allow=[*config.allow, *allow],
            about={},
            **surroundings,
        )
        made = cls(link, host, config.name, directory)
        made.let_in = (*config.allow, *allow)
        return made

    def request(self, do: str, *, timeout: float = 30.0, **arguments: Any) -> Any:
        if do == "lease" and not self.remote.lasts:
            raise Unsupported(
                f"{self.label}: what runs there ends with its application at the latest"
            )
        if do == "hold":
            for packed in arguments["tasks"]:
                packed["host"] = packed["host"] or self.host
        try:
            return super().request(do, timeout=timeout, **arguments)
        except TfdError as error:
            raise _named(error, self.remote) from None

    def _last(self, do: str, timeout: float) -> None:
        super()._last(do, timeout)
        self._link.close()
        self.remote.close()


class RemoteAgents:
    """Sessions with the agents of all hosts of a cluster.

    Parameters
    ----------
    launcher : RemoteLauncher
    hosts : sequence of RemoteHost
    links : sequence of Link
        One for each host.
    """

    def __init__(
        self, launcher: RemoteLauncher, hosts: Sequence[RemoteHost], links: Sequence[AgentSession]
    ) -> None:
        self._launcher = launcher
        self._hosts = hosts
        self._links = links

    def clusters(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        # Each agent is told the same of what concerns the whole cluster.
        found: list[dict[str, Any]] = self._links[0].client.request("clusters", timeout)
        return found

    def adopt(
        self, config: ClusterConfig, on_event: OnEvent
    ) -> tuple[MultiHostNode, dict[str, Any]]:
        """Hear of the cluster from now on, and have its tunnels lead here, too."""
        made = self._launcher.rejoin(self._hosts, self._links, config, on_event)
        told = []
        founds = []
        for position, node in enumerate(made.nodes):
            found = node.request("adopt")
            if not found["about"]:
                raise StateError(
                    f"cluster {config.name!r} is not wholly described on {node.label}",
                    fix=f"tfd stop {config.name}, and start it again",
                )
            founds.append(found)
            told += [(position, {**event, "host": node.label}) for event in found["tasks"]]
        try:
            made.adopt(told)
        except BaseException:
            made.leave()
            raise
        return made, {**founds[0], "tasks": [event for _, event in told]}

    def end(self, cluster: str) -> None:
        """End what is left of the cluster; never raises."""
        for link in self._links:
            with contextlib.suppress(TfdError):
                link.client.request("close", 30.0, cluster=cluster)
        self.close()

    def close(self) -> None:
        for link in self._links:
            link.close()
        for host in self._hosts:
            host.close()
