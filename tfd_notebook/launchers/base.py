"""Base classes of launchers. A launcher decides where the tasks of a cluster run."""

from __future__ import annotations

import difflib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar

from tfd_notebook.errors import UnknownName, Unsupported, UsageError
from tfd_notebook.launchers import profiles
from tfd_notebook.model.events import Event
from tfd_notebook.model.spec import SERVER_ROLES, ClusterConfig, Role

ENTRY_POINTS = "tfd_notebook.launchers"

#: Every role that a launcher can run.
ALL_ROLES = frozenset((Role.DISPATCHER, Role.DATA_WORKER, *SERVER_ROLES))

#: Receives the events of a node: JSON values, see `tfd_notebook.net.agent_protocol`.
OnEvent = Callable[[Event], None]


class Node(ABC):
    """One host of a cluster, with an agent that starts, supervises and stops the tasks there.

    Attributes
    ----------
    host : str
        Name or address of the host, as its peers use it.
    directory : str
        A directory on that host that is removed with the cluster.
    is_local : bool
        True if this process runs on the same host.
    label : str
        The host's name in messages to users; empty if it is `host`.
    """

    host: str
    directory: str
    is_local: bool = True
    label: str = ""

    @abstractmethod
    def request(self, do: str, *, timeout: float = 30.0, **arguments: Any) -> Any:
        """Send a request to the agent and return its reply.

        The requests are:

        * ``hold(tasks)``: reserve a port for each task and return the addresses.
        * ``start(tasks)``, ``stop(tasks)``, ``restart(task, settings)``, ``kill(task)``.
        * ``install(blob, tokens, gone)``: make Python functions available to the tasks.
        * ``logs(task, size, offset)``: return text and the offset to continue from.

        Three requests are not sent if the tasks run in this process:

        * ``gpus()``: return the same as `agent.gpu_discovery.find`.
        * ``lease(seconds, renew)``: keep the cluster without its owner and return the deadline.
        * ``describe(about)``: store the metadata that a process needs to attach.

        A task to hold has the fields of `tfd_notebook.model.spec.TaskSpec`.

        Parameters
        ----------
        do : str
        timeout : float
            Seconds to wait for the reply.
        **arguments
            JSON values.

        Raises
        ------
        TfdError
            The error of the agent, AgentLost if the agent ended, TimeLimit if it does not reply.
        """

    def gpus(self) -> list[dict[str, Any]]:
        """Return the GPUs that tasks may use.

        Returns
        -------
        list of dict
            One entry for each host, in the order of the positions from `place_of`. It has the
            keys of `agent.gpu_discovery.find` and ``host``, the host's name in messages.
        """
        return [{"host": self.label or "localhost", **self.request("gpus")}]

    def place_of(self, role: str, index: int) -> int:
        """Return the position of the host that runs a task, or would run it."""
        return 0

    def unreachable_peers(self, tasks: Mapping[str, str]) -> list[str]:
        """Return the hosts of the cluster that cannot reach some of these tasks, and why.

        Parameters
        ----------
        tasks : mapping of str to str
            Addresses of ready tasks, by name.

        Returns
        -------
        list of str
            A sentence for each pair of hosts. Empty if all tasks are on one host.
        """
        return []

    @abstractmethod
    def close(self, timeout: float = 10.0) -> None:
        """Stop all tasks of the cluster on this host and release their ports; never raises."""

    @abstractmethod
    def leave(self) -> None:
        """Detach from the cluster and leave its tasks running; never raises."""


class Launcher(ABC):
    """Base class of launchers, which decide where tasks run.

    Another package can add a launcher as an entry point of the group ``tfd_notebook.launchers``.
    The name of the entry point is the name of the launcher.

    Parameters
    ----------
    host : str or mapping of str to str
        Name or address under which other tasks reach the tasks: one for all, or one per role.
        Default ``"localhost"``.
    allow : iterable of str
        Networks in CIDR form that may connect in addition to the tasks' own host. Default: none.

    Attributes
    ----------
    name : str
        The name that users pass: ``launcher="local"``.
    summary : str
        One line for ``%tfd_cluster launchers``.
    roles : frozenset of Role
        The roles it can run. Default: dispatcher and data workers.
    in_process : bool
        True if the tasks run in the calling process.
    on_this_host : bool
        True if the tasks run on the host of the calling process.
    offered : bool
        True if forms offer it. A launcher for tests is available by name only.
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
        """The options as JSON values, from which an equal launcher can be created.

        A subclass adds its own options.
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
        """Return a connection to the agents of a cluster that runs on other hosts.

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
            One of the agents ended. The remaining agents were requested to close the cluster.
        LaunchError
            A host cannot be reached.
        Unsupported
            The tasks of this launcher never run on other hosts.
        """
        raise Unsupported(f"launcher {self.name!r} has no agents on other hosts")


def launcher(kind: str | Launcher, options: Mapping[str, Any] | None = None) -> Launcher:
    """Return the launcher or profile with this name, or the object itself.

    Parameters
    ----------
    kind : str or Launcher
    options : mapping, optional
        Options to create it with, in the form of `Launcher.options`.

    Raises
    ------
    UnknownName
        No launcher and no profile has this name. The error suggests the nearest name.
    Unsupported
        On Windows.
    """
    if sys.platform == "win32":
        raise Unsupported("tfd_notebook does not run on Windows", fix="use WSL2")
    if isinstance(kind, Launcher):
        return kind
    if not isinstance(kind, str):
        raise UsageError(f"invalid launcher {kind!r}: expected a name or a Launcher")
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if kind not in points:
        profile = profiles.find(kind)
        if profile is not None and profile.launcher in points:
            try:
                return launcher(profile.launcher, {**profile.options, **(options or {})})
            except TypeError as error:
                raise UsageError(f"the profile {profile.path}: {error}") from None
        near = difflib.get_close_matches(kind, points, n=1)
        raise UnknownName(
            f"unknown launcher {kind!r}",
            fix=(f"did you mean {near[0]!r}? " if near else "")
            + f"available launchers: {', '.join(sorted(points))}; profiles are files in "
            f"{profiles.user_directory()}"
            + (f", and {profile.path} names {profile.launcher!r}" if profile else ""),
        )
    loaded = points[kind].load()(**(options or {}))
    assert isinstance(loaded, Launcher)
    return loaded


def kinds() -> dict[str, type[Launcher]]:
    """Return the available launchers by name."""
    return {
        point.name: point.load()
        for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)
    }
