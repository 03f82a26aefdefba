"""The tasks of a cluster on one host, with its lease and time limit."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfd_notebook.agent import gpu_discovery
from tfd_notebook.agent import work_dir as agent_work_dir
from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.agent.dataset_functions import Functions
from tfd_notebook.agent.processes import Process
from tfd_notebook.agent.ranks import Rank
from tfd_notebook.agent.stunnel import TunnelEnd, make_key
from tfd_notebook.agent.task_supervisor import TaskSupervisor, read_log, trim_log
from tfd_notebook.errors import StateError, TfdError, no_lease, unknown_task
from tfd_notebook.model.events import ClusterEnded, LeaseChanged, Notice, TaskChanged
from tfd_notebook.model.spec import STOP_ORDER, Policy, Role, TaskSpec, TaskState, check_seconds
from tfd_notebook.model.stacks import TaskStacks
from tfd_notebook.net import clock, ports, runtime_dir, validation
from tfd_notebook.net.clock import Deadline
from tfd_notebook.net.host import check_reachability

if TYPE_CHECKING:
    from tfd_notebook.agent.agent import Agent
    from tfd_notebook.agent.sessions import Session


class AgentCluster:
    """The tasks of a cluster on this host.

    Parameters
    ----------
    agent : Agent
    name : str
    arguments : mapping
        The arguments of the request ``open``: ``policy``, ``environment``, ``directory``, ``path``,
        ``preload``, ``allow``, and ``description``, for processes that attach.
    """

    def __init__(self, agent: Agent, name: str, arguments: dict[str, Any]) -> None:
        self.name = name
        self.policy = Policy(**arguments["policy"])
        self.environment: dict[str, str] = arguments["environment"]
        self.working_directory: str = arguments["directory"]
        self.path: list[str] = arguments["path"]
        self.preload: list[str] = arguments["preload"]
        self.allow: list[str] = arguments["allow"]
        self.description: dict[str, Any] = arguments["description"]
        self.functions = Functions()
        self.tasks: dict[str, TaskSupervisor] = {}
        self.removed: dict[str, TaskSupervisor] = {}
        #: The processes of `Cluster.run`, by the names of their workers.
        self._ranks: dict[str, Rank] = {}
        #: Limits set by the administrator of this host.
        self.limits = limits()
        #: The GPUs that its tasks may use, each with the fields of `gpu_discovery.Gpu`.
        self.gpus: list[dict[str, Any]] = []
        #: The task that uses each GPU, as last reported; None before the first report.
        self.reported_holders: dict[int, str] | None = None
        self.processes = agent.processes
        self._tunnels: TunnelEnd | None = None
        self._stopping = False
        #: Time (monotonic) at which the time limit starts: when the first task is ready.
        self.ready_since: float | None = None
        #: End of the time that the cluster runs without an owner; None without a lease.
        self.lease: Deadline | None = None
        #: The session that requested the end, which gets no event about it.
        self.ended_by: Session | None = None
        self.directory = agent.directory / name
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._agent = agent
        #: The last failure of each operation and task, so that it is reported once.
        self._failures: dict[tuple[str, str], str] = {}

    def task(self, name: str) -> TaskSupervisor:
        """Return a task of the cluster, or raise UnknownName."""
        if name not in self.tasks:
            raise unknown_task(self.name, name, self.tasks)
        return self.tasks[name]

    @property
    def tunnels(self) -> TunnelEnd:
        """The host's end of the cluster's tunnels; raises StateError without one."""
        if self._tunnels is None:
            raise StateError(f"cluster {self.name!r} has no tunnels on this host")
        return self._tunnels

    async def start_process(self, spec: TaskSpec, log: Path, name: str = "") -> Process:
        """Start a process with the environment of a task; `name` differs from the task's."""
        return await self.processes.start(
            {
                "name": name or spec.name,
                # No task uses the memory of GPUs that belong to another task or to the kernel.
                "environment": {**self.environment, **gpu_discovery.environment(spec.gpus)},
                "defaults": {"TF_FORCE_GPU_ALLOW_GROWTH": "true"} if spec.gpus else {},
                "directory": self.working_directory,
                "path": self.path,
                "preload": self.preload,
            },
            log,
        )

    def trim_logs(self) -> None:
        """Limit the size of the processes' logs."""
        logs = [task.log for task in self.tasks.values()]
        for log in (*logs, *(rank.log for rank in self._ranks.values())):
            trim_log(log)
        if self._tunnels is not None:
            self._tunnels.trim()

    def gpu_holders(self) -> dict[int, str]:
        """Return the name of the task that uses each GPU, by the GPU's number."""
        return {gpu: task.spec.name for task in self.tasks.values() for gpu in task.spec.gpus}

    def task_changed(self, task: TaskSupervisor, log: tuple[str, ...]) -> None:
        """Send the new state of a task to the cluster's listeners."""
        if task.state is TaskState.READY and self.ready_since is None:
            self.ready_since = clock.now()
        self._agent.publish(self.name, self._event(task, log))

    def task_events(self) -> list[TaskChanged]:
        """Return an event with the current state of each task."""
        return [self._event(task) for task in self.tasks.values()]

    def _event(self, task: TaskSupervisor, log: tuple[str, ...] = ()) -> TaskChanged:
        runs = task.state is not TaskState.RESTARTING  # else its process is ending
        return TaskChanged(
            task.spec.name,
            task.state,
            task.reason,
            address=task.address,
            pid=task.process.pid if runs and task.process else None,
            restarts=task.restarts,
            open_to=task.open_to if task.process else "",
            log=log,
        )

    def notice(
        self, severity: str, what: str, task: TaskSupervisor | None = None, fix: str | None = None
    ) -> None:
        """Send a notice to the cluster's listeners."""
        name = task.spec.name if task else None
        self._agent.publish(self.name, Notice(severity, what, name, fix))

    @contextlib.contextmanager
    def reported(self, operation: str, task: TaskSupervisor | None = None) -> Iterator[None]:
        """Report an exception by a traceback in the log and by one notice while it persists."""
        key = (operation, task.spec.name if task else "")
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
                    f"{operation} failed: {failure}",
                    task,
                    fix="check memory, threads and descriptors of the host. The agent retries",
                )
        else:
            self._failures.pop(key, None)

    def set_lease(self, seconds: float) -> None:
        """Extend the lease to `seconds` from now, and write it to the agent's state file."""
        self.lease = Deadline(seconds)
        self._agent.publish(self.name, LeaseChanged(seconds))
        self._agent.write_state()

    async def stop(self, reason: str) -> None:
        """Stop all tasks, consumers of others first, and send the reason."""
        self._stopping = True
        await self.handle_close_ranks(list(self._ranks))
        tasks = (*self.tasks.values(), *self.removed.values())
        for roles in STOP_ORDER:
            ending = [task for task in tasks if task.spec.role in roles]
            # A task that fails to stop must not block the other tasks, the tunnels and the files.
            for result in await asyncio.gather(
                *(task.stop() for task in ending), return_exceptions=True
            ):
                if isinstance(result, Exception):
                    traceback.print_exception(result)
        self.tasks.clear()
        self.removed.clear()
        try:
            if self._tunnels is not None:
                self._tunnels.close()
        finally:
            try:
                await asyncio.to_thread(runtime_dir.remove, self.directory)
                if self.directory.exists():
                    sys.stderr.write(f"removing {self.directory} failed\n")
            finally:
                # Last: a session that receives it may open a cluster with the same name at once.
                self._agent.publish(self.name, ClusterEnded(reason), except_for=self.ended_by)

    # Requests of clients

    async def handle_describe(self, description: dict[str, Any]) -> None:
        self.description.update(description)

    async def handle_lease(self, seconds: float, renew: bool = False) -> float:
        if renew and self.lease is None:
            raise no_lease(self.name)
        check_seconds("seconds", seconds)
        await self._agent.listener.open()
        self.set_lease(seconds)
        return seconds

    def _require_open(self) -> None:
        """Raise StateError while the cluster stops: no task would be stopped that is added now."""
        if self._stopping:
            raise StateError(f"cluster {self.name!r} is stopping")

    async def handle_reserve_ports(self, tasks: list[dict[str, Any]]) -> dict[str, str]:
        self._require_open()
        supervisors: list[TaskSupervisor] = []
        try:
            for packed in tasks:
                packed = dict(packed, role=Role(packed["role"]), gpus=tuple(packed["gpus"]))
                spec = TaskSpec(**packed)
                if spec.name in self.tasks:
                    raise StateError(f"cluster {self.name!r} already has a task {spec.name!r}")
                removed = self.removed.pop(spec.name, None)
                if removed is None:
                    supervisors.append(TaskSupervisor(self, spec))
                else:
                    removed.reset(spec)
                    supervisors.append(removed)
        except BaseException:
            for task in supervisors:
                await task.stop()
            raise
        self.tasks.update({task.spec.name: task for task in supervisors})
        return {task.spec.name: task.address for task in supervisors}

    async def handle_release_ports(self, tasks: list[str]) -> None:
        for name in tasks:
            self.tasks.pop(name).release()

    async def handle_serve_tunnel(self, port: int) -> None:
        self.tunnels.serve(port)

    async def handle_forward_tunnel(
        self, port: int, address: str, name: str, authority: str
    ) -> None:
        self.tunnels.forward(port, address, name, authority)

    async def handle_close_tunnel(self, port: int) -> None:
        self.tunnels.close_port(port)

    async def handle_listening_addresses(self, port: int) -> list[str]:
        """Return the addresses on which this host listens at `port`."""
        return await asyncio.to_thread(ports.listening_addresses, port)

    async def handle_check_reachability(
        self, addresses: dict[str, str]
    ) -> dict[str, tuple[str, str]]:
        return await asyncio.to_thread(check_reachability, addresses)

    async def handle_gpus(self) -> dict[str, Any]:
        gpus = await asyncio.to_thread(gpu_discovery.find, self.environment)
        self.gpus, self.reported_holders = gpus["gpus"], None
        return gpus

    async def handle_start(self, tasks: dict[str, dict[str, Any]]) -> None:
        self._require_open()
        for name, settings in tasks.items():
            self.task(name).start(settings)

    async def handle_stop(self, tasks: list[str]) -> None:
        for task in [self.task(name) for name in tasks]:
            self.removed[task.spec.name] = self.tasks.pop(task.spec.name)
        await asyncio.gather(*(self.removed[name].remove() for name in tasks))

    async def handle_restart(self, task: str, settings: dict[str, Any]) -> None:
        await self.task(task).restart(settings)

    async def handle_allow(self, networks: list[str]) -> None:
        """Accept connections to the tasks from further networks, such as a host that joins."""
        self.limits.check_allow(networks)
        self.allow += [network for network in networks if network not in self.allow]
        await asyncio.gather(*(task.allow() for task in self.tasks.values()))

    async def handle_kill(self, task: str) -> int | None:
        return self.task(task).kill()

    async def handle_serve_errors(self, tasks: list[str]) -> None:
        for name in tasks:
            self.task(name).serve_error()

    async def handle_install(self, functions: str, tokens: list[str], removed: list[str]) -> None:
        blob = base64.b64decode(functions)
        self.functions.remove_unused(removed)
        self.functions.add(tokens, blob)
        workers = [t for t in self.tasks.values() if t.spec.role is Role.DATA_WORKER]
        try:
            await asyncio.gather(*(task.install(blob, removed) for task in workers))
        except BaseException:
            self.functions.remove(tokens)
            raise

    async def handle_inspect(self) -> dict[str, dict[str, list[str]]]:
        """Return the stale modules and loaded ops of each task that responds, by name."""
        tasks = tuple(self.tasks.values())
        replies = await asyncio.gather(*(task.inspect() for task in tasks))
        return {
            task.spec.name: reply
            for task, reply in zip(tasks, replies, strict=True)
            if reply is not None
        }

    async def handle_stacks(self, tasks: list[str]) -> dict[str, TaskStacks]:
        """Return the Python stacks of tasks by name, without tasks that are not known."""
        known = [name for name in tasks if name in self.tasks]
        replies = await asyncio.gather(*(self.tasks[name].stacks() for name in known))
        return dict(zip(known, replies, strict=True))

    async def handle_logs(self, task: str, size: int, offset: int | None = None) -> list[Any]:
        path = self.task(task).log
        data, end = await asyncio.to_thread(read_log, path, size, offset)
        return [data.decode(errors="replace"), end]

    async def handle_open_ranks(self, tasks: list[str]) -> dict[str, str]:
        self._require_open()
        await self.handle_close_ranks(tasks)
        for name in tasks:
            self._ranks[name] = Rank(self, self.task(name))
        return {name: self._ranks[name].address for name in tasks}

    async def handle_run_rank(
        self, task: str, function: str, addresses: dict[str, list[str]]
    ) -> dict[str, Any]:
        return await self._rank(task).run(function, addresses)

    async def handle_rank_output(self, task: str, size: int, offset: int) -> list[Any]:
        data, end = await asyncio.to_thread(read_log, self._rank(task).log, size, offset)
        return [data.decode(errors="replace"), end]

    async def handle_close_ranks(self, tasks: list[str]) -> None:
        ranks = [self._ranks.pop(name) for name in tasks if name in self._ranks]
        await asyncio.gather(*(rank.close() for rank in ranks))

    def _rank(self, task: str) -> Rank:
        if task not in self._ranks:
            raise StateError(f"cluster {self.name!r} runs no function on {task}")
        return self._ranks[task]

    async def handle_free_disk_space(self) -> int:
        work_dir = self.task("dispatcher:0").settings["work_dir"]
        return (await asyncio.to_thread(shutil.disk_usage, work_dir)).free

    async def handle_journal_size(self) -> int:
        work_dir = self.task("dispatcher:0").settings.get("work_dir")
        if work_dir is None:
            return 0
        return await asyncio.to_thread(agent_work_dir.total_bytes, work_dir)

    async def handle_journal(self, sizes: dict[str, int]) -> dict[str, tuple[int, bytes]]:
        """Return the data of the dispatcher's journal that a reader on another host lacks.

        The reader sends the size in bytes of its copy of each file. The reply has that size, and
        the bytes that follow in base64.
        """
        work_dir = self.task("dispatcher:0").settings.get("work_dir")
        if work_dir is None:
            return {}
        return await asyncio.to_thread(_journal_chunks, Path(work_dir), sizes)

    async def handle_open_tunnels(self, authority: str, name: str) -> dict[str, Any]:
        """Accept peers of an authority, or create this host's key and return a signing request."""
        if self._tunnels is None:
            request = await make_key(self.directory / "tunnels", self.processes, name)
            return {"request": request}
        end = self._tunnels
        end.accept(authority)
        return {"port": end.port, "name": end.name, "authority": end.authority}

    async def handle_certify_tunnels(
        self, authority: str, name: str, certificate: str
    ) -> dict[str, Any]:
        """Open this host's end with a certificate for the key created by `handle_open_tunnels`."""
        end = TunnelEnd(
            self.directory / "tunnels", self.processes, self.notice, name, certificate, authority
        )
        try:
            await end.open()
        except BaseException:
            end.close()
            raise
        self._tunnels = end
        return {"port": end.port}


def _journal_chunks(directory: Path, sizes: dict[str, int]) -> dict[str, tuple[int, bytes]]:
    chunks, budget = {}, validation.MAX_JOURNAL_BYTES
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
            chunks[name] = offset, data
    return chunks
