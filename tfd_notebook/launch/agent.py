"""The agent: one process per host that starts, watches, restarts and ends tasks.

It answers requests and tells events (`tfd_notebook.launch.protocol`) over its own pipes, over a
socket in its directory, or both. A cluster ends with the session that opened it, and a session over
the pipes ends with them or with the parent; a cluster with a lease stays until that is over. The
agent runs in a session of its own in the system's sense, too, so that an interrupt of the notebook
does not reach it, and it acts by policy while the kernel is busy in C code.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tfd_notebook import gpus
from tfd_notebook.errors import NameTaken, StateError, TfdError, TimeLimit
from tfd_notebook.launch import processes, protocol, runtime
from tfd_notebook.launch.base import no_lease
from tfd_notebook.launch.hosted import HostedCluster
from tfd_notebook.launch.sessions import Door, Session, own_pipes
from tfd_notebook.launch.supervise import Supervised, read_log
from tfd_notebook.spec import Role, TaskSpec, TaskState

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_SECONDS = 1.0
_PSS_EVERY_TICKS = 10
_GPU_EVERY_TICKS = 5
_EXPIRY_GRACE_SECONDS = 5.0
#: Seconds for which an agent without an owner waits for its first cluster.
_FIRST_SECONDS = 60.0
#: The session of the process that started this one.
_OWNER = "owner"
#: Requests that mean something else from each session.
_BY_SESSION = ("open", "adopt", "leave", "close")


class Agent:
    """Answers requests until nobody is left to make any."""

    def __init__(self, agent_id: str, directory: Path, owner: int | None) -> None:
        self.id = agent_id
        self.directory = directory
        self.owner = owner
        self.host = socket.gethostname().replace(" ", "_") or "localhost"
        self.clusters: dict[str, HostedCluster] = {}
        self.processes = processes.Processes(agent_id, directory)
        self._sessions: dict[str, Session] = {}
        self._owned: dict[str, Session] = {}
        self._door = Door(directory, self.host, agent_id, self._answer, self._sessions)
        self._stays = owner is None
        self._measured: dict[int, psutil.Process] = {}
        self._meter = gpus.Meter()
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
            await self._door.open()
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
        runtime.remove(self.directory)
        if self.owner is not None and os.getppid() != self.owner:
            # It was killed, and could not take its socket away itself.
            runtime.control_socket(self.owner).unlink(missing_ok=True)

    async def _serve_owner(self) -> None:
        """Serve the process that started this one, until it ends."""
        loop = asyncio.get_running_loop()
        session = self._sessions[_OWNER] = Session(self.host, self.id, 0.0)
        reader, writer = await own_pipes(loop)
        await session.serve(reader, writer, self._answer)
        await self._owner_left()
        if not self._done.is_set():
            # Who only closed its end of the pipes waits for ours.
            body = {"event": "stays"}
            writer.write(protocol.encode(protocol.Frame(self.host, self.id, 0, body)))
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
        for name, owner in list(self._owned.items()):
            cluster = self.clusters.get(name)
            if owner is not session or cluster is None or cluster.lease is not None:
                continue
            await self._end(cluster, reason)

    async def _end(self, cluster: HostedCluster, reason: str) -> None:
        try:
            await cluster.stop(reason)
        finally:
            self.clusters.pop(cluster.name, None)
            self._owned.pop(cluster.name, None)
            for session in self._sessions.values():
                session.hears.discard(cluster.name)
            self._idle_since = time.monotonic()
            self.write_state()

    async def _answer(self, session: Session, body: dict[str, Any]) -> None:
        try:
            handler = getattr(self, f"do_{body['do']}")
            arguments = body.get("arguments", {})
            if body["do"] in _BY_SESSION:
                arguments = {"session": session, **arguments}
            value = await handler(**arguments)
            session.send({"re": body["id"], "ok": True, "value": value})
        except Exception as error:
            if not isinstance(error, TfdError):
                traceback.print_exc()
            session.send({"re": body["id"], "ok": False, "error": protocol.pack_error(error)})

    def tell(self, cluster: str, body: dict[str, Any]) -> None:
        """Tell everybody who hears of `cluster`."""
        for session in self._sessions.values():
            if cluster in session.hears:
                session.send(body)

    def write_state(self) -> None:
        """Keep the file by which leftovers can be told from strangers."""
        state = {
            "agent": self.id,
            "pid": os.getpid(),
            "start": runtime.process_start(os.getpid()),
            "owner_pid": self.owner,
            "owner_start": None if self.owner is None else runtime.process_start(self.owner),
            "clusters": {name: cluster.lease for name, cluster in self.clusters.items()},
        }
        with contextlib.suppress(OSError):
            runtime.write_state(self.directory, state)

    # Requests

    async def do_preload(self, environment: dict[str, str], path: list[str]) -> list[str]:
        return await self.processes.preload(environment, path)

    async def do_open(self, session: Session, cluster: str, **opened: Any) -> str:
        if cluster in self.clusters:
            raise NameTaken(
                f"a detached cluster {cluster!r} of this kernel lives",
                fix=f"take it up, tfd.attach({cluster!r}), or give this one another name=",
            )
        hosted = self.clusters[cluster] = HostedCluster(self, cluster, opened)
        self._owned[cluster] = session
        session.hears.add(cluster)
        self.write_state()
        return str(hosted.directory)

    async def do_describe(self, cluster: str, about: dict[str, Any]) -> None:
        self._cluster(cluster).about.update(about)

    async def do_lease(self, cluster: str, seconds: float, renew: bool = False) -> float:
        hosted = self._cluster(cluster)
        if renew and hosted.lease is None:
            raise no_lease(cluster)
        await self._door.open()
        until = time.time() + seconds
        hosted.hold_until(until)
        return until

    async def do_adopt(self, session: Session, cluster: str) -> dict[str, Any]:
        hosted = self._cluster(cluster)
        session.hears.add(cluster)
        limit = hosted.policy.time_limit
        return {
            "about": hosted.about,
            "directory": str(hosted.directory),
            "lease": hosted.lease,
            "left": None if limit is None else limit - (time.monotonic() - hosted.opened),
            "tasks": hosted.told(),
        }

    async def do_leave(self, session: Session, cluster: str) -> None:
        session.hears.discard(cluster)

    async def do_clusters(self) -> list[dict[str, Any]]:
        return [
            {
                "name": cluster.name,
                "lease": cluster.lease,
                "about": cluster.about,
                "tasks": [task["state"] for task in cluster.told()],
            }
            for cluster in self.clusters.values()
        ]

    async def do_hold(self, cluster: str, tasks: list[dict[str, Any]]) -> dict[str, str]:
        hosted = self._cluster(cluster)
        held: list[Supervised] = []
        try:
            for packed in tasks:
                packed = dict(packed, role=Role(packed["role"]), gpus=tuple(packed["gpus"]))
                spec = TaskSpec(**packed)
                if spec.name in hosted.tasks:
                    raise StateError(f"cluster {cluster!r} has a task {spec.name!r} already")
                retired = hosted.retired.pop(spec.name, None)
                if retired is None:
                    held.append(Supervised(hosted, spec))
                else:
                    retired.revive(spec)
                    held.append(retired)
        except BaseException:
            for task in held:
                await task.stop()
            raise
        hosted.tasks.update({task.spec.name: task for task in held})
        return {task.spec.name: task.address for task in held}

    async def do_gpus(self, cluster: str) -> dict[str, Any]:
        return await asyncio.to_thread(gpus.find, self._cluster(cluster).environment)

    async def do_start(self, cluster: str, tasks: dict[str, dict[str, Any]]) -> None:
        hosted = self._cluster(cluster)
        for name, settings in tasks.items():
            hosted.task(name).start(settings)

    async def do_stop(self, cluster: str, tasks: list[str]) -> None:
        hosted = self._cluster(cluster)
        for task in [hosted.task(name) for name in tasks]:
            hosted.retired[task.spec.name] = hosted.tasks.pop(task.spec.name)
        await asyncio.gather(*(hosted.retired[name].retire() for name in tasks))

    async def do_restart(self, cluster: str, task: str, settings: dict[str, Any]) -> None:
        await self._cluster(cluster).task(task).restart(settings)

    async def do_kill(self, cluster: str, task: str) -> int | None:
        return self._cluster(cluster).task(task).kill()

    async def do_bury(self, cluster: str, tasks: list[str]) -> None:
        for name in tasks:
            self._cluster(cluster).task(name).bury()

    async def do_install(self, cluster: str, blob: str) -> None:
        hosted = self._cluster(cluster)
        functions = base64.b64decode(blob)
        hosted.functions.append(functions)
        workers = [t for t in hosted.tasks.values() if t.spec.role is Role.DATA_WORKER]
        try:
            await asyncio.gather(*(task.install(functions) for task in workers))
        except BaseException:
            hosted.functions.remove(functions)
            raise

    async def do_logs(
        self, cluster: str, task: str, size: int, offset: int | None = None
    ) -> list[Any]:
        path = self._cluster(cluster).task(task).log
        data, end = await asyncio.to_thread(read_log, path, size, offset)
        return [data.decode(errors="replace"), end]

    async def do_close(self, session: Session, cluster: str) -> None:
        hosted = self._cluster(cluster)
        # Who asks for it needs not be told.
        session.hears.discard(cluster)
        await self._end(hosted, "it was stopped from another process")

    def _cluster(self, name: str) -> HostedCluster:
        if name not in self.clusters:
            raise StateError(f"this agent hosts no cluster {name!r}")
        return self.clusters[name]

    # Watching

    async def _watch(self) -> None:
        tick = 0
        while True:
            before = time.monotonic()
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            late = now - before - _TICK_SECONDS
            tick += 1
            tasks = [
                task
                for cluster in self.clusters.values()
                for task in cluster.tasks.values()
                if task.state in (TaskState.READY, TaskState.HUNG)
            ]
            # A tick that comes late (a suspended machine, a starved agent) proves nothing.
            await asyncio.gather(
                *(
                    self._look_at(task, late > _TICK_SECONDS, tick + position)
                    for position, task in enumerate(tasks)
                )
            )
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
            limit = cluster.policy.time_limit
            open_for = time.monotonic() - cluster.opened
            # The kernel ends its cluster itself, and earlier, unless it is busy or frozen.
            if limit is not None and open_for > limit + _EXPIRY_GRACE_SECONDS:
                await self._end(cluster, f"the time limit of {limit:g} s is over")
            elif cluster.lease is not None and time.time() > cluster.lease:
                await self._end(cluster, "its lease is over")
        for key, session in list(self._sessions.items()):
            if session.is_over:
                del self._sessions[key]
                await self._end_owned(session, f"nobody came back for {session.grace:g} s")
        if self._stays and not self.clusters:
            here = any(session.away_since is None for session in self._sessions.values())
            if not here and time.monotonic() > self._idle_since:
                self._done.set()

    async def _look_at(self, task: Supervised, late: bool, tick: int) -> None:
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
        if stats is not None:
            measured["bytes_sent"] = stats["bytes_sent"]
            task.keep_connections(dict(stats["connections"]))
        if task.spec.gpus and tick % _GPU_EVERY_TICKS == 0:
            measured["gpu"] = await asyncio.to_thread(self._meter.read, task.spec.gpus)
        task.trim_log()
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


def main() -> None:
    """Be an agent: ``TFD_AGENT`` is its id, ``TFD_OWNER`` the pid of its parent, if it has one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    owner = int(os.environ["TFD_OWNER"]) if "TFD_OWNER" in os.environ else None
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if owner is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
            if os.getppid() != owner:
                return
    agent_id = os.environ[runtime.AGENT_VARIABLE]
    directory = Path(json.loads(os.environ["TFD_AGENT_DIR"]))

    async def run() -> None:
        # A probe of a hung task holds its thread for a second.
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(32, "tfd-agent"))
        await Agent(agent_id, directory, owner).run()
        # Everything has ended; the loop's own end would wait for a probe that asks the dead.
        os._exit(0)

    asyncio.run(run())
