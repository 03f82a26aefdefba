"""``launcher="fake"``: simulated tasks, for tests and for trying out views.

No process runs. Each method returns at once, and the events are those of a healthy host. `Fake`
keeps its hosts, so that a test can simulate a failed, hung or large task.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from tfd_notebook.errors import no_lease, unknown_task
from tfd_notebook.launchers.base import GpuReport, Launcher, OnEvent, TaskHost
from tfd_notebook.model.events import GpusMeasured, LeaseChanged, TaskChanged, TaskMeasured
from tfd_notebook.model.spec import ClusterConfig, Role, TaskSpec, TaskState

_GPU = "Imaginary 80GB"
_GPU_BYTES = 80_000_000_000


class Fake(Launcher):
    """A launcher that starts no process.

    Parameters
    ----------
    gpus : tuple of int, or mapping of str to tuple of int
        The GPUs that its host reports, or those of several hosts by name. Tasks are assigned to
        the hosts round-robin. Default: none.
    host, allow
        See `Launcher`.

    Attributes
    ----------
    task_hosts : list of FakeTaskHost
        One for each connected cluster.
    """

    name: ClassVar[str] = "fake"
    summary: ClassVar[str] = "simulated tasks, for tests of launchers and views"
    roles: ClassVar[frozenset[Role]] = frozenset(Role)
    simulated: ClassVar[bool] = True
    offered: ClassVar[bool] = False

    def __init__(
        self,
        *,
        gpus: Sequence[int] | Mapping[str, Sequence[int]] = (),
        host: str | Mapping[str, str] = "localhost",
        allow: Iterable[str] = (),
    ) -> None:
        super().__init__(host=host, allow=allow)
        hosts = gpus if isinstance(gpus, Mapping) else {"localhost": gpus}
        self._gpus = {host: tuple(numbers) for host, numbers in hosts.items()}
        self.task_hosts: list[FakeTaskHost] = []

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[TaskHost, ...]:
        self.task_hosts.append(FakeTaskHost(config, on_event, self._gpus))
        return (self.task_hosts[-1],)


class FakeTaskHost(TaskHost):
    """A host that simulates its tasks."""

    host = "localhost"
    directory = ""

    def __init__(
        self, config: ClusterConfig, on_event: OnEvent, gpus: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._cluster = config.name
        self._on_event = on_event
        self._pids = itertools.count(4_000_001)
        self.tasks: dict[str, dict[str, Any]] = {}
        self.installed: list[bytes] = []
        self.settings: dict[str, Mapping[str, Any]] = {}
        self._gpus = gpus
        self.assigned_gpus: dict[str, list[int]] = {}
        self.description: Mapping[str, Any] = {}
        self.leased = False

    def close(self, timeout: float = 10.0) -> None:
        self.stop(list(self.tasks))

    def detach(self) -> None:
        pass

    def set_state(self, task: str, state: TaskState, reason: str = "", **fields: Any) -> None:
        """Send the event that `task` entered `state`."""
        known = self.tasks[task]
        known.update(fields)
        self._on_event(TaskChanged(task, state, reason, **known))

    def gpus(self, *, timeout: float = 30.0) -> list[GpuReport]:
        return [
            {
                "host": host,
                "gpus": [
                    {"index": i, "name": _GPU, "uuid": f"GPU-{host}-{i}", "memory": _GPU_BYTES}
                    for i in numbers
                ],
                "reason": "" if numbers else "this host has no GPU",
                "hidden": False,
            }
            for host, numbers in self._gpus.items()
        ]

    def place_of(self, role: str, index: int) -> int:
        return index % len(self._gpus)

    def use_gpus(self, host: str, **figures: Sequence[float | None]) -> None:
        """Send the GPU use of a host: ``use_percent`` and ``used`` bytes, a value for each GPU."""
        position = list(self._gpus).index(host)
        held = {
            gpu: name
            for name, numbers in self.assigned_gpus.items()
            for gpu in numbers
            if self.place_of("", int(name.partition(":")[2])) == position
        }
        known = [
            {
                "index": gpu,
                "name": _GPU,
                "memory": _GPU_BYTES,
                "task": held.get(gpu, ""),
                **{name: values[place] for name, values in figures.items()},
            }
            for place, gpu in enumerate(self._gpus[host])
        ]
        self._on_event(GpusMeasured(tuple(known), host))

    def measure(self, task: str, **measured: Any) -> None:
        """Send a measurement of `task`, such as ``cpu_percent``, ``rss_mb`` or ``bytes_sent``."""
        self._on_event(TaskMeasured(task, **measured))

    def reserve_ports(self, tasks: Sequence[TaskSpec], *, timeout: float = 30.0) -> dict[str, str]:
        addresses = {}
        for spec in tasks:
            pid = next(self._pids)
            addresses[spec.name] = f"localhost:{spec.port or 50_000 + pid % 10_000}"
            self.assigned_gpus[spec.name] = list(spec.gpus)
            host = list(self._gpus)[self.place_of(spec.role, spec.index)]
            self.tasks[spec.name] = {
                "address": addresses[spec.name],
                "pid": pid,
                "restarts": 0,
                "open_to": "this host",
                "host": host if len(self._gpus) > 1 else "",
            }
        return addresses

    def start(self, tasks: Mapping[str, Mapping[str, Any]], *, timeout: float = 30.0) -> None:
        for name, settings in tasks.items():
            self._require_task(name)
            self.settings[name] = settings
            self.set_state(name, TaskState.STARTING)
            self.set_state(name, TaskState.READY)

    def stop(self, tasks: Sequence[str], *, timeout: float = 30.0) -> None:
        for name in tasks:
            self._require_task(name)
            self.set_state(name, TaskState.STOPPED, pid=None)
            del self.tasks[name]

    def restart(self, task: str, settings: Mapping[str, Any], *, timeout: float = 30.0) -> None:
        restarts = self._require_task(task)["restarts"] + 1
        self.set_state(task, TaskState.RESTARTING, "requested", restarts=restarts)
        self.set_state(task, TaskState.READY, pid=next(self._pids))

    def kill(self, task: str, *, timeout: float = 30.0) -> int | None:
        pid = int(self._require_task(task)["pid"])
        restarts = self.tasks[task]["restarts"] + 1
        self.set_state(task, TaskState.RESTARTING, "killed by signal 9 (SIGKILL)")
        self.set_state(task, TaskState.READY, pid=next(self._pids), restarts=restarts)
        return pid

    def lease(self, seconds: float, renew: bool = False, *, timeout: float = 30.0) -> float:
        if renew and not self.leased:
            raise no_lease(self._cluster)
        self.leased = True
        self._on_event(LeaseChanged(seconds))
        return seconds

    def describe(self, description: Mapping[str, Any], *, timeout: float = 30.0) -> None:
        self.description = description

    def install(
        self,
        functions: bytes,
        tokens: Sequence[str],
        removed: Sequence[str],
        *,
        timeout: float = 60.0,
    ) -> None:
        self.installed.append(functions)

    def inspect(self, *, timeout: float = 30.0) -> dict[str, dict[str, list[str]]]:
        return {name: {"stale": [], "ops": []} for name in self.tasks}

    def logs(
        self, task: str, size: int, offset: int | None = None, *, timeout: float = 30.0
    ) -> tuple[str, int]:
        self._require_task(task)
        text = f"{task} has no output\n"
        return text if not offset else "", len(text)

    def _require_task(self, name: str) -> dict[str, Any]:
        if name not in self.tasks:
            raise unknown_task(self._cluster, name, self.tasks)
        return self.tasks[name]
