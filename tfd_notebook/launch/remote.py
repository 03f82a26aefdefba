"""What launchers for other hosts share: agents that are reached, compared, opened and joined."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ipaddress
import json
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tfd_notebook.errors import LaunchError, TensorFlowMissing, TfdError, UsageError
from tfd_notebook.launch import protocol, proxies, relay
from tfd_notebook.launch.base import ALL_ROLES, Launcher, Node, OnEvent
from tfd_notebook.launch.client import AgentNode
from tfd_notebook.launch.host import identity, tensorflow_version
from tfd_notebook.launch.link import Channel, Link
from tfd_notebook.launch.several import Several, Tunnels
from tfd_notebook.spec import ClusterConfig, Role
from tfd_notebook.version import VERSION


@dataclass(frozen=True)
class Greeting:
    """What a host says of itself before anything else; see `tfd_notebook.launch.relay`."""

    package: str
    python: str
    executable: str
    tensorflow: str | None
    identity: str
    way: str

    @property
    def is_here(self) -> bool:
        """Whether it shares its ports with this process."""
        return self.identity == identity()


def read_greeting(label: str, lines: Iterator[bytes]) -> Greeting:
    """Return what a host says of itself; what comes before, such as a banner, is passed over.

    Raises
    ------
    LaunchError
        It cannot run an agent, or said nothing of the kind.
    """
    seen = []
    for line in lines:
        text = line.decode(errors="replace").rstrip()
        if text.startswith(relay.GREETING):
            return _understood(label, json.loads(text.removeprefix(relay.GREETING)))
        seen.append(text)
    said = "; ".join(text for text in seen[-3:] if text)
    raise LaunchError(
        f"no agent could be started on {label}" + (f": it said {said!r}" if said else ""),
        fix="python= must name its Python that has tfd-notebook and TensorFlow",
    )


def _understood(label: str, said: Mapping[str, Any]) -> Greeting:
    python = f"its Python {said['python']} ({said['executable']})"
    if "missing" in said:
        have = said["package"]
        raise LaunchError(
            f"{label}: {python} has tfd-notebook {have} and this kernel {VERSION}"
            if have
            else f"{label}: {python} has no tfd-notebook: {said['missing']}",
            fix=f'pip install "tfd-notebook[tensorflow]=={VERSION}" there, or name another Python',
        )
    if "error" in said:
        raise protocol.unpack_error(said["error"])
    if said["package"] != VERSION:
        raise LaunchError(
            f"{label}: {python} has tfd-notebook {said['package']} and this kernel {VERSION}",
            fix=f"pip install tfd-notebook=={VERSION} there",
        )
    if said["tensorflow"] is None:
        raise TensorFlowMissing(
            f"{label}: {python} has no TensorFlow",
            fix='pip install "tfd-notebook[tensorflow]" there, or name another Python',
        )
    mine = tensorflow_version()
    if mine is not None and _series(mine) != _series(said["tensorflow"]):
        raise LaunchError(
            f"{label}: {python} has TensorFlow {said['tensorflow']} and this kernel {mine}: "
            "they do not understand each other for certain",
            fix="install the same there and here",
        )
    return Greeting(**{name: said[name] for name in Greeting.__dataclass_fields__})


def _series(version: str) -> list[str]:
    return version.split(".")[:2]


class RemoteHost:
    """One host that a launcher can reach.

    Parameters
    ----------
    label : str
        How it is called where a person reads it.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.greeting: Greeting | None = None

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
        Whether tasks reach each other through encrypted tunnels only.
    **options
        Those of every `Launcher`.
    """

    roles: ClassVar[frozenset[Role]] = ALL_ROLES
    on_this_host: ClassVar[bool] = False

    def __init__(
        self,
        *,
        grace: float = 600.0,
        place: Mapping[str, str | Sequence[str]] | None = None,
        secure: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**{"host": "", **options})
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

    def tunnels(self, hosts: Sequence[RemoteHost]) -> Tunnels:
        """Return what makes tasks reach each other where that is to be encrypted."""
        raise UsageError(
            f"launcher {self.name!r} has no tunnels of its own", fix="leave secure=True out"
        )

    def surroundings(self, config: ClusterConfig) -> dict[str, Any]:
        """Return what tasks on a host get besides what its own sessions have."""
        return {"environment": dict(config.env), "directory": None, "path": None}

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[Node, ...]:
        hosts = self.hosts()
        links: dict[int, Link] = {}
        try:
            with concurrent.futures.ThreadPoolExecutor(len(hosts), "tfd-hosts") as pool:
                made = [pool.submit(self._reach, host) for host in hosts]
            for position, one in enumerate(made):
                if one.exception() is None:
                    links[position] = one.result()
            for one in made:
                one.result()
            return (self._join(hosts, links, config, on_event),)
        except BaseException:
            for link in links.values():
                link.close()
            for host in hosts:
                host.close()
            raise

    def _reach(self, host: RemoteHost) -> Link:
        agent = uuid.uuid4().hex[:12]
        started = False

        def connect() -> Channel:
            nonlocal started
            channel = host.connect(agent, start=not started)
            started = True
            return channel

        try:
            return Link(agent, host.label, connect, grace=self._grace)
        except OSError as error:
            raise LaunchError(
                f"{host.label} cannot be reached: {error}", fix="is it up, and its address right?"
            ) from None

    def _join(
        self,
        hosts: list[RemoteHost],
        links: Mapping[int, Link],
        config: ClusterConfig,
        on_event: OnEvent,
    ) -> Several:
        addresses = [self.address_of(host) for host in hosts]
        proxies.bypass([address for address in addresses if address != "localhost"])
        let_in = () if self._secure else self._let_in(hosts, addresses)
        nodes = []
        for position, host in enumerate(hosts):
            client = links[position].client
            client.host = addresses[position]
            client.request("preload", config.policy.start_timeout, environment=dict(config.env))
            nodes.append(
                RemoteNode.open_at(
                    links[position], host, config, on_event, self.surroundings(config), let_in
                )
            )
        tunnels = self.tunnels(hosts) if self._secure else None
        return Several(nodes, self._placer([host.label for host in hosts], config), tunnels)

    def address_of(self, host: RemoteHost) -> str:
        """Return the address under which the peers of a host's tasks reach them."""
        if self._secure:
            return "localhost"
        assert host.greeting is not None
        # Where ssh's connection arrived: an address that is reached from here.
        way = host.greeting.way.split()
        return way[2] if len(way) == 4 else host.label.rpartition("@")[2]

    def _let_in(self, hosts: Sequence[RemoteHost], addresses: Sequence[str]) -> tuple[str, ...]:
        """Return exactly the hosts of the cluster, and this one, as networks."""
        found = set()
        for host, address in zip(hosts, addresses, strict=True):
            assert host.greeting is not None
            from_here = host.greeting.way.split()[:1]
            for one in (address, *from_here):
                with contextlib.suppress(ValueError):
                    found.add(str(ipaddress.ip_network(one)))
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


class RemoteNode(AgentNode):
    """A cluster's part on an agent of another host."""

    def __init__(self, link: Link, host: RemoteHost, cluster: str, directory: str) -> None:
        super().__init__(link.client, cluster, directory)
        self.label = host.label
        assert host.greeting is not None
        self.here = host.greeting.is_here
        self._link = link
        self._remote = host
        #: Networks that may connect to its tasks.
        self.let_in: tuple[str, ...] = ()

    @classmethod
    def open_at(
        cls,
        link: Link,
        host: RemoteHost,
        config: ClusterConfig,
        on_event: OnEvent,
        surroundings: dict[str, Any],
        allow: Sequence[str],
    ) -> RemoteNode:
        """Have the agent of a host take in a new cluster."""

        def from_host(body: dict[str, Any]) -> None:
            on_event({**body, "host": host.label})

        link.client.listen(config.name, from_host)
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
        if do == "hold":
            for packed in arguments["tasks"]:
                packed["host"] = packed["host"] or self.host
        try:
            return super().request(do, timeout=timeout, **arguments)
        except TfdError as error:
            if self.label not in error.what:
                error.what = f"{self.label}: {error.what}"
            raise

    def _last(self, do: str, timeout: float) -> None:
        super()._last(do, timeout)
        self._link.close()
        self._remote.close()
