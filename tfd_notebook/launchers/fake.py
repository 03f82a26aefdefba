"""``launcher="fake"``: simulated tasks, for tests and for trying out views.

No process runs. Every request is answered at once, and the events are those of a healthy host.
`Fake` keeps its nodes, so that a test can let a task die, hang or use memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from tfd_notebook.errors import UnknownName, no_lease
from tfd_notebook.launchers.base import Launcher, Node, OnEvent
from tfd_notebook.model.events import GpusMeasured, LeaseChanged, TaskChanged, TaskMeasured
from tfd_notebook.model.spec import ClusterConfig, Role, TaskState

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
    nodes : list of FakeNode
        One for each connected cluster.
    """

    name: ClassVar[str] = "fake"
    summary: ClassVar[str] = "simulated tasks, for tests of launchers and views"
    roles: ClassVar[frozenset[Role]] = frozenset(Role)
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
        self.nodes: list[FakeNode] = []

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[Node, ...]:
        node = FakeNode(config, on_event, self._gpus)
        self.nodes.append(node)
        return (node,)


class FakeNode(Node):
    """A host that answers requests and runs nothing."""

    host = "localhost"
    directory = ""

    def __init__(
        self, config: ClusterConfig, on_event: OnEvent, gpus: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._cluster = config.name
        self._on_event = on_event
        self._pids = itertools.count(4_000_001)
        self.tasks: dict[str, dict[str, Any]] = {}
        self.installed: list[str] = []
        self.settings: dict[str, dict[str, Any]] = {}
        self._gpus = gpus
        self.dealt: dict[str, list[int]] = {}
        self.about: dict[str, Any] = {}
        self.leased = False

    def request(self, do: str, *, timeout: float = 30.0, **arguments: Any) -> Any:
        return getattr(self, f"_do_{do}")(**arguments)

    def close(self, timeout: float = 10.0) -> None:
        self._do_stop(list(self.tasks))

    def leave(self) -> None:
        pass

    def tell(self, task: str, state: TaskState, reason: str = "", **fields: Any) -> None:
        """Send the event that `task` entered `state`."""
        known = self.tasks[task]
        known.update(fields)
        self._on_event(TaskChanged(task, state, reason, **known))

    def gpus(self) -> list[dict[str, Any]]:
        return [
            {
                "host": host,
                "gpus": [
                    {"index": i, "name": _GPU, "uuid": f"GPU-{host}-{i}", "memory": _GPU_BYTES}
                    for i in numbers
                ],
                "why": "" if numbers else "this host has no GPU",
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
            for name, numbers in self.dealt.items()
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

    def _do_hold(self, tasks: list[dict[str, Any]]) -> dict[str, str]:
        held = {}
        for packed in tasks:
            pid = next(self._pids)
            name = f"{packed['role']}:{packed['index']}"
            held[name] = f"localhost:{packed['port'] or 50_000 + pid % 10_000}"
            self.dealt[name] = packed["gpus"]
            host = list(self._gpus)[self.place_of(packed["role"], packed["index"])]
            self.tasks[name] = {
                "address": held[name],
                "pid": pid,
                "restarts": 0,
                "open_to": "this host",
                "host": host if len(self._gpus) > 1 else "",
            }
        return held

    def _do_start(self, tasks: dict[str, dict[str, Any]]) -> None:
        for name, settings in tasks.items():
            self._require_task(name)
            self.settings[name] = settings
            self.tell(name, TaskState.STARTING)
            self.tell(name, TaskState.READY)

    def _do_stop(self, tasks: list[str]) -> None:
        for name in tasks:
            self._require_task(name)
            self.tell(name, TaskState.STOPPED, pid=None)
            del self.tasks[name]

    def _do_restart(self, task: str, settings: dict[str, Any]) -> None:
        restarts = self._require_task(task)["restarts"] + 1
        self.tell(task, TaskState.RESTARTING, "requested", restarts=restarts)
        self.tell(task, TaskState.READY, pid=next(self._pids))

    def _do_kill(self, task: str) -> int:
        pid = int(self._require_task(task)["pid"])
        self.tell(task, TaskState.RESTARTING, "killed by signal 9 (SIGKILL)")
        self.tell(
            task, TaskState.READY, pid=next(self._pids), restarts=self.tasks[task]["restarts"] + 1
        )
        return pid

    def _do_lease(self, seconds: float, renew: bool = False) -> float:
        if renew and not self.leased:
            raise no_lease(self._cluster)
        self.leased = True
        self._on_event(LeaseChanged(seconds))
        return seconds

    def _do_describe(self, about: dict[str, Any]) -> None:
        self.about = about

    def _do_install(self, blob: str, tokens: list[str], gone: list[str]) -> None:
        self.installed.append(blob)

    def _do_inspect(self) -> dict[str, Any]:
        return {name: {"stale": [], "ops": []} for name in self.tasks}

    def _do_logs(self, task: str, size: int, offset: int | None = None) -> list[Any]:
        self._require_task(task)
        text = f"{task} has no output\n"
        return [text if not offset else "", len(text)]

    def _require_task(self, name: str) -> dict[str, Any]:
        if name not in self.tasks:
            raise UnknownName(
                f"cluster {self._cluster!r} has no task {name!r}",
                fix=f"its tasks are {', '.join(self.tasks) or 'none'}",
            )
        return self.tasks[name]
