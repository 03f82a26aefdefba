"""Base classes of launchers. A launcher decides where the tasks of a cluster run."""

from __future__ import annotations

import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypedDict, TypeVar, cast

from tfd_notebook.errors import UnknownName, Unsupported, UsageError, nearest
from tfd_notebook.launchers import profiles
from tfd_notebook.model.events import Event, TaskChanged
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.spec import SERVER_ROLES, ClusterConfig, Role, TaskSpec
from tfd_notebook.model.stacks import TaskStacks

ENTRY_POINTS = "tfd_notebook.launchers"

#: Every role that a launcher can run.
ALL_ROLES = frozenset((Role.DISPATCHER, Role.DATA_WORKER, *SERVER_ROLES))

#: Receives the events of a task host.
OnEvent = Callable[[Event], None]


class GpuReport(TypedDict):
    """The GPUs of one host; see `tfd_notebook.agent.gpu_discovery.find`."""

    #: The host's name in messages to users.
    host: str
    gpus: list[dict[str, Any]]
    #: Why the list is empty.
    reason: str
    hidden: bool


@dataclass(frozen=True)
class AdoptedCluster:
    """A running cluster at the time when a process attaches to it.

    Parameters
    ----------
    description : mapping
        The description that `TaskHost.describe` stored.
    tasks : sequence of TaskChanged
        The current state of each task.
    directory : str
        The cluster's directory on the agent's host.
    lease, time_limit_left : float, optional
        Seconds that remain; None without a lease or a limit.
    """

    description: Mapping[str, Any]
    tasks: Sequence[TaskChanged]
    directory: str = ""
    lease: float | None = None
    time_limit_left: float | None = None


class TaskHost(Handle, ABC):
    """One host of a cluster: starts, supervises and stops the tasks there.

    Each method that sends a request has a `timeout` in seconds. It raises the error of the agent.
    AgentLost means that the agent has ended, and TimeLimit that no reply arrived in time. A method
    that is not abstract raises Unsupported unless a subclass implements it.

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
    def reserve_ports(self, tasks: Sequence[TaskSpec], *, timeout: float = 30.0) -> dict[str, str]:
        """Reserve a port for each task until the cluster ends.

        Returns
        -------
        dict of str to str
            The addresses of the tasks, by name.

        Raises
        ------
        PortInUse
            The port of a specification is in use.
        """

    @abstractmethod
    def start(self, tasks: Mapping[str, Mapping[str, Any]], *, timeout: float = 30.0) -> None:
        """Start tasks with reserved ports, without waiting until they are ready.

        Parameters
        ----------
        tasks : mapping of str to mapping
            By name, the settings to add to those of the task's specification.
        timeout : float
        """

    @abstractmethod
    def stop(self, tasks: Sequence[str], *, timeout: float = 30.0) -> None:
        """Stop tasks and remove them from the cluster. A later task of the name gets the port."""

    @abstractmethod
    def logs(
        self, task: str, size: int, offset: int | None = None, *, timeout: float = 30.0
    ) -> tuple[str, int]:
        """Return up to `size` bytes of a task's log as text, and the offset to continue from.

        Without `offset`, return the end of the log.
        """

    @abstractmethod
    def close(self, timeout: float = 10.0) -> None:
        """Stop all tasks of the cluster on this host and release their ports; never raises."""

    @abstractmethod
    def detach(self) -> None:
        """Disconnect from the cluster, and keep its tasks running; never raises."""

    def restart(self, task: str, settings: Mapping[str, Any], *, timeout: float = 30.0) -> None:
        """Start a new process for a task, with these changes of its settings.

        Return when the state of the task is ``restarting``.
        """
        raise self.unsupported("its tasks cannot be restarted")

    def kill(self, task: str, *, timeout: float = 30.0) -> int | None:
        """Kill the process of a task and return its pid, or None if the task has no process."""
        raise self.unsupported("its tasks cannot be killed")

    def serve_errors(self, tasks: Sequence[str], *, timeout: float = 30.0) -> None:
        """Serve an error at the addresses of failed tasks, so that their clients stop waiting."""
        raise self.unsupported("failed tasks cannot be replaced by error servers")

    def install(
        self,
        functions: bytes,
        tokens: Sequence[str],
        removed: Sequence[str],
        *,
        timeout: float = 60.0,
    ) -> None:
        """Install Python functions in current and future data workers.

        Parameters
        ----------
        functions : bytes
            The functions, as `tfd_notebook.data.service.py_functions` serializes them.
        tokens : sequence of str
            The tokens of these functions.
        removed : sequence of str
            The tokens of functions that are no longer needed.
        timeout : float
        """
        raise self.unsupported(
            "Python functions cannot be sent, so its pipelines must not use them"
        )

    def inspect(self, *, timeout: float = 30.0) -> dict[str, dict[str, list[str]]]:
        """Return stale modules (``stale``) and loaded ops (``ops``) of each responding task."""
        raise self.unsupported("its tasks cannot be inspected")

    def stacks(self, tasks: Sequence[str], *, timeout: float = 30.0) -> dict[str, TaskStacks]:
        """Return the Python stacks of tasks by name, without tasks that are not known.

        A task without a reply has a reason instead.
        """
        raise self.unsupported("the Python stacks of its tasks cannot be read")

    def gpus(self, *, timeout: float = 30.0) -> list[GpuReport]:
        """Return the GPUs that tasks may use.

        Returns
        -------
        list of GpuReport
            One entry for each host, in the order of the positions from `place_of`.
        """
        raise self.unsupported("its GPUs cannot be listed")

    def journal(
        self, sizes: Mapping[str, int], *, timeout: float = 30.0
    ) -> dict[str, tuple[int, str]]:
        """Return new data of the dispatcher's journal.

        Parameters
        ----------
        sizes : mapping of str to int
            By file, the number of bytes that the caller already has.
        timeout : float

        Returns
        -------
        dict of str to (int, str)
            By file, that number and the bytes that follow, in base64.
        """
        raise self.unsupported("its dispatcher's journal cannot be read")

    def journal_size(self, *, timeout: float = 30.0) -> int:
        """Return the bytes of the dispatcher's journal and of its registered datasets."""
        raise self.unsupported("its dispatcher's journal cannot be read")

    def free_disk_space(self, *, timeout: float = 30.0) -> int:
        """Return the free bytes of the disk with the dispatcher's journal."""
        raise self.unsupported("its disks cannot be inspected")

    def lease(self, seconds: float, renew: bool = False, *, timeout: float = 30.0) -> float:
        """Keep the cluster running for `seconds` without its owner, and return the seconds left.

        Raises
        ------
        StateError
            `renew` is true, and the cluster has no lease.
        """
        raise self.unsupported("its tasks cannot have a lease")

    def describe(self, description: Mapping[str, Any], *, timeout: float = 30.0) -> None:
        """Store the description that a process needs to attach to the cluster."""
        raise self.unsupported("its tasks cannot have a lease")

    def open_ranks(self, tasks: Sequence[str], *, timeout: float = 30.0) -> dict[str, str]:
        """Reserve a port next to each of these training workers for `run_rank`.

        Returns
        -------
        dict of str to str
            The addresses, by the names of the tasks.
        """
        raise self.unsupported("functions cannot run next to its workers")

    def run_rank(
        self,
        task: str,
        function: bytes,
        addresses: Mapping[str, Sequence[str]],
        *,
        timeout: float = 30.0,
    ) -> dict[str, Any]:
        """Call a function in a new process next to a worker, and wait for its end.

        Parameters
        ----------
        task : str
            The worker, after `open_ranks`.
        function : bytes
            The pickled function and its arguments.
        addresses : mapping of str to sequence of str
            The addresses of all ranks, by job.
        timeout : float

        Returns
        -------
        dict
            ``result`` in the form of `net.plain_values`. After an error of the function its
            ``kind``, ``text`` and ``traceback``. After the end of the process the reason, ``lost``.
        """
        raise self.unsupported("functions cannot run next to its workers")

    def rank_output(
        self, task: str, size: int, offset: int, *, timeout: float = 30.0
    ) -> tuple[str, int]:
        """Return up to `size` bytes of a rank's output, and the offset to continue from."""
        raise self.unsupported("functions cannot run next to its workers")

    def close_ranks(self, tasks: Sequence[str], *, timeout: float = 30.0) -> None:
        """End the processes of `run_rank` next to these workers."""
        raise self.unsupported("functions cannot run next to its workers")

    def place_of(self, role: str, index: int) -> int:
        """Return the position of the host that runs a task, or would run it."""
        return 0

    def why_waiting(self, task: str) -> str | None:
        """Return why the host that runs a task does not run yet, or None if it does."""
        return None

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

    def unsupported(self, reason: str) -> Unsupported:
        """Return the error of an operation that this class of hosts does not offer."""
        return Unsupported(f"the host {self.label or self.host} does not support this: {reason}")


M = TypeVar("M", bound=Callable[..., Any])


def forwarded(method: M) -> M:
    """Return a method with this signature that passes its name and its arguments to `request`.

    A method without a `timeout` has one of 30 seconds.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *arguments = bound.arguments.items()
        return self.request(method.__name__, **{"timeout": 30.0, **dict(arguments)})

    vars(forward).pop("__isabstractmethod__", None)  # copied from `method`
    return cast(M, forward)


class ForwardingTaskHost(TaskHost):
    """A host that passes on each request. A subclass overrides a method that needs more."""

    @abstractmethod
    def request(self, method: str, timeout: float, **arguments: Any) -> Any:
        """Pass on the call of a method of `TaskHost`, and return its result."""

    reserve_ports = forwarded(TaskHost.reserve_ports)
    start = forwarded(TaskHost.start)
    stop = forwarded(TaskHost.stop)
    logs = forwarded(TaskHost.logs)
    restart = forwarded(TaskHost.restart)
    kill = forwarded(TaskHost.kill)
    serve_errors = forwarded(TaskHost.serve_errors)
    install = forwarded(TaskHost.install)
    inspect = forwarded(TaskHost.inspect)
    stacks = forwarded(TaskHost.stacks)
    gpus = forwarded(TaskHost.gpus)
    journal = forwarded(TaskHost.journal)
    journal_size = forwarded(TaskHost.journal_size)
    free_disk_space = forwarded(TaskHost.free_disk_space)
    lease = forwarded(TaskHost.lease)
    describe = forwarded(TaskHost.describe)
    open_ranks = forwarded(TaskHost.open_ranks)
    run_rank = forwarded(TaskHost.run_rank)
    rank_output = forwarded(TaskHost.rank_output)
    close_ranks = forwarded(TaskHost.close_ranks)


class Launcher(Handle, ABC):
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
    simulated : bool
        True if the tasks have no processes and no servers.
    offered : bool
        True if forms offer it. A launcher for tests is available by name only.
    """

    _instead = "send its name and its options, from which an equal launcher can be created"

    name: ClassVar[str]
    summary: ClassVar[str]
    roles: ClassVar[frozenset[Role]] = frozenset((Role.DISPATCHER, Role.DATA_WORKER))
    in_process: ClassVar[bool] = False
    on_this_host: ClassVar[bool] = True
    simulated: ClassVar[bool] = False
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
    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[TaskHost, ...]:
        """Return the hosts for a cluster, each with an agent that is ready for requests.

        Parameters
        ----------
        config : ClusterConfig
        on_event : callable
            Called from any thread with each event of the cluster's tasks.
        """

    def reconnect(
        self, cluster: str, agents: Sequence[str], addresses: Mapping[str, str] | None = None
    ) -> Any:
        """Return a connection to the agents of a cluster that runs on other hosts.

        Parameters
        ----------
        cluster : str
        agents : sequence of str
            Ids of the agents.
        addresses : mapping of str to str, optional
            The recorded addresses of tasks. Default: none.

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

    def abort(self, cluster: str) -> None:
        """Stop a `connect` that waits in another thread. It raises LaunchError. Never raises."""

    def job_script(self, config: ClusterConfig) -> str:
        """Return the jobs that the launcher submits for a cluster, as text without secrets.

        Parameters
        ----------
        config : ClusterConfig

        Raises
        ------
        Unsupported
            The launcher does not submit jobs.
        """
        raise Unsupported(
            f"launcher {self.name!r} does not submit jobs, so it has no job script",
            fix="cluster.to_frame() shows the tasks",
        )


def launcher(
    name_or_launcher: str | Launcher, options: Mapping[str, Any] | None = None
) -> Launcher:
    """Return the launcher or profile with this name, or the object itself.

    Parameters
    ----------
    name_or_launcher : str or Launcher
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
    if isinstance(name_or_launcher, Launcher):
        return name_or_launcher
    if not isinstance(name_or_launcher, str):
        raise UsageError(f"invalid launcher {name_or_launcher!r}: expected a name or a Launcher")
    name = name_or_launcher
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in points:
        profile = profiles.find(name)
        if profile is not None and profile.launcher in points:
            try:
                return launcher(profile.launcher, {**profile.options, **(options or {})})
            except TypeError as error:
                raise UsageError(f"invalid profile {profile.path}: {error}") from None
        raise UnknownName(
            f"unknown launcher {name!r}",
            fix=nearest(name, points)
            + f"available launchers: {', '.join(sorted(points))}; profiles are files in "
            f"{profiles.user_directory()}"
            + (f", and {profile.path} names {profile.launcher!r}" if profile else ""),
        )
    loaded = points[name].load()(**(options or {}))
    assert isinstance(loaded, Launcher)
    return loaded


def available_launchers() -> dict[str, type[Launcher]]:
    """Return the available launchers by name."""
    return {
        point.name: point.load()
        for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)
    }
