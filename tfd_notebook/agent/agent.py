"""The agent: one process per host that starts, supervises, restarts and stops tasks.

It receives requests and sends events (`tfd_notebook.net.agent_protocol`) over its own pipes, over a
socket in its directory, or both. A cluster ends with the session that opened it, unless it has a
lease. A session over the pipes ends with them or with the parent process. The agent runs in its own
process session (``setsid``), so that an interrupt of the notebook does not reach it. It applies the
policy while the kernel is busy in C code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import traceback
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tfd_notebook.agent import interpreter, processes
from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.agent.cluster import AgentCluster
from tfd_notebook.agent.gpu_discovery import GpuMonitor
from tfd_notebook.agent.sessions import AgentListener, Session, own_pipes
from tfd_notebook.agent.task_supervisor import TaskSupervisor, busy_share
from tfd_notebook.errors import NameTaken, StateError, TfdError, TimeLimit
from tfd_notebook.model.events import Event, TaskMeasured
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.net import (
    agent_protocol,
    clock,
    process_control,
    reconnect,
    runtime_dir,
    shared_loopback,
)

_TICK_SECONDS = 1.0
_MOST_JITTER_SECONDS = 0.4
#: Its multiples are spread evenly between whole numbers.
_GOLDEN_RATIO = 0.618
_PSS_EVERY_TICKS = 10
_EXPIRY_GRACE_SECONDS = 5.0
#: Seconds that an agent without an owner waits for its first cluster.
_FIRST_SECONDS = 60.0
#: The session of the process that started the agent.
_OWNER = "owner"
#: Variables of the agent's own start, which tasks do not inherit.
_AGENT_VARIABLES = (
    "TFD_AGENT_DIR",
    "TFD_TASK_DEFAULTS",
    interpreter.PATH_VARIABLE,
    runtime_dir.AGENT_VARIABLE,
)
#: Requests whose meaning depends on the session.
_BY_SESSION = ("open", "adopt", "detach", "close")
#: Read-only requests with large replies. If a reply is lost, the request is executed again.
_REPEATABLE = ("journal", "logs", "stacks")

_OpenPipes = Callable[
    [asyncio.AbstractEventLoop], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
]


class Agent:
    """Serves requests until no session and no leased cluster remain.

    The methods ``handle_<name>`` of this class and of `AgentCluster` execute the requests; see
    `tfd_notebook.launchers.client.agent_host`.

    Parameters
    ----------
    agent_id : str
    directory : Path
    owner : int, optional
        The pid of the process that started the agent. None without one.
    open_pipes : callable
        Returns reader and writer of the connection to the owner. Default `own_pipes`.
    """

    def __init__(
        self,
        agent_id: str,
        directory: Path,
        owner: int | None,
        open_pipes: _OpenPipes = own_pipes,
    ) -> None:
        self.id = agent_id
        self.directory = directory
        self.owner = owner
        self._open_pipes = open_pipes
        self._clock = asyncio.get_running_loop().time
        self.clusters: dict[str, AgentCluster] = {}
        self.processes = processes.Processes(agent_id, directory)
        self._sessions: dict[str, Session] = {}
        self.owned: dict[str, Session] = {}
        self.listener = AgentListener(directory, self._answer, self._sessions, self._clock)
        self._outlives_owner = owner is None
        self._sampled: dict[int, psutil.Process] = {}
        self._gpu_monitor = GpuMonitor(self.publish)
        self._idle_since = self._clock() + (_FIRST_SECONDS if owner is None else 0.0)
        self._done = asyncio.Event()

    async def run(self) -> None:
        """Serve until no session and no leased cluster remain, or until SIGTERM."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._done.set)
        # The parent-death signal (see `main`). A lease outlasts the parent.
        loop.add_signal_handler(
            signal.SIGHUP, lambda: asyncio.ensure_future(self._owner_left(), loop=loop)
        )
        self.write_state()
        if self._outlives_owner:
            await self.listener.open()
        futures = [asyncio.ensure_future(self._watch()), asyncio.ensure_future(self._done.wait())]
        if self.owner is not None:
            futures.append(asyncio.ensure_future(self._serve_owner()))
        await asyncio.wait(futures[:2], return_when=asyncio.FIRST_COMPLETED)
        for future in futures:
            if future.done() and not future.cancelled() and (error := future.exception()):
                traceback.print_exception(error)
            future.cancel()
        stopping = asyncio.gather(
            *(cluster.stop("its agent ended") for cluster in self.clusters.values()),
            return_exceptions=True,
        )
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stopping, 5.0)
        self.processes.close_server()
        runtime_dir.remove(self.directory)
        owner = self.owner
        if owner is not None and (os.getppid() != owner or runtime_dir.is_ending(owner)):
            # The kernel was killed and did not remove its control socket.
            runtime_dir.control_socket(owner).unlink(missing_ok=True)

    async def _serve_owner(self) -> None:
        """Serve the process that started the agent, until that process ends."""
        loop = asyncio.get_running_loop()
        session = self._sessions[_OWNER] = Session(0.0)
        reader, writer = await self._open_pipes(loop)
        await session.serve(reader, writer, self._answer)
        with _exceptions_logged():
            await self._owner_left()
        if not self._done.is_set():
            # An owner that closed only its end of the pipes waits for the end of these.
            writer.write(agent_protocol.encode({"event": "agent_detached"}))
            writer.close()

    async def _owner_left(self) -> None:
        """End the clusters without a lease after the process that started the agent has ended."""
        session = self._sessions.pop(_OWNER, None)
        if session is None:
            return
        has_lease = any(cluster.lease is not None for cluster in self.clusters.values())
        if not has_lease:
            self._done.set()
            return
        self._outlives_owner = True
        process_control.set_parent_death_signal(0)
        await self._end_owned(session, "its kernel ended")

    async def _end_owned(self, session: Session, reason: str) -> None:
        """End the clusters of a session that has ended, except those with a lease."""
        for name, owner in list(self.owned.items()):
            cluster = self.clusters.get(name)
            if owner is not session or cluster is None or cluster.lease is not None:
                continue
            await self.end(cluster, reason)

    async def end(self, cluster: AgentCluster, reason: str) -> None:
        """End a cluster, and send the reason to its listeners."""
        try:
            await cluster.stop(reason)
        finally:
            self.clusters.pop(cluster.name, None)
            self.owned.pop(cluster.name, None)
            for session in self._sessions.values():
                session.subscriptions.discard(cluster.name)
            self._idle_since = self._clock()
            self.write_state()

    async def _answer(self, session: Session, body: dict[str, Any]) -> None:
        try:
            method, arguments = body["method"], dict(body.get("arguments", {}))
            handler: Any = getattr(self, f"handle_{method}", None)
            if method in _BY_SESSION:
                arguments["session"] = session
            elif handler is None:
                handler = getattr(self._cluster(arguments.pop("cluster")), f"handle_{method}")
            value = await handler(**arguments)
            repeatable = method in _REPEATABLE
            session.send({"reply_to": body["id"], "ok": True, "value": value}, repeatable)
        except Exception as error:
            session.send(agent_protocol.failure(body["id"], error))

    def publish(self, cluster: str, event: Event, except_for: Session | None = None) -> None:
        """Send an event to the sessions that listen to `cluster`, except one."""
        body = {"cluster": cluster, **event.to_json()}
        for session in self._sessions.values():
            if cluster in session.subscriptions and session is not except_for:
                try:
                    session.send(body)
                except Exception:  # a failing session must not block the events of the others
                    traceback.print_exc()

    def has_listeners(self, cluster: str) -> bool:
        """Return True if a session listens to `cluster`."""
        return any(cluster in session.subscriptions for session in self._sessions.values())

    def write_state(self) -> None:
        """Write the state file with which `tfd sweep` identifies orphans."""
        state = {
            "agent": self.id,
            "pid": os.getpid(),
            "process": runtime_dir.process_identity(os.getpid()),
            "owner_pid": self.owner,
            "owner": None if self.owner is None else runtime_dir.process_identity(self.owner),
            # By the clock of `tfd_notebook.net.clock.now`.
            "clusters": {
                name: cluster.lease and cluster.lease.expires_at
                for name, cluster in self.clusters.items()
            },
        }
        with contextlib.suppress(OSError):
            runtime_dir.write_state(self.directory, state)

    # Requests of clients

    async def handle_serve_nonce(self, nonce: str) -> int:
        """Serve a nonce on loopback for a short time, and return the port."""
        return (await asyncio.to_thread(shared_loopback.NonceServer, nonce)).port

    async def handle_read_nonce(self, port: int) -> str:
        """Return the nonce at a loopback port of this host; empty if there is none."""
        return await asyncio.to_thread(shared_loopback.read_nonce, port)

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

    async def handle_close(self, session: Session, cluster: str) -> None:
        agent_cluster = self._cluster(cluster)
        agent_cluster.ended_by = session
        await self.end(agent_cluster, "it was stopped from another process")

    def _cluster(self, name: str) -> AgentCluster:
        if name not in self.clusters:
            raise StateError(f"this agent has no cluster {name!r}")
        return self.clusters[name]

    # Supervision

    async def _watch(self) -> None:
        tick = 0
        while True:
            before = self._clock()
            await asyncio.sleep(_TICK_SECONDS)
            late = self._clock() - before - _TICK_SECONDS
            tick += 1
            # An exception ends one inspection only, not the agent or a cluster.
            with _exceptions_logged():
                await self._tick(tick, late > _TICK_SECONDS)

    async def _tick(self, tick: int, late: bool) -> None:
        """Start to inspect every task, and end expired clusters and sessions.

        A late tick (after a suspend, or without CPU time) does not prove a hang.
        """
        with _exceptions_logged():
            self._gpu_monitor.tick(self.clusters.values(), tick)
        tasks = [
            task
            for cluster in self.clusters.values()
            for task in cluster.tasks.values()
            if task.state in (TaskState.READY, TaskState.HUNG)
        ]
        for position, task in enumerate(tasks):
            # A task that answers slowly must not delay the measurements of the others.
            if task.inspection is None or task.inspection.done():
                task.inspection = asyncio.ensure_future(
                    self._inspect_and_report(task, late, tick + position)
                )
        for cluster in self.clusters.values():
            with cluster.reported(f"trimming the logs of cluster {cluster.name!r}"):
                cluster.trim_logs()
        await self._end_expired()
        idle = not self.clusters and self._clock() - self._idle_since
        if idle > processes.IDLE_SECONDS:
            self.processes.close_server()

    async def _end_expired(self) -> None:
        """End expired clusters and sessions."""
        if _OWNER in self._sessions and os.getppid() != self.owner:
            # The pipe stays open if a child process of the kernel inherited it.
            await self._owner_left()
        for cluster in list(self.clusters.values()):
            with cluster.reported(f"ending cluster {cluster.name!r}"):
                await self._end_if_expired(cluster)
        for key, session in list(self._sessions.items()):
            session.drop_silent(reconnect.SILENT_SECONDS)
            if session.has_expired:
                del self._sessions[key]
                self._idle_since = min(self._idle_since, self._clock())
                await self._end_owned(session, f"no reconnection within {session.grace:g} s")
        if self._outlives_owner and not self.clusters:
            connected = any(
                session.disconnected_since is None for session in self._sessions.values()
            )
            if not connected and self._clock() > self._idle_since:
                self._done.set()

    async def _end_if_expired(self, cluster: AgentCluster) -> None:
        limit, since = cluster.policy.time_limit, cluster.ready_since
        ready_for = 0.0 if since is None else clock.now() - since
        # The kernel ends its cluster itself, and earlier, unless it is busy or suspended.
        if limit is not None and ready_for > limit + _EXPIRY_GRACE_SECONDS:
            await self.end(cluster, f"the time limit of {limit:g} s was reached")
        elif cluster.lease is not None and cluster.lease.expired:
            await self.end(cluster, "its lease expired")

    async def _inspect_and_report(self, task: TaskSupervisor, late: bool, tick: int) -> None:
        with task.cluster.reported(f"inspecting {task.spec.name}", task):
            if task.spec.role is Role.DATA_WORKER and not task.replies_late:
                # Samples at regular times could always see the same part of periodic work.
                await asyncio.sleep(_MOST_JITTER_SECONDS * (tick * _GOLDEN_RATIO % 1))
            await self._inspect(task, late, tick)

    async def _inspect(self, task: TaskSupervisor, late: bool, tick: int) -> None:
        began, stopped = self._clock(), self._is_stopped(task)
        result = await task.probe_address(task.address, task.kind)
        process = task.process
        if process is None or process.ended.done():
            return
        silence, stats = "" if result.state == "alive" else result.reason, None
        if not silence:
            # A starved process takes seconds to reply, although it is not hung.
            hang_seconds = task.cluster.policy.hang_seconds
            stats, silence = await self._stats(process, max(1.0, min(3.0, hang_seconds / 2)))
        if not silence:
            task.open_iterations = len(result.tasks)
        task.record_probe(silence, late)
        measured = self._sample(process.pid, tick % _PSS_EVERY_TICKS == 0)
        if (rss := measured.get("rss_mb")) is not None:
            task.limit_memory(rss)
        if stats is not None:
            measured["bytes_sent"] = stats["bytes_sent"]
            seconds = self._clock() - began
            task.replies_late = stopped or seconds > _TICK_SECONDS / 4
            measured["late"] = task.replies_late and not late
            measured["working"] = busy_share(stats["working"], seconds, stopped)
            task.keep_connections(dict(stats["connections"]))
        self.publish(task.cluster.name, TaskMeasured(task.spec.name, **measured))

    async def _stats(
        self, process: processes.Process, timeout: float
    ) -> tuple[dict[str, Any] | None, str]:
        """Return the statistics of a task, or the reason if it does not respond.

        The threads of a server answer a probe even while a Python thread never releases the GIL.
        """
        busy = process.has_pending_requests
        try:
            return await process.request("stats", timeout), ""
        except TimeLimit:
            why = "its server responds, but Python does not: a thread holds the GIL"
            return None, "" if busy else why
        except TfdError:
            return None, ""

    def _is_stopped(self, task: TaskSupervisor) -> bool:
        """Return True if the process of a task is suspended now, as by SIGSTOP."""
        known = None if task.process is None else self._sampled.get(task.process.pid)
        with contextlib.suppress(psutil.Error):
            return known is not None and known.status() == psutil.STATUS_STOPPED
        return False

    def _sample(self, pid: int, with_pss: bool) -> dict[str, Any]:
        if pid not in self._sampled:
            self._sampled = {
                known: process for known, process in self._sampled.items() if process.is_running()
            }
            with contextlib.suppress(psutil.Error):
                self._sampled[pid] = psutil.Process(pid)
        try:
            process = self._sampled[pid]
            with process.oneshot():
                measured = {
                    "cpu_percent": process.cpu_percent(),
                    "rss_mb": process.memory_info().rss / 1e6,
                }
                if with_pss:
                    measured["pss_mb"] = process.memory_full_info().pss / 1e6
            return measured
        except (KeyError, psutil.Error, AttributeError):
            return {}


@contextlib.contextmanager
def _exceptions_logged() -> Iterator[None]:
    """Write the traceback of an exception to the agent's log, and continue."""
    try:
        yield
    except Exception:
        traceback.print_exc()


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


def main() -> None:
    """Run an agent: ``TFD_AGENT`` is its id, ``TFD_OWNER`` the pid of its parent, if any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # The check of os.getppid below detects a parent that ended before the handler exists.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    owner = int(os.environ["TFD_OWNER"]) if "TFD_OWNER" in os.environ else None
    directory = Path(json.loads(os.environ["TFD_AGENT_DIR"]))
    process_control.adopt_orphans()
    if owner is not None:
        process_control.set_parent_death_signal(signal.SIGHUP)
        if os.getppid() != owner:
            runtime_dir.remove(directory)
            return
    agent_id = os.environ[runtime_dir.AGENT_VARIABLE]

    async def run() -> None:
        # A probe of a hung task blocks its thread for a second.
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(32, "tfd-agent"))
        await Agent(agent_id, directory, owner).run()
        # Exit without waiting for probes of ended tasks, as `asyncio.run` would.
        os._exit(0)

    asyncio.run(run())
