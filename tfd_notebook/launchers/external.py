"""Connections to external tasks: tfd watches and uses them, but did not start them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from tfd_notebook.errors import LaunchError, TfdError, Unsupported, UsageError
from tfd_notebook.launchers.base import Launcher, OnEvent, TaskHost
from tfd_notebook.model.events import TaskChanged
from tfd_notebook.model.resolution import START_OR_CORRECT, TaskStatus, missing_step
from tfd_notebook.model.spec import ClusterConfig, Endpoint, Role, TaskSpec, TaskState
from tfd_notebook.net import ports, probe
from tfd_notebook.net.task_probe import MayBe, TaskProber, is_same_job

_PROBE_INTERVAL_SECONDS = 1.0
_PROBE_TIMEOUT_SECONDS = 3.0
#: Probes without an answer after which a task that did not refuse counts as hung.
_HUNG_AFTER_PROBES = 5

_SERVERS = {str(role): role for role in (Role.CHIEF, Role.WORKER, Role.PS, Role.EVALUATOR)}
#: The old name of the job.
_SERVERS["master"] = Role.CHIEF


class External(Launcher):
    """Tasks at known addresses.

    Parameters
    ----------
    target : str or mapping of str to list of str
        ``"grpc://host:port"`` of a dispatcher, or the jobs of a ClusterSpec.
    """

    name: ClassVar[str] = "external"
    summary: ClassVar[str] = "external tasks, not started by tfd: tfd.attach(target)"
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

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[TaskHost, ...]:
        raise Unsupported(
            "external tasks cannot be started", fix="use tfd.attach(target) to connect to them"
        )


def addresses_of(target: str | Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the addresses of the tasks at `target` by name, without those of data workers.

    Raises
    ------
    UsageError
    """
    if isinstance(target, str):
        return {f"{Role.DISPATCHER}:0": str(Endpoint.parse(target))}
    task_addresses = {}
    for job, addresses in target.items():
        role = _SERVERS.get(job)
        if role is None:
            raise UsageError(
                f"invalid job {job!r} in the ClusterSpec",
                fix=f"its jobs are {', '.join(_SERVERS)}",
            )
        indexed = addresses.items() if isinstance(addresses, Mapping) else enumerate(addresses)
        for index, address in indexed:
            task_addresses[f"{role}:{index}"] = str(Endpoint.parse(address))
    if not task_addresses:
        raise UsageError("the ClusterSpec has no tasks", fix='{"worker": ["host:port"], ...}')
    return task_addresses


class ExternalTaskHost(TaskHost):
    """Probes external tasks once a second.

    Parameters
    ----------
    target : str or mapping
    cluster : str
    on_event : callable
    may_be : callable
        Returns True if a server with a task name can be the task of a job and index. Default: if
        it is of that job.
    own : tuple of (str, int), optional
        Job and index of this process. If nothing listens at its address, it is planned, not lost.

    Raises
    ------
    LaunchError
        No task answers at the target, or all that answer are of another kind.
    """

    directory = ""

    def __init__(
        self,
        target: str | Mapping[str, Iterable[str]],
        cluster: str,
        on_event: OnEvent,
        may_be: MayBe = is_same_job,
        own: tuple[str, int] | None = None,
    ) -> None:
        self._cluster = cluster
        self._on_event = on_event
        self._addresses = addresses_of(target)
        self._stated = frozenset(self._addresses)
        self._states: dict[str, TaskState] = {}
        self._silent: dict[str, int] = {}
        self._closed = threading.Event()
        if own is not None:
            own = str(_SERVERS.get(own[0], own[0])), own[1]
        self._prober = TaskProber(may_be, own, _PROBE_TIMEOUT_SECONDS)
        hosts = {Endpoint.parse(address).host for address in self._addresses.values()}
        self.host = sorted(hosts)[0]
        self.is_local = all(map(ports.is_this_host, hosts))
        self._discover()
        self.first = self._probe_tasks()
        if TaskState.READY not in self._states.values():
            self._prober.close()
            missing = [event for event in self.first if event.state is not TaskState.PLANNED]
            event = (missing or self.first)[0]
            with_servers = any(name.startswith("ps:") for name in self._addresses)
            step = missing_step(event.task, event.reason, with_servers)
            if step == START_OR_CORRECT:
                step = "check the address, and that its port is open to this host"
            raise LaunchError(
                f"connecting to {event.task} at {event.address} failed: {event.reason}",
                task=event.task,
                fix=step,
            )
        self._thread = threading.Thread(
            target=self._watch, name=f"tfd-external-{cluster}", daemon=True
        )
        self._thread.start()

    def reserve_ports(self, tasks: Sequence[TaskSpec], *, timeout: float = 30.0) -> dict[str, str]:
        raise self.unsupported("tasks cannot be added")

    def start(self, tasks: Mapping[str, Mapping[str, Any]], *, timeout: float = 30.0) -> None:
        raise self.unsupported("its tasks cannot be started")

    def stop(self, tasks: Sequence[str], *, timeout: float = 30.0) -> None:
        raise self.unsupported("its tasks cannot be stopped")

    def serve_errors(self, tasks: Sequence[str], *, timeout: float = 30.0) -> None:
        """Do nothing: the ports belong to other processes."""

    def logs(
        self, task: str, size: int, offset: int | None = None, *, timeout: float = 30.0
    ) -> tuple[str, int]:
        """Return no text: the logs are not known."""
        return "", 0

    def lease(self, seconds: float, renew: bool = False, *, timeout: float = 30.0) -> float:
        raise self.unsupported("its owner decides how long it runs")

    def unsupported(self, reason: str) -> Unsupported:
        return Unsupported(
            f"cluster {self._cluster!r} was not started by tfd: {reason}",
            fix="use the program that started it",
        )

    def close(self, timeout: float = 10.0) -> None:
        self._closed.set()
        self._thread.join(timeout)
        self._prober.close()

    def detach(self) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._closed.wait(_PROBE_INTERVAL_SECONDS):
            with contextlib.suppress(TfdError):
                self._discover()
            for event in self._probe_tasks():
                self._on_event(event)

    def _discover(self) -> None:
        """Add the data workers that the dispatcher reports."""
        dispatcher = self._addresses.get(f"{Role.DISPATCHER}:0")
        if dispatcher is None:
            return
        known = set(self._addresses.values())
        try:
            workers = probe.dispatcher_workers(dispatcher, _PROBE_TIMEOUT_SECONDS)
        except TfdError:
            return  # the probe that follows reports the state
        for address in workers:
            if address not in known:
                index = sum(name.startswith(f"{Role.DATA_WORKER}:") for name in self._addresses)
                self._addresses[f"{Role.DATA_WORKER}:{index}"] = address

    def _probe_tasks(self) -> list[TaskChanged]:
        """Probe all tasks; return an event for each task whose state changed."""
        tasks: dict[str, dict[int, str]] = {}
        for name, address in self._addresses.items():
            job, _, index = name.partition(":")
            tasks.setdefault(job, {})[int(index)] = address
        events = []
        for status in self._prober.probe(tasks):
            state = self._state_of(status)
            if state is not self._states.get(status.name):
                self._states[status.name] = state
                events.append(
                    TaskChanged(status.name, state, status.reason, address=status.address)
                )
        return events

    def _state_of(self, status: TaskStatus) -> TaskState:
        known = {
            "alive": TaskState.READY,
            "own": TaskState.PLANNED,
            "refused": TaskState.LOST,
            "mismatch": TaskState.LOST,
        }
        if status.state in known:
            self._silent.pop(status.name, None)
            return known[status.state]
        self._silent[status.name] = self._silent.get(status.name, 0) + 1
        before = self._states.get(status.name)
        if (
            status.state != "hung"
            and status.name in self._stated
            and before in (None, TaskState.LOST)
        ):
            return TaskState.LOST  # its address may be wrong, unlike one that a dispatcher reports
        if before is None or self._silent[status.name] >= _HUNG_AFTER_PROBES:
            return TaskState.HUNG
        return before
