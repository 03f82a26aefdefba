"""Request handlers of an agent; see `tfd_notebook.launchers.client.agent_host`."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfd_notebook.agent import gpu_discovery, interpreter, processes
from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.agent.cluster import AgentCluster
from tfd_notebook.agent.task_supervisor import TaskSupervisor, read_log
from tfd_notebook.errors import NameTaken, StateError, no_lease
from tfd_notebook.model.events import Event
from tfd_notebook.model.spec import Role, TaskSpec
from tfd_notebook.net import clock, ports, runtime_dir, validation
from tfd_notebook.net.host import check_reachability

if TYPE_CHECKING:
    from tfd_notebook.agent.sessions import AgentListener, Session

#: Variables of the agent's own start, which tasks do not inherit.
_AGENT_VARIABLES = (
    "TFD_AGENT_DIR",
    "TFD_TASK_DEFAULTS",
    interpreter.PATH_VARIABLE,
    runtime_dir.AGENT_VARIABLE,
)
#: Requests whose meaning depends on the session.
BY_SESSION = ("open", "adopt", "detach", "close")
#: Read-only requests with large replies. If a reply is lost, the request is executed again.
REPEATABLE = ("journal", "logs")

#: Limit in bytes of the journal data in one reply.
_JOURNAL_BYTES = 4_000_000


class AgentHandlers(ABC):
    """The handlers of an agent's requests, as methods ``handle_<method>``."""

    id: str
    directory: Path
    clusters: dict[str, AgentCluster]
    owned: dict[str, Session]
    processes: processes.Processes
    listener: AgentListener

    @abstractmethod
    def write_state(self) -> None:
        """Write the state file with which `tfd sweep` identifies orphans."""

    @abstractmethod
    def publish(self, cluster: str, event: Event, except_for: Session | None = None) -> None:
        """Send an event to the sessions that listen to `cluster`, except one."""

    @abstractmethod
    def has_listeners(self, cluster: str) -> bool:
        """Return True if a session listens to `cluster`."""

    @abstractmethod
    async def end(self, cluster: AgentCluster, reason: str) -> None:
        """End a cluster, and send the reason to its listeners."""

    async def handle_preload(
        self, environment: dict[str, str], path: list[str] | None = None
    ) -> list[str]:
        return await self.processes.preload(*_check_environment(environment, path))

    async def handle_open(self, session: Session, cluster: str, **opened: Any) -> str:
        if cluster in self.clusters:
            raise NameTaken(
                f"a detached cluster {cluster!r} of this kernel is running",
                fix=f"attach to it with tfd.attach({cluster!r}), or use another name=",
            )
        limits().check_allow(opened["allow"])
        opened["environment"], opened["path"] = _check_environment(
            opened["environment"], opened["path"]
        )
        opened["directory"] = opened["directory"] or _task_defaults()["directory"]
        agent_cluster = self.clusters[cluster] = AgentCluster(self, cluster, opened)
        self.owned[cluster] = session
        session.subscriptions.add(cluster)
        self.write_state()
        if agent_cluster.limits.memory_gb is not None:
            agent_cluster.notice(
                "info",
                f"each task may use {agent_cluster.limits.memory_gb:g} GB of memory "
                f"({agent_cluster.limits.quote('memory_gb')})",
            )
        return str(agent_cluster.directory)

    async def handle_describe(self, cluster: str, description: dict[str, Any]) -> None:
        self._cluster(cluster).description.update(description)

    async def handle_lease(self, cluster: str, seconds: float, renew: bool = False) -> float:
        agent_cluster = self._cluster(cluster)
        if renew and agent_cluster.lease is None:
            raise no_lease(cluster)
        await self.listener.open()
        agent_cluster.set_lease(seconds)
        return seconds

    async def handle_adopt(self, session: Session, cluster: str) -> dict[str, Any]:
        agent_cluster = self._cluster(cluster)
        session.subscriptions.add(cluster)
        limit, start = agent_cluster.policy.time_limit, agent_cluster.ready_since
        return {
            "description": agent_cluster.description,
            "directory": str(agent_cluster.directory),
            "lease": agent_cluster.lease and agent_cluster.lease.left,
            "tasks": [
                {"cluster": cluster, **event.to_json()} for event in agent_cluster.task_events()
            ],
            "time_limit_left": None
            if limit is None or start is None
            else start + limit - clock.now(),
        }

    async def handle_detach(self, session: Session, cluster: str) -> None:
        session.subscriptions.discard(cluster)

    async def handle_clusters(self) -> list[dict[str, Any]]:
        return [
            {
                "name": cluster.name,
                "lease": cluster.lease and cluster.lease.left,
                "description": cluster.description,
                "tasks": [event.state for event in cluster.task_events()],
                "has_listeners": self.has_listeners(cluster.name),
            }
            for cluster in self.clusters.values()
        ]

    async def handle_reserve_ports(
        self, cluster: str, tasks: list[dict[str, Any]]
    ) -> dict[str, str]:
        agent_cluster = self._cluster(cluster)
        supervisors: list[TaskSupervisor] = []
        try:
            for packed in tasks:
                packed = dict(packed, role=Role(packed["role"]), gpus=tuple(packed["gpus"]))
                spec = TaskSpec(**packed)
                if spec.name in agent_cluster.tasks:
                    raise StateError(f"cluster {cluster!r} already has a task {spec.name!r}")
                removed = agent_cluster.removed.pop(spec.name, None)
                if removed is None:
                    supervisors.append(TaskSupervisor(agent_cluster, spec))
                else:
                    removed.reset(spec)
                    supervisors.append(removed)
        except BaseException:
            for task in supervisors:
                await task.stop()
            raise
        agent_cluster.tasks.update({task.spec.name: task for task in supervisors})
        return {task.spec.name: task.address for task in supervisors}

    async def handle_release_ports(self, cluster: str, tasks: list[str]) -> None:
        agent_cluster = self._cluster(cluster)
        for name in tasks:
            agent_cluster.tasks.pop(name).release()

    async def handle_open_tunnels(
        self, cluster: str, trust: list[str], name: str
    ) -> dict[str, Any]:
        return await self._cluster(cluster).open_tunnels(trust, name)

    async def handle_certify_tunnels(
        self, cluster: str, trust: list[str], name: str, certificate: str
    ) -> dict[str, Any]:
        return await self._cluster(cluster).certify_tunnels(trust, name, certificate)

    async def handle_serve_tunnel(self, cluster: str, port: int) -> None:
        self._cluster(cluster).tunnels.serve(port)

    async def handle_forward_tunnel(self, cluster: str, port: int, address: str, name: str) -> None:
        self._cluster(cluster).tunnels.forward(port, address, name)

    async def handle_close_tunnel(self, cluster: str, port: int) -> None:
        self._cluster(cluster).tunnels.close_port(port)

    async def handle_listening_addresses(self, cluster: str, port: int) -> list[str]:
        """Return the addresses on which this host listens at `port`."""
        self._cluster(cluster)
        return await asyncio.to_thread(ports.listening_addresses, port)

    async def handle_check_reachability(
        self, cluster: str, addresses: dict[str, str]
    ) -> dict[str, tuple[str, str]]:
        return await asyncio.to_thread(check_reachability, addresses)

    async def handle_gpus(self, cluster: str) -> dict[str, Any]:
        agent_cluster = self._cluster(cluster)
        gpus = await asyncio.to_thread(gpu_discovery.find, agent_cluster.environment)
        agent_cluster.gpus, agent_cluster.reported_holders = gpus["gpus"], None
        return gpus

    async def handle_start(self, cluster: str, tasks: dict[str, dict[str, Any]]) -> None:
        agent_cluster = self._cluster(cluster)
        for name, settings in tasks.items():
            agent_cluster.task(name).start(settings)

    async def handle_stop(self, cluster: str, tasks: list[str]) -> None:
        agent_cluster = self._cluster(cluster)
        for task in [agent_cluster.task(name) for name in tasks]:
            agent_cluster.removed[task.spec.name] = agent_cluster.tasks.pop(task.spec.name)
        await asyncio.gather(*(agent_cluster.removed[name].remove() for name in tasks))

    async def handle_restart(self, cluster: str, task: str, settings: dict[str, Any]) -> None:
        await self._cluster(cluster).task(task).restart(settings)

    async def handle_kill(self, cluster: str, task: str) -> int | None:
        return self._cluster(cluster).task(task).kill()

    async def handle_serve_errors(self, cluster: str, tasks: list[str]) -> None:
        for name in tasks:
            self._cluster(cluster).task(name).serve_error()

    async def handle_install(
        self, cluster: str, functions: str, tokens: list[str], removed: list[str]
    ) -> None:
        agent_cluster = self._cluster(cluster)
        blob = base64.b64decode(functions)
        agent_cluster.functions.remove_unused(removed)
        agent_cluster.functions.add(tokens, blob)
        workers = [t for t in agent_cluster.tasks.values() if t.spec.role is Role.DATA_WORKER]
        try:
            await asyncio.gather(*(task.install(blob, removed) for task in workers))
        except BaseException:
            agent_cluster.functions.remove(tokens)
            raise

    async def handle_inspect(self, cluster: str) -> dict[str, dict[str, list[str]]]:
        """Return the stale modules and loaded ops of each task that responds, by name."""
        tasks = tuple(self._cluster(cluster).tasks.values())
        replies = await asyncio.gather(*(task.inspect() for task in tasks))
        return {
            task.spec.name: reply
            for task, reply in zip(tasks, replies, strict=True)
            if reply is not None
        }

    async def handle_logs(
        self, cluster: str, task: str, size: int, offset: int | None = None
    ) -> list[Any]:
        path = self._cluster(cluster).task(task).log
        data, end = await asyncio.to_thread(read_log, path, size, offset)
        return [data.decode(errors="replace"), end]

    async def handle_close(self, session: Session, cluster: str) -> None:
        agent_cluster = self._cluster(cluster)
        agent_cluster.ended_by = session
        await self.end(agent_cluster, "it was stopped from another process")

    def _cluster(self, name: str) -> AgentCluster:
        if name not in self.clusters:
            raise StateError(f"this agent has no cluster {name!r}")
        return self.clusters[name]

    async def handle_free_disk_space(self, cluster: str) -> int:
        work_dir = self._cluster(cluster).task("dispatcher:0").settings["work_dir"]
        return (await asyncio.to_thread(shutil.disk_usage, work_dir)).free

    async def handle_journal(
        self, cluster: str, sizes: dict[str, int]
    ) -> dict[str, tuple[int, str]]:
        """Return the data of the dispatcher's journal that a reader on another host lacks.

        The reader sends the size in bytes of its copy of each file. The reply has that size, and
        the bytes that follow in base64.
        """
        work_dir = self._cluster(cluster).task("dispatcher:0").settings.get("work_dir")
        return (
            {}
            if work_dir is None
            else await asyncio.to_thread(_journal_chunks, Path(work_dir), sizes)
        )


def _journal_chunks(directory: Path, sizes: dict[str, int]) -> dict[str, tuple[int, str]]:
    chunks, budget = {}, _JOURNAL_BYTES
    for path in sorted(directory.glob("*/*")):
        name = str(path.relative_to(directory))
        # The directory also contains the registered datasets, which no reader needs.
        if budget <= 0 or not validation.is_journal_file(name):
            continue
        offset = sizes.get(name, 0)
        if path.stat().st_size > offset:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(budget)
            budget -= len(data)
            chunks[name] = offset, base64.b64encode(data).decode()
    return chunks


def _check_environment(
    environment: dict[str, str], path: list[str] | None
) -> tuple[dict[str, str], list[str]]:
    """Return the environment and import path of tasks; without a path both extend this host's."""
    if path is not None:
        return environment, path
    inherited = {key: value for key, value in os.environ.items() if key not in _AGENT_VARIABLES}
    return {**inherited, **environment}, _task_defaults()["path"]


def _task_defaults() -> dict[str, Any]:
    """Return the default directory and import path of tasks."""
    defaults: dict[str, Any] = json.loads(os.environ["TFD_TASK_DEFAULTS"])
    return defaults
