"""A cluster's tasks on one host, and until when they stay there."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.agent.dataset_functions import Functions
from tfd_notebook.agent.stunnel import TunnelEnd, make_key
from tfd_notebook.agent.task_supervisor import trim_log
from tfd_notebook.errors import StateError, TfdError, UnknownName
from tfd_notebook.model.spec import STOP_ORDER, Policy, TaskState
from tfd_notebook.net import clock, runtime_dir
from tfd_notebook.net.clock import Deadline

if TYPE_CHECKING:
    from tfd_notebook.agent.handlers import AgentHandlers
    from tfd_notebook.agent.sessions import Session
    from tfd_notebook.agent.task_supervisor import TaskSupervisor


class AgentCluster:
    """A cluster's tasks on this host.

    Parameters
    ----------
    agent : Requests
    name : str
    opened : mapping
        What came with the request: ``policy``, ``environment``, ``directory``, ``path``,
        ``preload``, ``allow`` and ``about``, which describes the cluster to whoever attaches.
    """

    def __init__(self, agent: AgentHandlers, name: str, opened: dict[str, Any]) -> None:
        self.name = name
        self.policy = Policy(**opened["policy"])
        self.environment: dict[str, str] = opened["environment"]
        self.working_directory: str = opened["directory"]
        self.path: list[str] = opened["path"]
        self.preload: list[str] = opened["preload"]
        self.allow: list[str] = opened["allow"]
        self.about: dict[str, Any] = opened["about"]
        self.functions = Functions()
        self.tasks: dict[str, TaskSupervisor] = {}
        self.retired: dict[str, TaskSupervisor] = {}
        #: What the administrator of this host allows.
        self.limits = limits()
        #: The GPUs of this host that its tasks may be given, each with the fields of `gpus.Gpu`.
        self.gpus: list[dict[str, Any]] = []
        #: The task that sees each of them, as it was told last; None before that.
        self.held: dict[int, str] | None = None
        self.processes = agent.processes
        self._tunnels: TunnelEnd | None = None
        #: When (monotonic) its time limit begins to count: with its first task that is ready.
        self.ready_since: float | None = None
        #: Until when (seconds since the epoch) it stays without an owner; None: not at all.
        self.lease: Deadline | None = None
        #: Who asked for its end, and needs not be told of it.
        self.ended_by: Session | None = None
        self.directory = agent.directory / name
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._agent = agent
        #: The last failure of each kind, by what failed and task, so that it is reported once.
        self._failures: dict[tuple[str, str], str] = {}

    def task(self, name: str) -> TaskSupervisor:
        """Return a task that was asked for, or raise UnknownName."""
        if name not in self.tasks:
            raise UnknownName(
                f"cluster {self.name!r} has no task {name!r}",
                fix=f"its tasks are {', '.join(self.tasks) or 'none'}",
            )
        return self.tasks[name]

    @property
    def tunnels(self) -> TunnelEnd:
        """The host's end of the cluster's tunnels, or StateError where it has none."""
        if self._tunnels is None:
            raise StateError(f"cluster {self.name!r} has no tunnels here")
        return self._tunnels

    async def open_tunnels(self, trust: list[str], name: str) -> dict[str, Any]:
        """Extend the trust of this host's end, or make its key and return a signing request."""
        if self._tunnels is None:
            request = await make_key(self.directory / "tunnels", self.processes, name)
            return {"request": request}
        self._tunnels.let_in(trust)
        return self._tunnels_described()

    async def certify_tunnels(
        self, trust: list[str], name: str, certificate: str
    ) -> dict[str, Any]:
        """Open this host's end with a certificate for the key that `open_tunnels` made."""
        end = TunnelEnd(self.directory / "tunnels", self.processes, self.notice, name, certificate)
        try:
            await end.open(trust)
        except BaseException:
            end.close()
            raise
        self._tunnels = end
        return self._tunnels_described()

    def _tunnels_described(self) -> dict[str, Any]:
        return {"port": self.tunnels.port, "name": self.tunnels.name, "trust": self.tunnels.trust}

    def trim_logs(self) -> None:
        """Keep what processes say from filling the disk."""
        for task in self.tasks.values():
            trim_log(task.log)
        if self._tunnels is not None:
            self._tunnels.trim()

    def gpu_holders(self) -> dict[int, str]:
        """Return the names of the tasks that see a GPU, by its number."""
        return {gpu: task.spec.name for task in self.tasks.values() for gpu in task.spec.gpus}

    def task_changed(self, task: TaskSupervisor, log: tuple[str, ...]) -> None:
        """Tell whoever hears of this cluster what has become of a task."""
        if task.state is TaskState.READY and self.ready_since is None:
            self.ready_since = clock.now()
        self._agent.tell(self.name, {**self._event(task), "log": list(log)})
        with self.reported("writing the agent's state"):
            self._agent.write_state()

    def task_events(self) -> list[dict[str, Any]]:
        """Return the events that say how each task is now."""
        return [{**self._event(task), "log": []} for task in self.tasks.values()]

    def _event(self, task: TaskSupervisor) -> dict[str, Any]:
        runs = task.state is not TaskState.RESTARTING  # else its process is ending
        return {
            "event": "task",
            "cluster": self.name,
            "task": task.spec.name,
            "state": str(task.state),
            "reason": task.reason,
            "address": task.address,
            "pid": task.process.pid if runs and task.process else None,
            "restarts": task.restarts,
            "open_to": task.open_to if task.process else "",
        }

    def notice(
        self, severity: str, what: str, task: TaskSupervisor | None = None, fix: str | None = None
    ) -> None:
        """Tell whoever hears of this cluster a sentence."""
        self._agent.tell(
            self.name,
            {
                "event": "notice",
                "cluster": self.name,
                "severity": severity,
                "what": what,
                "task": task.spec.name if task else None,
                "fix": fix,
            },
        )

    @contextlib.contextmanager
    def reported(self, doing: str, task: TaskSupervisor | None = None) -> Iterator[None]:
        """Report an exception by a traceback in the log and a notice, once while it lasts."""
        key = (doing, task.spec.name if task else "")
        try:
            yield
        except Exception as error:
            plain = f"{type(error).__name__}: {error}"
            failure = error.what if isinstance(error, TfdError) else plain
            if self._failures.get(key) != failure:
                self._failures[key] = failure
                traceback.print_exc()
                self.notice(
                    "warning",
                    f"{doing} failed: {failure}",
                    task,
                    fix="the host may lack memory, threads or descriptors; it is tried again",
                )
        else:
            self._failures.pop(key, None)

    def hold(self, seconds: float) -> None:
        """Extend the lease to `seconds` from now, and write it to the state files."""
        self.lease = Deadline(seconds)
        self._agent.tell(self.name, {"event": "lease", "cluster": self.name, "left": seconds})
        self.write_state()
        self._agent.write_state()

    def write_state(self) -> None:
        """Keep the file by which a cluster that outlives its kernel is found."""
        with contextlib.suppress(OSError):
            runtime_dir.write_state(
                self.directory,
                {
                    "cluster": self.name,
                    "agent": self._agent.id,
                    "lease": self.lease and self.lease.moment,
                    "tasks": {
                        task.spec.name: [task.address, task.process.pid if task.process else None]
                        for task in self.tasks.values()
                        if task.state is not TaskState.PLANNED
                    },
                },
            )

    async def stop(self, reason: str) -> None:
        """End all tasks, those first that use others, and say why."""
        tasks = (*self.tasks.values(), *self.retired.values())
        for roles in STOP_ORDER:
            ending = [task for task in tasks if task.spec.role in roles]
            # Whatever keeps one task from ending, the others, the tunnels and the files go.
            for result in await asyncio.gather(
                *(task.stop() for task in ending), return_exceptions=True
            ):
                if isinstance(result, Exception):
                    traceback.print_exception(result)
        self.tasks.clear()
        self.retired.clear()
        try:
            if self._tunnels is not None:
                self._tunnels.close()
        finally:
            body = {"event": "ended", "cluster": self.name, "reason": reason}
            self._agent.tell(self.name, body, but=self.ended_by)
            runtime_dir.remove(self.directory)
