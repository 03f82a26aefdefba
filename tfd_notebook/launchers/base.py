"""Launchers decide where tasks run; everything else asks them through this small contract."""

from __future__ import annotations

import difflib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar

from tfd_notebook.errors import UnknownName, Unsupported, UsageError
from tfd_notebook.launchers import profiles
from tfd_notebook.model.spec import SERVER_ROLES, ClusterConfig, Role

ENTRY_POINTS = "tfd_notebook.launchers"

#: All that a launcher can run.
ALL_ROLES = frozenset((Role.DISPATCHER, Role.DATA_WORKER, *SERVER_ROLES))

#: Receives the events of a node: JSON values, see `tfd_notebook.net.agent_protocol`.
OnEvent = Callable[[dict[str, Any]], None]


class Node(ABC):
    """One host of a cluster: an agent that starts, watches and ends the tasks there.

    Attributes
    ----------
    host : str
        Name or address of the host, as its peers use it.
    directory : str
        A directory on that host which ends with the cluster.
    here : bool
        Whether it is the host of this process.
    label : str
        How a person calls the host; empty where that is `host`.
    """

    host: str
    directory: str
    is_local: bool = True
    label: str = ""

    @abstractmethod
    def request(self, do: str, *, timeout: float = 30.0, **arguments: Any) -> Any:
        """Have the agent do something, and return its answer.

        Requests are ``hold(tasks)``, which takes a port for each and answers with the addresses,
        ``start(tasks)``, ``stop(tasks)``, ``restart(task, settings)``, ``kill(task)``,
        ``install(blob, tokens, gone)``, ``logs(task, size, offset)``, which answers with text and
        the offset to go on from, and three that are not sent if tasks run in this process:
        ``gpus()``, which answers as `agent.gpu_discovery.find` does, ``lease(seconds, renew)``,
        which has the cluster stay without its owner and answers until when, and
        ``describe(about)``, which keeps what whoever attaches needs to know. A task to hold has
        the fields of `tfd_notebook.model.spec.TaskSpec`.

        Parameters
        ----------
        do : str
        timeout : float
            Seconds to wait for the answer.
        **arguments
            JSON values.

        Raises
        ------
        TfdError
            What the agent answered, AgentLost if it is gone, TimeLimit if it does not answer.
        """

    def gpus(self) -> list[dict[str, Any]]:
        """Ask which GPUs may be used.

        Returns
        -------
        list of dict
            For each host, in the order in which `place_of` counts them, what
            `agent.gpu_discovery.find` returns, and ``host``: how a person calls it.
        """
        return [{"host": self.label or "localhost", **self.request("gpus")}]

    def place_of(self, role: str, index: int) -> int:
        """Return the position of the host that a task runs on, or would."""
        return 0

    def unreachable_peers(self, tasks: Mapping[str, str]) -> list[str]:
        """Say which hosts of the cluster cannot reach which of these tasks, and why.

        Parameters
        ----------
        tasks : mapping of str to str
            Addresses of tasks that are ready, by name.

        Returns
        -------
        list of str
            A sentence for each pair of hosts; none where all is on one host.
        """
        return []

    @abstractmethod
    def close(self, timeout: float = 10.0) -> None:
        """End all tasks of the cluster on this host and let go of their ports; never raises."""

    @abstractmethod
    def leave(self) -> None:
        """Hear no more of the cluster, whose tasks go on; never raises."""


class Launcher(ABC):
    """Where tasks run. One subclass, one file; others may add theirs as an entry point.

    The entry point's group is ``tfd_notebook.launchers``, its name the launcher's.

    Parameters
    ----------
    host : str or mapping of str to str
        Name or address under which the tasks' peers reach them; one for all, or one per role.
        Default ``"localhost"``.
    allow : iterable of str
        Networks in CIDR form that may connect besides the tasks' own host. Default: none.

    Attributes
    ----------
    name : str
        What users write: ``launcher="local"``.
    summary : str
        One line for ``%tfd_cluster launchers``.
    roles : frozenset of Role
        What it can run. Default: dispatcher and data workers.
    in_process : bool
        Whether the tasks live in the calling process.
    on_this_host : bool
        Whether they live on the host of the calling process.
    offered : bool
        Whether forms offer it; one for tests only is there for those who name it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    roles: ClassVar[frozenset[Role]] = frozenset((Role.DISPATCHER, Role.DATA_WORKER))
    in_process: ClassVar[bool] = False
    on_this_host: ClassVar[bool] = True
    offered: ClassVar[bool] = True

    def __init__(
        self, *, host: str | Mapping[str, str] = "localhost", allow: Iterable[str] = ()
    ) -> None:
        self._host = host
        self.allow = (allow,) if isinstance(allow, str) else tuple(allow)

    @property
    def options(self) -> dict[str, Any]:
        """What it was given, as JSON values with which another one like it can be made.

        A subclass with options of its own adds them.
        """
        host = self._host if isinstance(self._host, str) else dict(self._host)
        return {"host": host, "allow": list(self.allow)}

    def host_of(self, role: Role) -> str:
        """Return the name or address that tasks of `role` advertise."""
        if isinstance(self._host, str):
            return self._host
        return self._host.get(str(role), "localhost")

    @abstractmethod
    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[Node, ...]:
        """Return the hosts for a cluster, each with an agent that is ready for requests.

        Parameters
        ----------
        config : ClusterConfig
        on_event : callable
            Called from any thread with each event of the cluster's tasks.
        """

    def reconnect(self, cluster: str, agents: Sequence[str]) -> Any:
        """Return a way to the agents of a cluster that stays on other hosts.

        Parameters
        ----------
        cluster : str
        agents : sequence of str
            Ids of the agents.

        Returns
        -------
        tfd_notebook.launchers.client.detached.AgentConnection

        Raises
        ------
        AgentLost
            One of them has ended; the others were told to.
        LaunchError
            A host cannot be reached.
        Unsupported
            Tasks of this launcher are never on other hosts.
        """
        raise Unsupported(f"launcher {self.name!r} has no agents on other hosts")


def launcher(kind: str | Launcher, options: Mapping[str, Any] | None = None) -> Launcher:
    """Return the launcher or profile of that name, or the object itself.

    Parameters
    ----------
    kind : str or Launcher
    options : mapping, optional
        What to make it with, as its ``options`` were.

    Raises
    ------
    UnknownName
        With the nearest name that exists.
    Unsupported
        On Windows.
    """
    if sys.platform == "win32":
        raise Unsupported("tfd_notebook does not run on Windows", fix="use WSL2")
    if isinstance(kind, Launcher):
        return kind
    if not isinstance(kind, str):
        raise UsageError(f"launcher={kind!r} is neither a name nor a Launcher")
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if kind not in found:
        profile = profiles.find(kind)
        if profile is not None and profile.launcher in found:
            try:
                return launcher(profile.launcher, {**profile.options, **(options or {})})
            except TypeError as error:
                raise UsageError(f"the profile {profile.path}: {error}") from None
        near = difflib.get_close_matches(kind, found, n=1)
        raise UnknownName(
            f"there is no launcher {kind!r}",
            fix=(f"did you mean {near[0]!r}? " if near else "")
            + f"launchers here: {', '.join(sorted(found))}; profiles are files in "
            f"{profiles.user_directory()}"
            + (f", and {profile.path} means {profile.launcher!r}" if profile else ""),
        )
    loaded = found[kind].load()(**(options or {}))
    assert isinstance(loaded, Launcher)
    return loaded


def kinds() -> dict[str, type[Launcher]]:
    """Return the launchers that exist here, by name."""
    return {
        point.name: point.load()
        for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)
    }
