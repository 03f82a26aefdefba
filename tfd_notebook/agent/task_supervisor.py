"""One task's life: started, probed, restarted on its own port, and given up with a reason."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfd_notebook.agent import gpu_discovery, memory
from tfd_notebook.agent.error_server import ErrorServer
from tfd_notebook.agent.processes import Process
from tfd_notebook.errors import StartTimeout, TfdError
from tfd_notebook.model.spec import SERVER_ROLES, Endpoint, Role, TaskSpec, TaskState
from tfd_notebook.net import ports, probe

if TYPE_CHECKING:
    from tfd_notebook.agent.cluster import AgentCluster

#: A task that has been ready for this long starts counting its restarts at zero again.
_STEADY_SECONDS = 60.0
_BACKOFF_SECONDS = (0.0, 0.5, 2.0, 5.0, 10.0)
_PROBE_SECONDS = 1.0
_INSPECT_SECONDS = 2.0
#: Seconds after which a life that goes on is cancelled again.
_CANCEL_SECONDS = 0.5
_LOG_LIMIT = 8_000_000
_LOG_KEPT = 1_000_000


class TaskSupervisor:
    """A task, its port, and whatever process serves it now.

    Parameters
    ----------
    cluster : HostedCluster
    spec : TaskSpec
        With ``port`` 0 a free port is taken. It is held until `close`.

    Raises
    ------
    PortInUse
    """

    def __init__(self, cluster: AgentCluster, spec: TaskSpec) -> None:
        self.spec = spec
        self.settings: dict[str, Any] = dict(spec.settings)
        self._cluster = cluster
        self._holder = ports.reserve_port(spec.port)
        self.port: int = self._holder.getsockname()[1]
        host = spec.host
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self.log = cluster.directory / f"{spec.name.replace(':', '-')}.log"
        self.state = TaskState.PLANNED
        self.process: Process | None = None
        self.restarts = 0
        self.open_iterations = 0
        self.connections = ports.PinnedConnections()
        self.silent_since: float | None = None
        self._prober = probe.Prober()
        self._deaths = 0
        #: Why the process was ended for what it holds; empty where it was not.
        self._condemned = ""
        #: The control groups that the process was last seen in.
        self._groups: tuple[memory.Group, ...] = ()
        self._asked = False
        self._wake = asyncio.Event()
        self.open_to = ""
        self.reason = ""
        self._tombstone: ErrorServer | None = None
        self._life: asyncio.Future[None] | None = None

    # What the agent asks for

    def start(self, settings: Mapping[str, Any]) -> None:
        """Begin the task's life."""
        self.settings.update(settings)
        if self._life is None:
            self._life = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """End the task for good and let go of its port."""
        await self._end()
        self._start_error_server(None)
        self._holder.close()
        self._enter(TaskState.STOPPED)

    def release(self) -> None:
        """Let go of the port of a task that was never started."""
        self._holder.close()

    async def retire(self) -> None:
        """End the task, but keep its port: the dispatcher goes on giving work to its address."""
        await self._end()
        if self.spec.role is Role.DATA_WORKER:
            self._start_error_server(
                f"[TFD302] {self.spec.name} has left the cluster", on_loss="warn"
            )
            if self.open_iterations:
                self._cluster.notice(
                    "warning",
                    f"{self.spec.name} left while {self.open_iterations} iteration(s) were open: "
                    "what it had prepared for them is not delivered",
                    self,
                    fix="iterate again for a whole epoch",
                )
        self._enter(TaskState.STOPPED)

    def reset(self, spec: TaskSpec) -> None:
        """Make a retired task one that can be started again, on its own port, as `spec` says."""
        self.spec = spec
        self._start_error_server(None)
        self._deaths = self.restarts = 0
        self.state = TaskState.PLANNED

    async def _end(self) -> None:
        life, self._life = self._life, None
        while life is not None and not life.done():
            # Before Python 3.12 wait_for() loses a cancellation that comes with its result.
            life.cancel()
            await asyncio.wait({life}, timeout=_CANCEL_SECONDS)
        await self._end_process()
        self.connections.release()

    async def restart(self, settings: Mapping[str, Any]) -> None:
        """Start a new process on the same port, also after the task has failed for good.

        The task is restarting, not ready any more, when this returns.
        """
        self.settings.update(settings)
        self._deaths = 0
        if self._life is None:
            return
        self._asked = True
        self.restarts += 1
        if self.process is not None:
            self.process.kill()
        self._enter(TaskState.RESTARTING, "requested")
        self._wake.set()

    def kill(self) -> int | None:
        """Kill the process as a crash would; return its pid."""
        if self.process is None or self.process.ended.done():
            return None
        self.process.kill()
        return self.process.pid

    def bury(self) -> None:
        """Answer for a task that was given up, so that who waits for it hears that it is gone."""
        if self.state is TaskState.FAILED and self._tombstone is None:
            self._start_error_server(
                f"[TFD302] {self.spec.name} of cluster {self._cluster.name!r} is gone"
            )

    async def install(self, blob: bytes, gone: list[str]) -> None:
        """Send the running process Python functions, and the tokens of those to forget.

        Later processes get what is needed then at their start.
        """
        if self.process is not None and self.state in (TaskState.READY, TaskState.HUNG):
            stale = await self.process.request(
                "install", 30.0, blob=base64.b64encode(blob).decode(), gone=gone
            )
            if stale:
                self._cluster.notice(
                    "warning",
                    f"{self.spec.name} still uses the earlier version of {', '.join(stale)}, "
                    "whose file has changed",
                    self,
                    fix=f"cluster.restart({self.spec.name!r})",
                )

    async def inspect(self) -> dict[str, list[str]] | None:
        """Ask the running process what it has loaded; return None if it does not answer."""
        if self.process is None or self.state is not TaskState.READY:
            return None
        try:
            found: dict[str, list[str]] = await self.process.request("inspect", _INSPECT_SECONDS)
        except TfdError:
            return None
        return found

    def hang(self, seconds: float, reason: str) -> None:
        """Count the task as hung, and restart it if the policy says so."""
        if self.state is TaskState.READY:
            self._enter(TaskState.HUNG, f"no answer for {seconds:.0f} s: {reason}")
            if self._cluster.policy.on_hang == "restart" and self.process is not None:
                self.process.kill()

    def limit_memory(self, megabytes: float) -> None:
        """End the process if it holds more than the administrator allows."""
        if self.process is not None:  # it may have been moved to another group
            self._groups = memory.groups(self.process.pid) or self._groups
        self._condemned = self._cluster.limits.too_much_memory(megabytes)
        if self._condemned and self.process is not None:
            self.process.kill()

    def keep_connections(self, descriptors: Mapping[int, int]) -> None:
        """Keep connections of the process from ending with it, where that helps its peers.

        Who computes with a ``tf.distribute.Server`` must see at once that it is gone.
        """
        if self.process is not None and self.spec.role not in SERVER_ROLES:
            self.connections.keep(self.process.pid, descriptors)

    def recovered(self) -> None:
        """Note a good probe."""
        self.silent_since = None
        if self.state is TaskState.HUNG:
            self._enter(TaskState.READY, "answers again")

    @property
    def kind(self) -> probe.Kind:
        """What a probe of the task should find."""
        if self.spec.role is Role.DISPATCHER:
            return "dispatcher"
        return "data_worker" if self.spec.role is Role.DATA_WORKER else "server"

    async def ask(self, address: str, expect: probe.Kind) -> probe.Probe:
        """Ask who is at `address` (this task's, or one that it depends on)."""
        return await asyncio.to_thread(
            self._prober.probe, address, timeout=_PROBE_SECONDS, expect=expect
        )

    # The life

    async def _run(self) -> None:
        while True:
            reason, final = await self._one_life_or_failure()
            if not self._asked:
                self._deaths += 1
                if final or self._deaths > self._cluster.policy.restarts:
                    times = f", {self._deaths} times in a row" if self._deaths > 1 else ""
                    with self._cluster.reported("reporting its end", self):
                        await self._mark_failed(f"{reason}{times}")
                    await self._wake.wait()  # for a restart that the user asks for
                else:
                    await self._pause(reason)
            self._asked = False
            self._wake.clear()
            self._start_error_server(None)

    async def _pause(self, reason: str) -> None:
        """Wait before the next start, or until a restart is requested."""
        self.restarts += 1
        self._enter(TaskState.RESTARTING, reason)
        pause = _BACKOFF_SECONDS[min(self._deaths, len(_BACKOFF_SECONDS)) - 1]
        if pause:
            self._wake.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause)

    async def _one_life_or_failure(self) -> tuple[str, bool]:
        """Run one process; an exception here ends it and is returned as the reason."""
        try:
            return await self._run_once()
        except Exception as error:
            traceback.print_exc()
            try:
                await self._end_process()
            except Exception:
                traceback.print_exc()
            return f"it could not be supervised: {type(error).__name__}: {error}", False

    async def _run_once(self) -> tuple[str, bool]:
        """Run one process to its end; return why it ended and whether trying again is useless."""
        if self.state is TaskState.PLANNED:
            self._enter(TaskState.STARTING)
        policy = self._cluster.policy
        self._groups = memory.groups()  # a task begins in those of its agent
        try:
            await asyncio.wait_for(self._bring_up(), policy.start_timeout)
        except asyncio.TimeoutError:
            await self._end_process()
            error = StartTimeout(f"not ready within {policy.start_timeout:g} s")
            return error.what, False
        except TfdError as error:
            died = await self._has_died()
            said = error.what if error.fix is None else f"{error.what}; next: {error.fix}"
            reason = self._why_ended() if died else said
            await self._end_process()
            # What fails with a reason of its own (a bad preload, a bad setting) fails again.
            return reason, not died
        ready = time.monotonic()
        assert self.process is not None
        # Whoever was connected to the process before finds this one at once.
        self.connections.release()
        if not self._asked:
            self._enter(TaskState.READY)
        await asyncio.shield(self.process.ended)
        reason = self._why_ended()
        await self._end_process()
        if time.monotonic() - ready > _STEADY_SECONDS:
            self._deaths = 0
        return reason, False

    async def _bring_up(self) -> None:
        cluster = self._cluster
        dispatcher = self.settings.get("dispatcher_address")
        if dispatcher:
            # TensorFlow's worker would wait for it for ever, in its constructor.
            await self._wait_until_alive(dispatcher, "dispatcher")
        self.process = await cluster.processes.start(
            {
                "name": self.spec.name,
                # No task takes a GPU's memory from another, or from the kernel.
                "environment": {**cluster.environment, **gpu_discovery.environment(self.spec.gpus)},
                "defaults": {"TF_FORCE_GPU_ALLOW_GROWTH": "true"} if self.spec.gpus else {},
                "directory": cluster.working_directory,
                "path": cluster.path,
                "preload": cluster.preload,
            },
            self.log,
        )
        # A restart requested before this process existed is done: this one is new.
        self._asked = False
        self._wake.clear()
        for _, blob in cluster.functions if self.spec.role is Role.DATA_WORKER else ():
            await self.process.request(
                "install", 60.0, blob=base64.b64encode(blob).decode(), gone=[]
            )
        started = await self.process.request(
            "start",
            cluster.policy.start_timeout,
            role=str(self.spec.role),
            port=self.port,
            host=self.spec.host,
            settings=self.settings,
            allow=cluster.allow,
        )
        self.open_to = started["open_to"]
        await self._wait_until_alive(self.address, self.kind)

    async def _wait_until_alive(self, address: str, kind: probe.Kind) -> None:
        """Return when `address` answers; the caller sets the limit."""
        pause = 0.005
        while not (await self.ask(address, kind)).alive:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.2)

    async def _mark_failed(self, reason: str) -> None:
        """Count the task as failed and keep its consumers from waiting for it for ever."""
        self.connections.release()
        self._enter(TaskState.FAILED, reason, log=last_lines(self.log, 5))
        name = f"{self.spec.name} of cluster {self._cluster.name!r}"
        fix = f"cluster.restart({self.spec.name!r}), then iterate again"
        if memory.is_reason(reason):
            fix = memory.FIX
        if self.spec.role is Role.DISPATCHER:
            self._start_error_server(f"[TFD306] {name} is gone: {reason}.\nNext: {fix}")
        elif self.spec.role is Role.DATA_WORKER:
            self._start_error_server(
                f"[TFD302] {name} is gone: {reason}. What it held of this epoch cannot be "
                f"delivered.\nNext: {fix}",
                on_loss=self._cluster.policy.on_loss,
            )

    def _start_error_server(self, message: str | None, on_loss: str = "raise") -> None:
        """Have a tombstone at the port that answers with `message`; None takes it away."""
        if self._tombstone is not None:
            self._tombstone.close()
            self._tombstone = None
        if message is not None:
            at = Endpoint.parse(self.address).host
            tombstone = ErrorServer(
                {self.port: message},
                dispatcher=self.settings.get("dispatcher_address"),
                on_loss=on_loss,
                workers={self.port: self.address},
                allow=None if at == "localhost" else self._cluster.allow,
            )
            with self._cluster.reported("starting its error server", self):
                tombstone.start()
                self._tombstone = tombstone

    async def _has_died(self) -> bool:
        """Whether the process ended without saying why."""
        if self.process is None or self.process.failed is not None:
            return False
        # Its channel may close a moment before its status comes.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.process.ended), 0.5)
            return True
        return False

    async def _end_process(self) -> None:
        process, self.process = self.process, None
        # A connection to the old process may be among those that are kept open.
        self._prober.close()
        if process is not None:
            process.kill()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.ended), 5.0)
            await process.close()

    def _why_ended(self) -> str:
        assert self.process is not None
        condemned, self._condemned = self._condemned, ""
        return condemned or why_ended(self.process.ended.result(), memory.reached(self._groups))

    def _enter(self, state: TaskState, reason: str = "", log: tuple[str, ...] = ()) -> None:
        self.state, self.reason = state, reason
        self.silent_since = None
        self._cluster.task_changed(self, log)


def why_ended(status: int, limit: str = "") -> str:
    """Return how a process ended, from the status that ``os.waitpid`` gave.

    Parameters
    ----------
    status : int
    limit : str
        The memory limit that was reached, as `memory.reached` returns it.
    """
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "unknown"
        extra = f": {limit}" if limit and number == signal.SIGKILL else ""
        return f"killed by signal {number} ({name}){extra}"
    return f"ended with exit status {os.waitstatus_to_exitcode(status)}"


def read_log(path: Path, size: int, offset: int | None = None) -> tuple[bytes, int]:
    """Read up to `size` bytes of a log, and return them with the offset to go on from.

    Without `offset` these are the last ones, from the start of a line.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if offset is not None and offset <= end:
            file.seek(offset)
            data = file.read(size)
            return data, offset + len(data)
        file.seek(max(0, end - size))
        data = file.read(size)
        return (data if end <= size else data.partition(b"\n")[2]), end
    return b"", 0


def trim_log(path: Path) -> None:
    """Keep a flood of output from filling the disk: about the last megabyte stays.

    What is written between the read and the truncation is lost.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size > _LOG_LIMIT:
            kept, _ = read_log(path, _LOG_KEPT)
            # Whoever writes there appends (O_APPEND), and so goes on at the new end.
            with path.open("r+b") as file:
                file.truncate(0)
            with path.open("ab") as file:
                file.write(b"[earlier output dropped]\n" + kept)


def last_lines(path: Path, count: int) -> tuple[str, ...]:
    """Return the last `count` lines of the file."""
    data, _ = read_log(path, 65536)
    return tuple(data.decode(errors="replace").splitlines()[-count:])
