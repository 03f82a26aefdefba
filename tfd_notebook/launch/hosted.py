"""A cluster's tasks on one host, and until when they stay there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from tfd_notebook.errors import UnknownName
from tfd_notebook.launch import runtime
from tfd_notebook.spec import STOP_ORDER, Policy, TaskState

if TYPE_CHECKING:
    from tfd_notebook.launch.requests import Requests
    from tfd_notebook.launch.sessions import Session
    from tfd_notebook.launch.supervise import Supervised


class HostedCluster:
    """A cluster's tasks on this host.

    Parameters
    ----------
    agent : Requests
    name : str
    opened : mapping
        What came with the request: ``policy``, ``environment``, ``directory``, ``path``,
        ``preload``, ``allow`` and ``about``, which describes the cluster to whoever attaches.
    """

    def __init__(self, agent: Requests, name: str, opened: dict[str, Any]) -> None:
        self.name = name
        self.policy = Policy(**opened["policy"])
        self.environment: dict[str, str] = opened["environment"]
        self.working_directory: str = opened["directory"]
        self.path: list[str] = opened["path"]
        self.preload: list[str] = opened["preload"]
        self.allow: list[str] = opened["allow"]
        self.about: dict[str, Any] = opened["about"]
        self.functions: list[bytes] = []
        self.tasks: dict[str, Supervised] = {}
        self.retired: dict[str, Supervised] = {}
        self.processes = agent.processes
        self.opened = time.monotonic()
        #: Until when (seconds since the epoch) it stays without an owner; None: not at all.
        self.lease: float | None = None
        #: Who asked for its end, and needs not be told of it.
        self.ended_by: Session | None = None
        self.directory = agent.directory / name
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._agent = agent

    def task(self, name: str) -> Supervised:
        """Return a task that was asked for, or raise UnknownName."""
        if name not in self.tasks:
            raise UnknownName(
                f"cluster {self.name!r} has no task {name!r}",
                fix=f"its tasks are {', '.join(self.tasks) or 'none'}",
            )
        return self.tasks[name]

    def task_changed(self, task: Supervised, log: tuple[str, ...]) -> None:
        """Tell whoever hears of this cluster what has become of a task."""
        self._agent.tell(self.name, {**self._event(task), "log": list(log)})
        self._agent.write_state()

    def told(self) -> list[dict[str, Any]]:
        """Return the events that say how each task is now."""
        return [{**self._event(task), "log": []} for task in self.tasks.values()]

    def _event(self, task: Supervised) -> dict[str, Any]:
        return {
            "event": "task",
            "cluster": self.name,
            "task": task.spec.name,
            "state": str(task.state),
            "reason": task.reason,
            "address": task.address,
            "pid": task.process.pid if task.process else None,
            "restarts": task.restarts,
            "open_to": task.open_to if task.process else "",
        }

    def notice(
        self, severity: str, what: str, task: Supervised | None = None, fix: str | None = None
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

    def hold_until(self, lease: float | None) -> None:
        """Have it stay until then, and keep a file that says so."""
        self.lease = lease
        self._agent.tell(self.name, {"event": "lease", "cluster": self.name, "until": lease})
        self.write_state()
        self._agent.write_state()

    def write_state(self) -> None:
        """Keep the file by which a cluster that outlives its kernel is found."""
        with contextlib.suppress(OSError):
            runtime.write_state(
                self.directory,
                {
                    "cluster": self.name,
                    "agent": self._agent.id,
                    "lease": self.lease,
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
            await asyncio.gather(*(task.stop() for task in ending))
        self.tasks.clear()
        self.retired.clear()
        body = {"event": "ended", "cluster": self.name, "reason": reason}
        self._agent.tell(self.name, body, but=self.ended_by)
        runtime.remove(self.directory)
