"""The agent: one process per host that starts, watches, restarts and ends tasks.

It reads requests from its standard input and writes replies and events to its standard output
(`tfd_notebook.launch.protocol`). When the input ends, or its parent does, everything it started
ends. It runs in its own session, so that an interrupt of the notebook does not reach it, and it
acts by policy on its own while the kernel is busy in C code.
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
from tfd_notebook.errors import StateError, TfdError, TimeLimit, UnknownName
from tfd_notebook.launch import processes, protocol, runtime
from tfd_notebook.launch.supervise import Supervised, read_log
from tfd_notebook.spec import STOP_ORDER, Policy, Role, TaskSpec, TaskState

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_SECONDS = 1.0
_PSS_EVERY_TICKS = 10
_GPU_EVERY_TICKS = 5
_EXPIRY_GRACE_SECONDS = 5.0


class HostedCluster:
    """A cluster's tasks on this host."""

    def __init__(self, agent: Agent, name: str, opened: dict[str, Any]) -> None:
        self.name = name
        self.policy = Policy(**opened["policy"])
        self.environment: dict[str, str] = opened["environment"]
        self.working_directory: str = opened["directory"]
        self.path: list[str] = opened["path"]
        self.preload: list[str] = opened["preload"]
        self.allow: list[str] = opened["allow"]
        self.functions: list[bytes] = []
        self.tasks: dict[str, Supervised] = {}
        self.retired: dict[str, Supervised] = {}
        self.processes = agent.processes
        self.opened = time.monotonic()
        self.directory = agent.directory / name
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._agent = agent

    def task(self, name: str) -> Supervised:
        if name not in self.tasks:
            raise UnknownName(
                f"cluster {self.name!r} has no task {name!r}",
                fix=f"its tasks are {', '.join(self.tasks) or 'none'}",
            )
        return self.tasks[name]

    def task_changed(
        self, task: Supervised, reason: str, open_to: str, log: tuple[str, ...]
    ) -> None:
        self._agent.tell(
            {
                "event": "task",
                "cluster": self.name,
                "task": task.spec.name,
                "state": str(task.state),
                "reason": reason,
                "address": task.address,
                "pid": task.process.pid if task.process else None,
                "restarts": task.restarts,
                "open_to": open_to if task.process else "",
                "log": list(log),
            }
        )
        self._agent.write_state()

    def notice(
        self, severity: str, what: str, task: Supervised | None = None, fix: str | None = None
    ) -> None:
        self._agent.tell(
            {
                "event": "notice",
                "cluster": self.name,
                "severity": severity,
                "what": what,
                "task": task.spec.name if task else None,
                "fix": fix,
            }
        )

    async def stop(self) -> None:
        """End all tasks, those first that use others."""
        tasks = (*self.tasks.values(), *self.retired.values())
        for roles in STOP_ORDER:
            ending = [task for task in tasks if task.spec.role in roles]
            await asyncio.gather(*(task.stop() for task in ending))
        self.tasks.clear()
        self.retired.clear()
        runtime.remove(self.directory)


class Agent:
    """Answers requests until its input ends."""

    def __init__(self, agent_id: str, directory: Path, owner: int) -> None:
        self.id = agent_id
        self.directory = directory
        self.owner = owner
        self.host = socket.gethostname().replace(" ", "_") or "localhost"
        self.clusters: dict[str, HostedCluster] = {}
        self.processes = processes.Processes(agent_id, directory)
        self._seq = 0
        self._writer: asyncio.StreamWriter | None = None
        self._measured: dict[int, psutil.Process] = {}
        self._meter = gpus.Meter()
        self._idle_since = time.monotonic()
        self._done = asyncio.Event()

    async def run(self) -> None:
        """Serve until the input ends or a signal comes, then end everything."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._done.set)
        reader = asyncio.StreamReader(limit=2**28)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        transport, flow = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, sys.stdout
        )
        self._writer = asyncio.StreamWriter(transport, flow, None, loop)
        self.write_state()
        working = [
            asyncio.ensure_future(self._read(reader)),
            asyncio.ensure_future(self._watch()),
            asyncio.ensure_future(self._done.wait()),
        ]
        self.tell({"event": "hello", "version": protocol.VERSION, "pid": os.getpid()})
        await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        for work in working:
            if work.done() and not work.cancelled() and (error := work.exception()):
                traceback.print_exception(error)
            work.cancel()
        stopping = asyncio.gather(
            *(cluster.stop() for cluster in self.clusters.values()), return_exceptions=True
        )
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stopping, 5.0)
        self.processes.close_server()
        runtime.remove(self.directory)
        if os.getppid() != self.owner:
            # It was killed, and could not take its socket away itself.
            runtime.control_socket(self.owner).unlink(missing_ok=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        pending: set[asyncio.Future[None]] = set()
        while line := await reader.readline():
            frame = protocol.decode(line)
            if frame is not None:
                answering = asyncio.ensure_future(self._answer(frame.body))
                pending.add(answering)
                answering.add_done_callback(pending.discard)

    async def _answer(self, body: dict[str, Any]) -> None:
        try:
            handler = getattr(self, f"do_{body['do']}")
            value = await handler(**body.get("arguments", {}))
            self.tell({"re": body["id"], "ok": True, "value": value})
        except Exception as error:
            if not isinstance(error, TfdError):
                traceback.print_exc()
            self.tell({"re": body["id"], "ok": False, "error": protocol.pack_error(error)})

    def tell(self, body: dict[str, Any]) -> None:
        """Send a reply or an event; a measurement nobody fetches is dropped."""
        if self._writer is None or self._writer.is_closing():
            return
        backlog = self._writer.transport.get_write_buffer_size()
        if body.get("event") == "measure" and backlog > 1_000_000:
            return
        self._seq += 1
        self._writer.write(protocol.encode(protocol.Frame(self.host, self.id, self._seq, body)))

    def write_state(self) -> None:
        """Keep the file by which leftovers can be told from strangers."""
        state = {
            "agent": self.id,
            "pid": os.getpid(),
            "owner_pid": self.owner,
            "owner_start": runtime.process_start(self.owner),
            "clusters": list(self.clusters),
        }
        with contextlib.suppress(OSError):
            runtime.write_state(self.directory, state)

    # Requests

    async def do_preload(self, environment: dict[str, str], path: list[str]) -> list[str]:
        return await self.processes.preload(environment, path)

    async def do_open(self, cluster: str, **opened: Any) -> str:
        if cluster in self.clusters:
            raise StateError(f"this agent already hosts a cluster {cluster!r}")
        hosted = self.clusters[cluster] = HostedCluster(self, cluster, opened)
        self.write_state()
        return str(hosted.directory)

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

    async def do_close(self, cluster: str) -> None:
        hosted = self._cluster(cluster)
        try:
            await hosted.stop()
        finally:
            self.clusters.pop(cluster, None)
            self._idle_since = time.monotonic()
            self.write_state()

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
            for cluster in list(self.clusters.values()):
                limit = cluster.policy.time_limit
                # The kernel ends its cluster itself, and earlier, unless it is busy or frozen.
                if limit is not None and now - cluster.opened > limit + _EXPIRY_GRACE_SECONDS:
                    cluster.notice("warning", f"the time limit of {limit:g} s is over")
                    await cluster.stop()
            idle = not self.clusters and now - self._idle_since > processes.IDLE_SECONDS
            if idle:
                self.processes.close_server()

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
        self.tell(
            {
                "event": "measure",
                "cluster": task._cluster.name,
                "task": task.spec.name,
                **measured,
            }
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
    """Be an agent: ``TFD_AGENT`` is its id, ``TFD_OWNER`` the pid of its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = int(os.environ["TFD_OWNER"])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # Besides the end of input, which a child of the kernel that inherited the pipe would hide.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
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
