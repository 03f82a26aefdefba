"""Several hosts as one `TaskHost`, which forwards each call to the host of its task."""

from __future__ import annotations

import concurrent.futures
import ipaddress
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from tfd_notebook.agent.dataset_functions import Functions
from tfd_notebook.errors import LaunchError, PortInUse, StateError, TfdError
from tfd_notebook.launchers.base import ForwardingTaskHost, GpuReport
from tfd_notebook.launchers.client.agent_host import AgentTaskHost
from tfd_notebook.launchers.client.detached import DetachedClusterRecord
from tfd_notebook.launchers.client.host_addresses import parse_address
from tfd_notebook.model.events import TaskChanged
from tfd_notebook.model.spec import Endpoint, Role, TaskSpec
from tfd_notebook.model.stacks import TaskStacks
from tfd_notebook.net.host import check_reachability

_PORT_TRIES = 8
_REACHABILITY_SECONDS = 8.0
#: Seconds for which the tunnels of a killed process may still exist.
_REOPEN_SECONDS = 20.0
_DISPATCHER = f"{Role.DISPATCHER}:0"
#: Requests to the host of the dispatcher.
_DISPATCHER_REQUESTS = ("journal", "journal_size", "free_disk_space")

#: Takes role and index of a task and returns the position of its host in the cluster.
Place = Callable[[str, int], int]
A = TypeVar("A")
T = TypeVar("T")


class Tunnels(Protocol):
    """Makes a task's port lead to its host from all hosts."""

    def open(self, port: int, host: int) -> None:
        """Make `port` on this and each other host lead to ``localhost:port`` on host `host`.

        Raises
        ------
        PortInUse
            The port is in use on one of them. No tunnel stays open then.
        """

    def close(self, port: int) -> None:
        """Close the tunnels at `port` on all hosts; never raises."""

    def end(self) -> None:
        """Close this process's own resources when it detaches from the cluster."""


class TaskHostGroup(ForwardingTaskHost):
    """The hosts of one cluster.

    Parameters
    ----------
    hosts : sequence of AgentTaskHost
        The first one runs the dispatcher, unless `place` assigns it to another.
    place : callable
        Returns the position of a task's host in `hosts`. No host can change it.
    tunnels : Tunnels, optional
        The tunnels through which tasks communicate.
    record : DetachedClusterRecord
        The file with which another process finds the cluster while it is detached.
    """

    def __init__(
        self,
        hosts: Sequence[AgentTaskHost],
        place: Place,
        tunnels: Tunnels | None,
        record: DetachedClusterRecord,
    ) -> None:
        self.hosts = tuple(hosts)
        self.host = hosts[0].host
        self.is_local = all(host.is_local for host in hosts)
        self.directory = hosts[place(Role.DISPATCHER, 0)].directory
        self._place = place
        self._tunnels = tunnels
        self._ports: dict[str, int] = {}
        #: Ports of ranks that have tunnels.
        self._rank_ports: list[int] = []
        #: The position of the host to which the tunnels of each port lead.
        self._targets: dict[int, int] = {}
        self._record = record
        #: Closes the hosts that have not joined.
        self.on_end: Callable[[], None] = lambda: None
        #: Why the hosts that may join do not run yet, in the order of their positions.
        self._missing: tuple[str, ...] = ()
        #: The functions for hosts that join.
        self._functions = Functions()
        self._joining, self._ending = threading.Lock(), threading.Lock()
        self._has_ended = False

    def close(self, timeout: float = 10.0) -> None:
        self._end()
        self._call_all(lambda host: host.close(timeout))
        self._end_tunnels()
        self._record.remove()

    def _end(self) -> None:
        """End all joining: no host is added any more."""
        with self._ending:
            self._has_ended = True
        self.on_end()

    def expect(self, missing: Sequence[str]) -> None:
        """Set why the hosts that may join do not run yet; the next to join is the first."""
        self._missing = tuple(missing)

    def join(self, host: AgentTaskHost) -> bool:
        """Add a host, whose data workers can start then. Return False if the cluster has ended."""
        with self._joining:
            for tokens, functions in self._functions:
                host.install(functions, tokens, [])
            with self._ending:
                if self._has_ended:
                    return False
                self.hosts, self._missing = (*self.hosts, host), self._missing[1:]
                self.is_local = self.is_local and host.is_local
        return True

    def why_waiting(self, task: str) -> str | None:
        position = self._position(task) - len(self.hosts)
        if position < 0:
            return None
        return self._missing[position] if position < len(self._missing) else "its host is missing"

    def install(
        self,
        functions: bytes,
        tokens: Sequence[str],
        removed: Sequence[str],
        *,
        timeout: float = 60.0,
    ) -> None:
        with self._joining:
            super().install(functions, tokens, removed, timeout=timeout)
            if self._missing:
                self._functions.remove_unused(list(removed))
                self._functions.add(tokens, functions)

    def logs(
        self, task: str, size: int, offset: int | None = None, *, timeout: float = 30.0
    ) -> tuple[str, int]:
        if self.why_waiting(task) is not None:
            return "", 0
        return super().logs(task, size, offset, timeout=timeout)

    def detach(self) -> None:
        self._end()
        self._call_all(lambda host: host.detach())
        self._end_tunnels()
        self._record.schedule_removal()

    def _end_tunnels(self) -> None:
        if self._tunnels is not None:
            self._tunnels.end()

    def adopt(self, events: Iterable[TaskChanged]) -> None:
        """Open the tunnels to running tasks again."""
        for event in events:
            if self._tunnels is not None:
                position = self._position(event.task)
                port = Endpoint.parse(event.address).port
                self._check_target(port, position)
                self._reopen(self._tunnels, port, position)
                self._targets[port] = position
                self._ports[event.task] = port

    def _check_target(self, port: int, position: int) -> None:
        """Raise PortInUse if the tunnels of a port that a host reports lead to another host."""
        target = self._targets.get(port, position)
        if target != position:
            raise PortInUse(
                f"{self.hosts[position].label}: invalid port {port}: its tunnel leads to "
                f"{self.hosts[target].label}"
            )

    def _reopen(self, tunnels: Tunnels, port: int, position: int) -> None:
        """Open tunnels that another process had, once that process has closed them."""
        deadline = time.monotonic() + _REOPEN_SECONDS
        while True:
            try:
                return tunnels.open(port, position)
            except PortInUse as error:
                if time.monotonic() > deadline:
                    raise PortInUse(
                        error.what,
                        fix="detach the cluster in the other process that may hold it, or stop it",
                    ) from None
                time.sleep(0.2)

    def place_of(self, role: str, index: int) -> int:
        return self._place(role, index)

    def unreachable_peers(self, tasks: Mapping[str, str]) -> list[str]:
        known = {name: self._position(name) for name in tasks}
        requests = {
            position: remote_tasks
            for position in range(len(self.hosts))
            if (remote_tasks := {name: tasks[name] for name in known if known[name] != position})
        }
        results = {}
        silent = {}
        with concurrent.futures.ThreadPoolExecutor(len(requests) + 1, "tfd-hosts") as pool:
            kernel_result = None if self.is_local else pool.submit(check_reachability, tasks)
            replies = {
                self.hosts[position].label: pool.submit(
                    self.hosts[position].check_reachability,
                    addresses,
                    timeout=_REACHABILITY_SECONDS,
                )
                for position, addresses in requests.items()
            }
            if kernel_result is not None:
                results["this kernel"] = kernel_result.result()
            for label, reply in replies.items():
                try:
                    results[label] = reply.result()
                except TfdError as error:
                    silent[label] = error.what
        known_address = {host.label: host.peer_address for host in self.hosts}
        sentences: dict[tuple[str, str], str] = {}
        for peer, causes in results.items():
            for name, (cause, source) in causes.items():
                target = self.hosts[known[name]]
                if cause and (peer, target.label) not in sentences:
                    sentences[peer, target.label] = (
                        f"{peer} cannot reach {target.label} ({name} at {tasks[name]}: {cause})"
                        + self._explanation(target, source, known_address.get(peer, source))
                    )
        for peer, cause in silent.items():
            sentences.setdefault(("this kernel", peer), cause)
        return list(sentences.values())

    def _explanation(self, target: AgentTaskHost, source: str, known: str) -> str:
        """Return the cause; `source` is the address that the peer states, `known` a proven one."""
        if self._tunnels is not None:
            return ": the tunnel between them is broken"
        allowed = [ipaddress.ip_network(network) for network in target.allowed_networks]
        if not source or any(ipaddress.ip_address(source) in network for network in allowed):
            return ": the cause is the network between them, or a firewall"
        cause = (
            f": the task's packet filter allows {', '.join(map(str, allowed)) or 'no network'} but "
            f"not {source}"
        )
        if parse_address(known) != parse_address(source):
            return f"{cause}, an address that the host states, not verified"
        return f"{cause}; set allow={source!r}"

    def lease(self, seconds: float, renew: bool = False, *, timeout: float = 30.0) -> float:
        left = min(self._call_all(lambda host: host.lease(seconds, renew, timeout=timeout)))
        self._record.set_lease(left)
        return left

    def describe(self, description: Mapping[str, Any], *, timeout: float = 30.0) -> None:
        self._record.describe(description)
        self._call_all(lambda host: host.describe(description, timeout=timeout))

    def reserve_ports(self, tasks: Sequence[TaskSpec], *, timeout: float = 30.0) -> dict[str, str]:
        addresses: dict[str, str] = {}
        try:
            for task in tasks:
                addresses[task.name] = self._reserve_port(task, timeout)
        except BaseException:
            if addresses:
                self.stop(list(addresses), timeout=timeout)
            raise
        return addresses

    def _reserve_port(self, task: TaskSpec, timeout: float) -> str:
        """Reserve a port for one task. With tunnels, it must be free on every host."""
        position = self._place(task.role, task.index)
        host = self.hosts[position]
        for attempt in range(_PORT_TRIES):
            address = host.reserve_ports([task], timeout=timeout)[task.name]
            if self._tunnels is None or task.name in self._ports:
                return address
            port = Endpoint.parse(address).port
            try:
                self._check_target(port, position)
                self._tunnels.open(port, position)
            except PortInUse:
                host.release_ports([task.name], timeout=timeout)
                if task.port or attempt + 1 == _PORT_TRIES:
                    raise
            else:
                self._ports[task.name], self._targets[port] = port, position
                return address
        raise AssertionError("unreachable")

    def open_ranks(self, tasks: Sequence[str], *, timeout: float = 30.0) -> dict[str, str]:
        replies: list[dict[str, str]] = self.request("open_ranks", timeout, tasks=tasks)
        addresses = {name: address for reply in replies for name, address in reply.items()}
        if self._tunnels is not None:
            for name, address in addresses.items():
                port, position = Endpoint.parse(address).port, self._position(name)
                self._check_target(port, position)
                self._tunnels.open(port, position)
                self._rank_ports.append(port)
                self._targets[port] = position
        return addresses

    def close_ranks(self, tasks: Sequence[str], *, timeout: float = 30.0) -> None:
        super().close_ranks(tasks, timeout=timeout)
        while self._tunnels is not None and self._rank_ports:
            port = self._rank_ports.pop()
            self._tunnels.close(port)
            self._targets.pop(port, None)

    def gpus(self, *, timeout: float = 30.0) -> list[GpuReport]:
        reports = self._call_all(lambda host: host.gpus(timeout=timeout))
        return [report for of_host in reports for report in of_host]

    def inspect(self, *, timeout: float = 30.0) -> dict[str, dict[str, list[str]]]:
        replies = self._call_all(lambda host: host.inspect(timeout=timeout))
        return {name: task for reply in replies for name, task in reply.items()}

    def stacks(self, tasks: Sequence[str], *, timeout: float = 30.0) -> dict[str, TaskStacks]:
        def of_host(host: AgentTaskHost, names: Sequence[str]) -> dict[str, TaskStacks]:
            try:
                reply = host.stacks(names, timeout=timeout)
            except TfdError as error:  # the tasks of the other hosts are shown
                return {name: {"note": error.what, "threads": []} for name in names}
            return {name: reply[name] for name in names if name in reply}

        replies = self._call(self._by_host(tasks), of_host)
        return {name: task for reply in replies for name, task in reply.items()}

    def request(self, method: str, timeout: float, **arguments: Any) -> Any:
        """Send a request to the host of its task, to the hosts of its tasks, or to all hosts."""

        def call(host: AgentTaskHost, **part: Any) -> Any:
            return getattr(host, method)(**{**arguments, **part}, timeout=timeout)

        if "tasks" in arguments:
            tasks = arguments["tasks"]
            return self._call(
                self._by_host(tasks),
                lambda host, names: call(
                    host,
                    tasks={n: tasks[n] for n in names} if isinstance(tasks, Mapping) else names,
                ),
            )
        if "task" in arguments or method in _DISPATCHER_REQUESTS:
            return call(self._host_of(arguments.get("task", _DISPATCHER)))
        return self._call_all(call)

    # Distribution of calls

    def _position(self, task: str) -> int:
        role, _, index = task.partition(":")
        # The first host rejects calls about other names.
        return self._place(role, int(index)) if index.isdecimal() else 0

    def _host_of(self, task: str) -> AgentTaskHost:
        if (why := self.why_waiting(task)) is not None:
            raise StateError(
                f"{task} has not started, because its host does not run yet: {why}",
                task=task,
                fix="it starts when its host joins the cluster",
            )
        return self.hosts[self._position(task)]

    def _by_host(self, tasks: Iterable[str]) -> dict[int, list[str]]:
        names: dict[int, list[str]] = {}
        for name in tasks:
            if self.why_waiting(name) is None:
                names.setdefault(self._position(name), []).append(name)
        return names

    def _call_all(self, method: Callable[[AgentTaskHost], T]) -> list[T]:
        positions = dict.fromkeys(range(len(self.hosts)))
        return self._call(positions, lambda host, _: method(host))

    def _call(self, arguments: Mapping[int, A], method: Callable[[AgentTaskHost, A], T]) -> list[T]:
        """Call several hosts concurrently; raise the first error after all have returned."""
        if not arguments:
            return []
        with concurrent.futures.ThreadPoolExecutor(len(arguments), "tfd-hosts") as pool:
            calls = {
                position: _submit(pool, method, self.hosts[position], argument)
                for position, argument in arguments.items()
            }
        for position, call in calls.items():
            error = call.exception()
            if isinstance(error, TfdError):
                raise error
            if error is not None:
                label = self.hosts[position].label
                raise LaunchError(f"{label}: {type(error).__name__}: {error}")
        return [call.result() for call in calls.values()]


def _submit(
    pool: concurrent.futures.Executor,
    method: Callable[[AgentTaskHost, A], T],
    host: AgentTaskHost,
    argument: A,
) -> concurrent.futures.Future[T]:
    """Call the method in the pool; in this thread at the exit of Python, which ends all pools."""
    if threading.main_thread().is_alive():
        return pool.submit(method, host, argument)
    call: concurrent.futures.Future[T] = concurrent.futures.Future()
    try:
        call.set_result(method(host, argument))
    except Exception as error:
        call.set_exception(error)
    return call
