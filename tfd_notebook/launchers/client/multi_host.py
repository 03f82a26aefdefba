"""Several hosts as one `Node`, which forwards each request to the host of its task."""

from __future__ import annotations

import concurrent.futures
import ipaddress
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tfd_notebook.errors import LaunchError, PortInUse, TfdError
from tfd_notebook.launchers.base import Node
from tfd_notebook.launchers.client.detached import DetachedClusterRecord
from tfd_notebook.model.spec import Endpoint, Role
from tfd_notebook.net.host import reach

_PORT_TRIES = 8
_REACH_SECONDS = 8.0
_GPUS_SECONDS = 30.0
#: Seconds for which the tunnels of a killed process may still exist.
_REOPEN_SECONDS = 20.0
_DISPATCHER = f"{Role.DISPATCHER}:0"


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


class MultiHostNode(Node):
    """The hosts of one cluster.

    Parameters
    ----------
    nodes : sequence of Node
        The first one runs the dispatcher, unless `place` assigns it to another.
    place : callable
        Takes role and index of a task and returns the position of its host in `nodes`.
    tunnels : Tunnels, optional
        The tunnels through which tasks communicate.
    record : DetachedClusterRecord
        The file with which another process finds the cluster while it is detached.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        place: Callable[[str, int], int],
        tunnels: Tunnels | None,
        record: DetachedClusterRecord,
    ) -> None:
        self.nodes = tuple(nodes)
        self.host = nodes[0].host
        self.is_local = all(node.is_local for node in nodes)
        self.directory = nodes[place(Role.DISPATCHER, 0)].directory
        self._place = place
        self._tunnels = tunnels
        self._positions: dict[str, int] = {}
        self._ports: dict[str, int] = {}
        self._record = record

    def request(self, do: str, *, timeout: float = 30.0, **arguments: Any) -> Any:
        handler = getattr(self, f"_do_{do}", None)
        if handler is not None:
            return handler(timeout=timeout, **arguments)
        if "task" in arguments:
            return self._node_of(arguments["task"]).request(do, timeout=timeout, **arguments)
        return self._request_all(do, timeout, arguments)[0]

    def close(self, timeout: float = 10.0) -> None:
        self._for_each_node(lambda node: node.close(timeout))
        self._end_tunnels()
        self._record.forget()

    def leave(self) -> None:
        self._for_each_node(lambda node: node.leave())
        self._end_tunnels()
        self._record.leave()

    def _end_tunnels(self) -> None:
        if self._tunnels is not None:
            self._tunnels.end()

    def adopt(self, events: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Record the hosts of the tasks: for each task the host's position, and its event."""
        for position, event in events:
            self._positions[event["task"]] = position
            if self._tunnels is not None:
                port = Endpoint.parse(event["address"]).port
                self._reopen(self._tunnels, port, position)
                self._ports[event["task"]] = port

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

    def gpus(self) -> list[dict[str, Any]]:
        by_position = self._request_nodes(
            "gpus", _GPUS_SECONDS, {n: {} for n in range(len(self.nodes))}
        )
        return [{"host": self.nodes[n].label, **gpus} for n, gpus in by_position.items()]

    def place_of(self, role: str, index: int) -> int:
        return self._place(role, index)

    def unreachable_peers(self, tasks: Mapping[str, str]) -> list[str]:
        known = {name: self._positions[name] for name in tasks if name in self._positions}
        requests = {
            position: {"addresses": remote_tasks}
            for position in range(len(self.nodes))
            if (remote_tasks := {name: tasks[name] for name in known if known[name] != position})
        }
        results = {}
        silent = {}
        with concurrent.futures.ThreadPoolExecutor(len(requests) + 1, "tfd-hosts") as pool:
            kernel_result = None if self.is_local else pool.submit(reach, tasks)
            replies = {
                self.nodes[position].label: pool.submit(
                    self.nodes[position].request, "reach", timeout=_REACH_SECONDS, **arguments
                )
                for position, arguments in requests.items()
            }
            if kernel_result is not None:
                results["this kernel"] = kernel_result.result()
            for label, reply in replies.items():
                try:
                    results[label] = reply.result()
                except TfdError as error:
                    silent[label] = error.what
        sentences: dict[tuple[str, str], str] = {}
        for peer, causes in results.items():
            for name, (cause, source) in causes.items():
                target = self.nodes[known[name]]
                if cause and (peer, target.label) not in sentences:
                    sentences[peer, target.label] = (
                        f"{peer} cannot reach {target.label} ({name} at {tasks[name]}: {cause})"
                        + self._explanation(target, source)
                    )
        for peer, cause in silent.items():
            sentences.setdefault(("this kernel", peer), cause)
        return list(sentences.values())

    def _explanation(self, target: Node, source: str) -> str:
        if self._tunnels is not None:
            return ": the tunnel between them is broken"
        allowed = [
            ipaddress.ip_network(network) for network in getattr(target, "allowed_networks", ())
        ]
        if not source or any(ipaddress.ip_address(source) in network for network in allowed):
            return ": the cause is the network between them, or a firewall"
        return (
            f": the task's packet filter allows {', '.join(map(str, allowed)) or 'no network'} but "
            f"not {source}; set allow={source!r}"
        )

    # Requests about several tasks

    def _do_lease(self, seconds: float, renew: bool, timeout: float) -> float:
        arguments = {"seconds": seconds, "renew": renew}
        left: float = min(self._request_all("lease", timeout, arguments).values())
        self._record.keep(left)
        return left

    def _do_describe(self, about: dict[str, Any], timeout: float) -> None:
        self._record.describe(about)
        self._request_all("describe", timeout, {"about": about})

    def _do_hold(self, tasks: list[dict[str, Any]], timeout: float) -> dict[str, str]:
        held: dict[str, str] = {}
        try:
            for packed in tasks:
                name = f"{packed['role']}:{packed['index']}"
                position = self._place(packed["role"], packed["index"])
                self._positions[name] = position
                held[name] = self._hold(name, packed, position, timeout)
        except BaseException:
            if held:
                self._do_stop(list(held), timeout)
            raise
        return held

    def _hold(self, name: str, packed: dict[str, Any], position: int, timeout: float) -> str:
        """Reserve a port for one task. With tunnels, it must be free on every host."""
        node = self.nodes[position]
        for attempt in range(_PORT_TRIES):
            addresses: dict[str, str] = node.request("hold", tasks=[packed], timeout=timeout)
            address = addresses[name]
            if self._tunnels is None or name in self._ports:
                return address
            port = Endpoint.parse(address).port
            try:
                self._tunnels.open(port, position)
            except PortInUse:
                node.request("release", tasks=[name], timeout=timeout)
                if packed["port"] or attempt + 1 == _PORT_TRIES:
                    raise
            else:
                self._ports[name] = port
                return address
        raise AssertionError("unreachable")

    def _do_start(self, tasks: dict[str, dict[str, Any]], timeout: float) -> None:
        parts: dict[int, dict[str, Any]] = {}
        for name, settings in tasks.items():
            part = parts.setdefault(self._positions[name], {"tasks": {}})
            part["tasks"][name] = settings
        self._request_nodes("start", timeout, parts)

    def _do_stop(self, tasks: list[str], timeout: float) -> None:
        self._request_nodes("stop", timeout, self._by_host(tasks))

    def _do_bury(self, tasks: list[str], timeout: float) -> None:
        self._request_nodes("bury", timeout, self._by_host(tasks))

    def _do_journal(self, have: dict[str, int], timeout: float) -> Any:
        return self._node_of(_DISPATCHER).request("journal", timeout=timeout, have=have)

    def _do_room(self, timeout: float) -> Any:
        return self._node_of(_DISPATCHER).request("room", timeout=timeout)

    def _do_inspect(self, timeout: float) -> dict[str, Any]:
        by_position = self._request_all("inspect", timeout, {})
        return {name: ops for part in by_position.values() for name, ops in part.items()}

    # Distribution of requests

    def _node_of(self, task: str) -> Node:
        # The first host rejects requests about unknown tasks.
        return self.nodes[self._positions.get(task, 0)]

    def _by_host(self, tasks: Iterable[str]) -> dict[int, dict[str, Any]]:
        parts: dict[int, dict[str, Any]] = {}
        for name in tasks:
            parts.setdefault(self._positions.get(name, 0), {"tasks": []})["tasks"].append(name)
        return parts

    def _request_all(self, do: str, timeout: float, arguments: Mapping[str, Any]) -> dict[int, Any]:
        return self._request_nodes(do, timeout, dict.fromkeys(range(len(self.nodes)), arguments))

    def _request_nodes(
        self, do: str, timeout: float, parts: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, Any]:
        """Send requests to several hosts concurrently; raise the first error after all replies."""
        if not parts:
            return {}
        with concurrent.futures.ThreadPoolExecutor(len(parts), "tfd-hosts") as pool:
            requests = {
                position: pool.submit(
                    self.nodes[position].request, do, timeout=timeout, **arguments
                )
                for position, arguments in parts.items()
            }
        for position, reply in requests.items():
            error = reply.exception()
            if error is not None:
                raise self._as_tfd_error(error, position)
        return {position: reply.result() for position, reply in requests.items()}

    def _as_tfd_error(self, error: BaseException, position: int) -> BaseException:
        if isinstance(error, TfdError):
            return error
        return LaunchError(f"{self.nodes[position].label}: {type(error).__name__}: {error}")

    def _for_each_node(self, work: Callable[[Node], None]) -> None:
        with concurrent.futures.ThreadPoolExecutor(len(self.nodes), "tfd-hosts") as pool:
            list(pool.map(work, self.nodes))
