"""The agent: one process per host that starts, watches, restarts and ends tasks.

It answers requests and tells events (`tfd_notebook.net.agent_protocol`) over its own pipes, over a
socket in its directory, or both. A cluster ends with the session that opened it, and a session over
the pipes ends with them or with the parent; a cluster with a lease stays until that is over. The
agent runs in a session of its own in the system's sense, too, so that an interrupt of the notebook
does not reach it, and it acts by policy while the kernel is busy in C code.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tfd_notebook.agent import processes
from tfd_notebook.agent.cluster import AgentCluster
from tfd_notebook.agent.gpu_monitor import GpuMonitor
from tfd_notebook.agent.handlers import BY_SESSION, REPEATABLE, AgentHandlers
from tfd_notebook.agent.sessions import AgentListener, Session, own_pipes
from tfd_notebook.agent.task_supervisor import TaskSupervisor
from tfd_notebook.errors import TfdError, TimeLimit
from tfd_notebook.model.spec import TaskState
from tfd_notebook.net import agent_protocol, clock, runtime_dir

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_SECONDS = 1.0
_PSS_EVERY_TICKS = 10
_EXPIRY_GRACE_SECONDS = 5.0
#: Seconds of silence after which a connection is lost, whatever the network says: four pings.
_SILENT_SECONDS = 20.0
#: Seconds for which an agent without an owner waits for its first cluster.
_FIRST_SECONDS = 60.0
#: The session of the process that started this one.
_OWNER = "owner"


class Agent(AgentHandlers):
    """Answers requests until nobody is left to make any."""

    def __init__(self, agent_id: str, directory: Path, owner: int | None) -> None:
        self.id = agent_id
        self.directory = directory
        self.owner = owner
        self.host = socket.gethostname().replace(" ", "_") or "localhost"
        self.clusters: dict[str, AgentCluster] = {}
        self.processes = processes.Processes(agent_id, directory)
        self._sessions: dict[str, Session] = {}
        self.owned: dict[str, Session] = {}
        self.door = AgentListener(directory, self.host, agent_id, self._answer, self._sessions)
        self._stays = owner is None
        self._measured: dict[int, psutil.Process] = {}
        self._metering = GpuMonitor(self.tell)
        self._idle_since = time.monotonic() + (_FIRST_SECONDS if owner is None else 0.0)
        self._done = asyncio.Event()

    async def run(self) -> None:
        """Serve until nobody is there any more and no cluster has a lease, or a signal comes."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._done.set)
        # The system's word that the parent ends, which alone ends no lease.
        loop.add_signal_handler(
            signal.SIGHUP, lambda: asyncio.ensure_future(self._owner_left(), loop=loop)
        )
        self.write_state()
        if self._stays:
            await self.door.open()
        working = [asyncio.ensure_future(self._watch()), asyncio.ensure_future(self._done.wait())]
        if self.owner is not None:
            working.append(asyncio.ensure_future(self._serve_owner()))
        await asyncio.wait(working[:2], return_when=asyncio.FIRST_COMPLETED)
        for work in working:
            if work.done() and not work.cancelled() and (error := work.exception()):
                traceback.print_exception(error)
            work.cancel()
        stopping = asyncio.gather(
            *(cluster.stop("its agent ended") for cluster in self.clusters.values()),
            return_exceptions=True,
        )
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stopping, 5.0)
        self.processes.close_server()
        runtime_dir.remove(self.directory)
        if self.owner is not None and os.getppid() != self.owner:
            # It was killed, and could not take its socket away itself.
            runtime_dir.control_socket(self.owner).unlink(missing_ok=True)

    async def _serve_owner(self) -> None:
        """Serve the process that started this one, until it ends."""
        loop = asyncio.get_running_loop()
        session = self._sessions[_OWNER] = Session(self.host, self.id, 0.0)
        reader, writer = await own_pipes(loop)
        await session.serve(reader, writer, self._answer)
        with _printed():
            await self._owner_left()
        if not self._done.is_set():
            # Who only closed its end of the pipes waits for ours.
            body = {"event": "stays"}
            writer.write(agent_protocol.encode(agent_protocol.Frame(self.host, self.id, 0, body)))
            writer.close()

    async def _owner_left(self) -> None:
        """End what has ended with the process that started this one."""
        session = self._sessions.pop(_OWNER, None)
        if session is None:
            return
        staying = any(cluster.lease is not None for cluster in self.clusters.values())
        if not staying:
            self._done.set()
            return
        self._stays = True
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
        await self._end_owned(session, "its kernel ended")

    async def _end_owned(self, session: Session, reason: str) -> None:
        """End the clusters of a session that is over, but for those with a lease."""
        for name, owner in list(self.owned.items()):
            cluster = self.clusters.get(name)
            if owner is not session or cluster is None or cluster.lease is not None:
                continue
            await self.end(cluster, reason)

    async def end(self, cluster: AgentCluster, reason: str) -> None:
        """End a cluster, and say why to whoever hears of it."""
        try:
            await cluster.stop(reason)
        finally:
            self.clusters.pop(cluster.name, None)
            self.owned.pop(cluster.name, None)
            for session in self._sessions.values():
                session.hears.discard(cluster.name)
            self._idle_since = time.monotonic()
            self.write_state()

    async def _answer(self, session: Session, body: dict[str, Any]) -> None:
        try:
            handler = getattr(self, f"do_{body['do']}")
            arguments = body.get("arguments", {})
            if body["do"] in BY_SESSION:
                arguments = {"session": session, **arguments}
            value = await handler(**arguments)
            repeatable = body["do"] in REPEATABLE
            session.send({"re": body["id"], "ok": True, "value": value}, repeatable)
        except Exception as error:
            if not isinstance(error, TfdError):
                traceback.print_exc()
            session.send({"re": body["id"], "ok": False, "error": agent_protocol.pack_error(error)})

    def tell(self, cluster: str, body: dict[str, Any], but: Session | None = None) -> None:
        """Tell everybody who hears of `cluster`, but for one."""
        for session in self._sessions.values():
            if cluster in session.hears and session is not but:
                try:
                    session.send(body)
                except Exception:  # one session must not keep the others from their events
                    traceback.print_exc()

    def is_heard(self, cluster: str) -> bool:
        """Whether anybody hears of `cluster`."""
        return any(cluster in session.hears for session in self._sessions.values())

    def write_state(self) -> None:
        """Keep the file by which leftovers can be told from strangers."""
        state = {
            "agent": self.id,
            "pid": os.getpid(),
            "process": runtime_dir.process_identity(os.getpid()),
            "owner_pid": self.owner,
            "owner": None if self.owner is None else runtime_dir.process_identity(self.owner),
            # By the clock of `tfd_notebook.net.clock.now`.
            "clusters": {
                name: cluster.lease and cluster.lease.moment
                for name, cluster in self.clusters.items()
            },
        }
        with contextlib.suppress(OSError):
            runtime_dir.write_state(self.directory, state)

    # Watching

    async def _watch(self) -> None:
        tick = 0
        while True:
            before = time.monotonic()
            await asyncio.sleep(_TICK_SECONDS)
            late = time.monotonic() - before - _TICK_SECONDS
            tick += 1
            # An exception ends one inspection, and neither the agent nor any cluster.
            with _printed():
                await self._tick(tick, late > _TICK_SECONDS)

    async def _tick(self, tick: int, late: bool) -> None:
        """Inspect every task and end what is over.

        A tick that comes late (a suspended machine, a starved agent) proves nothing.
        """
        with _printed():
            self._metering.tick(self.clusters.values(), tick)
        tasks = [
            task
            for cluster in self.clusters.values()
            for task in cluster.tasks.values()
            if task.state in (TaskState.READY, TaskState.HUNG)
        ]
        await asyncio.gather(
            *(self._look_at(task, late, tick + position) for position, task in enumerate(tasks))
        )
        for cluster in self.clusters.values():
            with cluster.reported("trimming its logs"):
                cluster.trim_logs()
        await self._end_what_is_over()
        idle = not self.clusters and time.monotonic() - self._idle_since
        if idle > processes.IDLE_SECONDS:
            self.processes.close_server()

    async def _end_what_is_over(self) -> None:
        """End clusters whose time or lease is over, and sessions that nobody came back to."""
        if _OWNER in self._sessions and os.getppid() != self.owner:
            # A child of the kernel that inherited the pipe hides its end.
            await self._owner_left()
        for cluster in list(self.clusters.values()):
            with cluster.reported("ending it"):
                await self._end_if_over(cluster)
        for key, session in list(self._sessions.items()):
            session.drop_silent(_SILENT_SECONDS)
            if session.is_over:
                del self._sessions[key]
                self._idle_since = min(self._idle_since, time.monotonic())
                await self._end_owned(session, f"nobody came back for {session.grace:g} s")
        if self._stays and not self.clusters:
            here = any(session.away_since is None for session in self._sessions.values())
            if not here and time.monotonic() > self._idle_since:
                self._done.set()

    async def _end_if_over(self, cluster: AgentCluster) -> None:
        limit, since = cluster.policy.time_limit, cluster.ready_since
        ready_for = 0.0 if since is None else clock.now() - since
        # The kernel ends its cluster itself, and earlier, unless it is busy or frozen.
        if limit is not None and ready_for > limit + _EXPIRY_GRACE_SECONDS:
            await self.end(cluster, f"the time limit of {limit:g} s is over")
        elif cluster.lease is not None and cluster.lease.over:
            await self.end(cluster, "its lease is over")

    async def _look_at(self, task: TaskSupervisor, late: bool, tick: int) -> None:
        with task._cluster.reported("inspecting it", task):
            await self._inspect(task, late, tick)

    async def _inspect(self, task: TaskSupervisor, late: bool, tick: int) -> None:
        seen = await task.ask(task.address, task.kind)
        process = task.process
        if process is None or process.ended.done():
            return
        silence, stats = "" if seen.state == "alive" else seen.reason, None
        if not silence:
            stats, silence = await self._stats(process)
        if not silence:
            task.recovered()
            task.open_iterations = len(seen.tasks)
        elif late or task.silent_since is None:
            task.silent_since = time.monotonic()
        else:
            silent = time.monotonic() - task.silent_since
            if silent > task._cluster.policy.hang_seconds:
                task.hang(silent, silence)
        measured = self._measure(process.pid, tick % _PSS_EVERY_TICKS == 0)
        if (rss := measured.get("rss_mb")) is not None:
            task.limit_memory(rss)
        if stats is not None:
            measured["bytes_sent"] = stats["bytes_sent"]
            measured["working"] = stats["working"]
            task.keep_connections(dict(stats["connections"]))
        cluster = task._cluster.name
        self.tell(
            cluster, {"event": "measure", "cluster": cluster, "task": task.spec.name, **measured}
        )

    async def _stats(self, process: processes.Process) -> tuple[dict[str, Any] | None, str]:
        """Return what a task says of itself, or why it says nothing.

        A server's own threads answer a probe also while one of Python's never lets go of the lock.
        """
        busy = process.is_asked
        try:
            return await process.request("stats", 1.0), ""
        except TimeLimit:
            why = "its server answers, but no Python runs: something keeps the interpreter's lock"
            return None, "" if busy else why
        except TfdError:
            return None, ""

    def _measure(self, pid: int, with_pss: bool) -> dict[str, Any]:
        if pid not in self._measured:
            self._measured = {
                known: process for known, process in self._measured.items() if process.is_running()
            }
            with contextlib.suppress(psutil.Error):
                self._measured[pid] = psutil.Process(pid)
        try:
            process = self._measured[pid]
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
def _printed() -> Iterator[None]:
    """Write the traceback of an exception to the agent's log, and go on."""
    try:
        yield
    except Exception:
        traceback.print_exc()


def main() -> None:
    """Be an agent: ``TFD_AGENT`` is its id, ``TFD_OWNER`` the pid of its parent, if it has one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # A parent that ends before it can be listened to is found to be gone by the first look.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    owner = int(os.environ["TFD_OWNER"]) if "TFD_OWNER" in os.environ else None
    directory = Path(json.loads(os.environ["TFD_AGENT_DIR"]))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if owner is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
            if os.getppid() != owner:
                runtime_dir.remove(directory)
                return
    agent_id = os.environ[runtime_dir.AGENT_VARIABLE]

    async def run() -> None:
        # A probe of a hung task holds its thread for a second.
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(32, "tfd-agent"))
        await Agent(agent_id, directory, owner).run()
        # Everything has ended; the loop's own end would wait for a probe that asks the dead.
        os._exit(0)

    asyncio.run(run())
