"""Tasks that somebody else runs: watched and used, never started, changed or ended."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import psutil

from tfd_notebook.errors import LaunchError, TfdError, Unsupported, UsageError
from tfd_notebook.launchers.base import Launcher, Node, OnEvent
from tfd_notebook.model.spec import ClusterConfig, Endpoint, Role, TaskState
from tfd_notebook.net import probe

_LOOK_SECONDS = 1.0
_ASK_SECONDS = 3.0
#: Looks without an answer after which a task that did not refuse counts as hung.
_PATIENCE = 5

_SERVERS = {str(role): role for role in (Role.CHIEF, Role.WORKER, Role.PS, Role.EVALUATOR)}


class External(Launcher):
    """Tasks at known addresses.

    Parameters
    ----------
    target : str or mapping of str to list of str
        ``"grpc://host:port"`` of a dispatcher, or the jobs of a ClusterSpec.
    """

    name: ClassVar[str] = "foreign"
    summary: ClassVar[str] = "what somebody else runs, by tfd.attach(target)"
    roles: ClassVar[frozenset[Role]] = frozenset(Role)
    offered: ClassVar[bool] = False

    def __init__(self, *, target: str | Mapping[str, Iterable[str]] = "") -> None:
        super().__init__()
        self._target = (
            target
            if isinstance(target, str)
            else {job: list(addresses) for job, addresses in target.items()}
        )

    @property
    def options(self) -> dict[str, Any]:
        return {"target": self._target}

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[Node, ...]:
        raise Unsupported(
            "what somebody else runs cannot be started", fix="tfd.attach(target) takes it up"
        )


def addresses_of(target: str | Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the addresses of the tasks at `target`, by name, the data workers' not.

    Raises
    ------
    UsageError
    """
    if isinstance(target, str):
        return {f"{Role.DISPATCHER}:0": str(Endpoint.parse(target))}
    found = {}
    for job, addresses in target.items():
        role = Role.CHIEF if job == "master" else _SERVERS.get(job)
        if role is None:
            raise UsageError(
                f"there is no job {job!r} in a cluster of TensorFlow's",
                fix=f"its jobs are {', '.join(_SERVERS)}",
            )
        named = addresses.items() if isinstance(addresses, Mapping) else enumerate(addresses)
        for index, address in named:
            found[f"{role}:{index}"] = str(Endpoint.parse(address))
    if not found:
        raise UsageError("a ClusterSpec without tasks", fix='{"worker": ["host:port"], ...}')
    return found


class ExternalNode(Node):
    """Looks at tasks that are not ours, once a second.

    Parameters
    ----------
    target : str or mapping
    cluster : str
    on_event : callable

    Raises
    ------
    LaunchError
        Nobody of the kind answers there.
    """

    directory = ""

    def __init__(
        self, target: str | Mapping[str, Iterable[str]], cluster: str, on_event: OnEvent
    ) -> None:
        self._cluster = cluster
        self._on_event = on_event
        self._addresses = addresses_of(target)
        self._states: dict[str, TaskState] = {}
        self._silent: dict[str, int] = {}
        self._closed = threading.Event()
        hosts = {Endpoint.parse(address).host for address in self._addresses.values()}
        self.host = sorted(hosts)[0]
        self.is_local = all(map(_is_here, hosts))
        self._discover()
        self.first = self._look()
        missing = [name for name, state in self._states.items() if state is not TaskState.READY]
        if len(missing) == len(self._states):
            task = missing[0]
            why = next(event["reason"] for event in self.first if event["task"] == task)
            raise LaunchError(
                f"{task} at {self._addresses[task]} does not answer as one: {why}",
                task=task,
                fix="check the address, and whether its port is open to this host",
            )
        self._thread = threading.Thread(
            target=self._watch, name=f"tfd-foreign-{cluster}", daemon=True
        )
        self._thread.start()

    def request(self, do: str, *, timeout: float = 30.0, **arguments: Any) -> Any:
        if do in ("describe", "bury"):
            return None
        if do == "logs":
            return ["", 0]
        said = {
            "hold": "is not ours to add tasks to",
            "install": "is not given Python functions: its pipelines must do without them",
            "lease": "stays as long as its owner wants",
        }.get(do, f"is not ours to {do}")
        raise Unsupported(f"cluster {self._cluster!r} {said}", fix="ask who runs it")

    def close(self, timeout: float = 10.0) -> None:
        self._closed.set()
        self._thread.join(timeout)

    def leave(self) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            with contextlib.suppress(TfdError):
                self._discover()
            for event in self._look():
                self._on_event(event)

    def _discover(self) -> None:
        """Learn the data workers of a dispatcher."""
        dispatcher = self._addresses.get(f"{Role.DISPATCHER}:0")
        if dispatcher is None:
            return
        known = set(self._addresses.values())
        try:
            workers = probe.dispatcher_workers(dispatcher, _ASK_SECONDS)
        except TfdError:
            return  # a look says how it is
        for address in workers:
            if address not in known:
                index = sum(name.startswith(f"{Role.DATA_WORKER}:") for name in self._addresses)
                self._addresses[f"{Role.DATA_WORKER}:{index}"] = address

    def _look(self) -> list[dict[str, Any]]:
        """Ask all; return an event for each whose state is news."""
        names = list(self._addresses)
        seen = probe.probe_many([self._addresses[name] for name in names], timeout=_ASK_SECONDS)
        events = []
        for name, found in zip(names, seen, strict=True):
            state, reason = self._judge(name, found)
            if state is not self._states.get(name):
                self._states[name] = state
                events.append(self._event(name, state, reason))
        return events

    def _judge(self, name: str, found: probe.Probe) -> tuple[TaskState, str]:
        role = Role(name.partition(":")[0])
        kind = {Role.DISPATCHER: "dispatcher", Role.DATA_WORKER: "data_worker"}.get(role, "server")
        if found.alive and found.kind == kind:
            self._silent.pop(name, None)
            return TaskState.READY, ""
        reason = found.reason or found.state
        if found.alive:
            return TaskState.LOST, f"there is a {found.kind}"
        if found.state == "refused":
            return TaskState.LOST, reason
        self._silent[name] = self._silent.get(name, 0) + 1
        first = name not in self._states
        hung = first or self._silent[name] >= _PATIENCE
        return (TaskState.HUNG if hung else self._states[name]), reason

    def _event(self, name: str, state: TaskState, reason: str) -> dict[str, Any]:
        return {
            "event": "task",
            "cluster": self._cluster,
            "task": name,
            "state": str(state),
            "reason": reason,
            "address": self._addresses[name],
            "pid": None,
            "restarts": 0,
            "open_to": "",
            "log": [],
        }


def _is_here(host: str) -> bool:
    """Whether a name or address is this host's."""
    try:
        address = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    except (OSError, ValueError):
        return False
    if address.is_loopback:
        return True
    mine = [a.address for some in psutil.net_if_addrs().values() for a in some]
    return str(address) in mine
