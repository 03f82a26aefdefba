"""Several hosts as one `Node`: each request goes to the host whose task it is about."""

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
#: For how long tunnels of a process that was killed may still be there.
_REOPEN_SECONDS = 20.0
_DISPATCHER = f"{Role.DISPATCHER}:0"


class Tunnels(Protocol):
    """Makes a task's port lead to its host from everywhere."""

    def open(self, port: int, host: int) -> None:
        """Have `port` on this and each other host lead to ``localhost:port`` on host `host`.

        Raises
        ------
        PortInUse
            Somebody has the port on one of them; nothing is left open then.
        """

    def close(self, port: int) -> None:
        """Let go of it everywhere; never raises."""

    def end(self) -> None:
        """Let go of what is this process's own, when it has no more to do with the cluster."""


class MultiHostNode(Node):
    """The hosts of one cluster.

    Parameters
    ----------
    nodes : sequence of Node
        The first one runs the dispatcher, unless `place` says otherwise.
    place : callable
        Takes role and index of a task, returns the position of its host among `nodes`.
    tunnels : Tunnels, optional
        Where tasks reach each other through tunnels.
    record : Record
        By which another process finds the cluster when it stays.
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
        self._where: dict[str, int] = {}
        self._ports: dict[str, int] = {}
        self._record = record

    def request(self, do: str, *, timeout: float = 30.0, **arguments: Any) -> Any:
        handler = getattr(self, f"_do_{do}", None)
        if handler is not None:
            return handler(timeout=timeout, **arguments)
        if "task" in arguments:
            return self._of(arguments["task"]).request(do, timeout=timeout, **arguments)
        return self._everywhere(do, timeout, arguments)[0]

    def close(self, timeout: float = 10.0) -> None:
        self._each(lambda node: node.close(timeout))
        self._end_tunnels()
        self._record.forget()

    def leave(self) -> None:
        self._each(lambda node: node.leave())
        self._end_tunnels()
        self._record.leave()

    def _end_tunnels(self) -> None:
        if self._tunnels is not None:
            self._tunnels.end()

    def adopt(self, told: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Learn where the tasks are: the host's position, and an event of each of its tasks."""
        for position, event in told:
            self._where[event["task"]] = position
            if self._tunnels is not None:
                port = Endpoint.parse(event["address"]).port
                self._reopen(self._tunnels, port, position)
                self._ports[event["task"]] = port

    def _reopen(self, tunnels: Tunnels, port: int, position: int) -> None:
        """Open tunnels that another process had, as soon as they have ended with it."""
        deadline = time.monotonic() + _REOPEN_SECONDS
        while True:
            try:
                return tunnels.open(port, position)
            except PortInUse as error:
                if time.monotonic() > deadline:
                    raise PortInUse(
                        error.what, fix="another process may hold the cluster: leave it there first"
                    ) from None
                time.sleep(0.2)

    def gpus(self) -> list[dict[str, Any]]:
        found = self._all("gpus", _GPUS_SECONDS, {n: {} for n in range(len(self.nodes))})
        return [{"host": self.nodes[n].label, **one} for n, one in found.items()]

    def place_of(self, role: str, index: int) -> int:
        return self._place(role, index)

    def unreachable_peers(self, tasks: Mapping[str, str]) -> list[str]:
        known = {name: self._where[name] for name in tasks if name in self._where}
        asked = {
            position: {"addresses": far}
            for position in range(len(self.nodes))
            if (far := {name: tasks[name] for name in known if known[name] != position})
        }
        found = {}
        silent = {}
        with concurrent.futures.ThreadPoolExecutor(len(asked) + 1, "tfd-hosts") as pool:
            own = None if self.is_local else pool.submit(reach, tasks)
            answers = {
                self.nodes[position].label: pool.submit(
                    self.nodes[position].request, "reach", timeout=_REACH_SECONDS, **arguments
                )
                for position, arguments in asked.items()
            }
            if own is not None:
                found["this kernel"] = own.result()
            for label, answer in answers.items():
                try:
                    found[label] = answer.result()
                except TfdError as error:
                    silent[label] = error.what
        said: dict[tuple[str, str], str] = {}
        for who, seen in found.items():
            for name, (why, source) in seen.items():
                target = self.nodes[known[name]]
                if why and (who, target.label) not in said:
                    said[who, target.label] = (
                        f"{who} cannot reach {target.label} ({name} at {tasks[name]}: {why})"
                        + self._whose_fault(target, source)
                    )
        for who, why in silent.items():
            said.setdefault(("this kernel", who), why)
        return list(said.values())

    def _whose_fault(self, target: Node, source: str) -> str:
        if self._tunnels is not None:
            return ": the tunnel between them is broken"
        allowed = [ipaddress.ip_network(network) for network in getattr(target, "let_in", ())]
        if not source or any(ipaddress.ip_address(source) in network for network in allowed):
            return ": it is the network between them, or a firewall"
        return (
            f": our own filter there lets in {', '.join(map(str, allowed)) or 'nobody'} and not "
            f"{source}; allow={source!r} would"
        )

    # Requests that concern several tasks

    def _do_lease(self, seconds: float, renew: bool, timeout: float) -> float:
        asked = {"seconds": seconds, "renew": renew}
        left: float = min(self._everywhere("lease", timeout, asked).values())
        self._record.keep(left)
        return left

    def _do_describe(self, about: dict[str, Any], timeout: float) -> None:
        self._record.describe(about)
        self._everywhere("describe", timeout, {"about": about})

    def _do_hold(self, tasks: list[dict[str, Any]], timeout: float) -> dict[str, str]:
        held: dict[str, str] = {}
        try:
            for packed in tasks:
                name = f"{packed['role']}:{packed['index']}"
                position = self._place(packed["role"], packed["index"])
                self._where[name] = position
                held[name] = self._hold(name, packed, position, timeout)
        except BaseException:
            if held:
                self._do_stop(list(held), timeout)
            raise
        return held

    def _hold(self, name: str, packed: dict[str, Any], position: int, timeout: float) -> str:
        """Take a port for one task, which with tunnels has to be free on every host."""
        node = self.nodes[position]
        for attempt in range(_PORT_TRIES):
            found: dict[str, str] = node.request("hold", tasks=[packed], timeout=timeout)
            address = found[name]
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
            part = parts.setdefault(self._where[name], {"tasks": {}})
            part["tasks"][name] = settings
        self._all("start", timeout, parts)

    def _do_stop(self, tasks: list[str], timeout: float) -> None:
        self._all("stop", timeout, self._parted(tasks))

    def _do_bury(self, tasks: list[str], timeout: float) -> None:
        self._all("bury", timeout, self._parted(tasks))

    def _do_journal(self, have: dict[str, int], timeout: float) -> Any:
        return self._of(_DISPATCHER).request("journal", timeout=timeout, have=have)

    def _do_room(self, timeout: float) -> Any:
        return self._of(_DISPATCHER).request("room", timeout=timeout)

    def _do_inspect(self, timeout: float) -> dict[str, Any]:
        found = self._everywhere("inspect", timeout, {})
        return {name: one for part in found.values() for name, one in part.items()}

    # How it is done

    def _of(self, task: str) -> Node:
        # A task that nobody knows is the first host's to refuse.
        return self.nodes[self._where.get(task, 0)]

    def _parted(self, tasks: Iterable[str]) -> dict[int, dict[str, Any]]:
        parts: dict[int, dict[str, Any]] = {}
        for name in tasks:
            parts.setdefault(self._where.get(name, 0), {"tasks": []})["tasks"].append(name)
        return parts

    def _everywhere(self, do: str, timeout: float, arguments: Mapping[str, Any]) -> dict[int, Any]:
        return self._all(do, timeout, dict.fromkeys(range(len(self.nodes)), arguments))

    def _all(
        self, do: str, timeout: float, parts: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, Any]:
        """Ask several hosts beside each other; the first error is raised when all have answered."""
        if not parts:
            return {}
        with concurrent.futures.ThreadPoolExecutor(len(parts), "tfd-hosts") as pool:
            asked = {
                position: pool.submit(
                    self.nodes[position].request, do, timeout=timeout, **arguments
                )
                for position, arguments in parts.items()
            }
        for position, answer in asked.items():
            error = answer.exception()
            if error is not None:
                raise self._named(error, position)
        return {position: answer.result() for position, answer in asked.items()}

    def _named(self, error: BaseException, position: int) -> BaseException:
        if isinstance(error, TfdError):
            return error
        return LaunchError(f"{self.nodes[position].label}: {type(error).__name__}: {error}")

    def _each(self, work: Callable[[Node], None]) -> None:
        with concurrent.futures.ThreadPoolExecutor(len(self.nodes), "tfd-hosts") as pool:
            list(pool.map(work, self.nodes))
