"""Supervision of one task: start, probe, restart on the same port, and mark as failed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import psutil

from tfd_notebook.agent import memory
from tfd_notebook.agent.admin_policy import Limits
from tfd_notebook.agent.dataset_functions import Functions
from tfd_notebook.agent.error_server import ErrorServer
from tfd_notebook.agent.processes import Process
from tfd_notebook.errors import LaunchError, StartTimeout, TfdError, TimeLimit
from tfd_notebook.model.spec import SERVER_ROLES, Endpoint, Policy, Role, TaskSpec, TaskState
from tfd_notebook.model.stacks import TaskStacks
from tfd_notebook.net import ports, probe

#: A task that has been ready for this long starts counting its crashes at zero again.
_STEADY_SECONDS = 60.0
_BACKOFF_SECONDS = (0.0, 0.5, 2.0, 5.0, 10.0)
_PROBE_SECONDS = 1.0
#: The doctor leaves out tasks that do not answer, so the limit is longer than delays by load.
_INSPECT_SECONDS = 10.0
_ALLOW_SECONDS = 20.0
#: Seconds in which a task replies to an inspection, and in which it samples its threads for that.
_REPLY_SECONDS = 0.15
_SAMPLED_SECONDS = 0.05
#: A user waits for the reply, and tasks that do not answer have a row, too.
_STACKS_SECONDS = 2.0
_SUSPENDED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
#: Seconds after which the cancellation of the supervision is repeated.
_CANCEL_SECONDS = 0.5
#: Seconds of silence after which a ready task has a reason. A busy task is silent for a second.
_SILENT_SECONDS = 5.0
_SILENT = f"no reply for over {_SILENT_SECONDS:.0f} s"
_LOG_LIMIT = 8_000_000
_LOG_KEPT = 1_000_000


def _is_suspended(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in _SUSPENDED
    return False


def busy_share(working: float | None, seconds: float, stopped: bool) -> float | None:
    """Return the share of an inspection in which a task was busy, or None if it is unknown.

    A task counts as busy until a late reply: it had no core, or did not run.

    Parameters
    ----------
    working : float, optional
        Share of the samples in which one of its threads was busy.
    seconds : float
        Seconds from the request until the reply.
    stopped : bool
        Whether its process was suspended at the request. Later it could not measure that.
    """
    if working is None:
        return None
    if stopped:
        return 1.0
    late = max(0.0, seconds - _REPLY_SECONDS)
    return (late + working * _SAMPLED_SECONDS) / (late + _SAMPLED_SECONDS)


class TaskContext(Protocol):
    """The parts of a cluster that the supervision of its tasks uses."""

    name: str
    policy: Policy
    directory: Path
    allow: list[str]
    functions: Functions
    limits: Limits

    async def start_process(self, spec: TaskSpec, log: Path) -> Process: ...

    def task_changed(self, task: TaskSupervisor, log: tuple[str, ...]) -> None: ...

    def notice(
        self, severity: str, what: str, task: TaskSupervisor | None = None, fix: str | None = None
    ) -> None: ...

    def reported(
        self, operation: str, task: TaskSupervisor | None = None
    ) -> AbstractContextManager[None]: ...


class TaskSupervisor:
    """A task, its port, and the process that serves it now.

    Parameters
    ----------
    cluster : TaskContext
    spec : TaskSpec
        With ``port`` 0 a free port is reserved. It stays reserved until `stop`.
    prober : Prober, optional
        Probes the task and its dispatcher. Default: a new one.
    groups : GroupHistory, optional
        Samples the control groups of the process. Default: those of this host.

    Raises
    ------
    PortInUse
    """

    def __init__(
        self,
        cluster: TaskContext,
        spec: TaskSpec,
        prober: probe.Prober | None = None,
        groups: memory.GroupHistory | None = None,
    ) -> None:
        self.spec = spec
        self.settings: dict[str, Any] = dict(spec.settings)
        self.cluster = cluster
        self._reserved_socket = ports.reserve_port(spec.port)
        self.port: int = self._reserved_socket.getsockname()[1]
        self.address = str(Endpoint(spec.host, self.port))
        self.log = cluster.directory / f"{spec.name.replace(':', '-')}.log"
        self.state = TaskState.PLANNED
        self.process: Process | None = None
        self.restarts = 0
        self.open_iterations = 0
        #: The latest inspection by the agent, which a slow reply extends.
        self.inspection: asyncio.Future[None] | None = None
        #: Whether the latest inspection took long.
        self.replies_late = False
        self.connections = ports.PinnedConnections()
        self._silent_since: float | None = None
        self._prober = prober or probe.Prober()
        self._crashes = 0
        #: Reason for which the process was ended because of its memory; empty otherwise.
        self._memory_violation = ""
        self._groups = groups or memory.GroupHistory()
        self._restart_requested = False
        self._wake = asyncio.Event()
        self.open_to = ""
        self.reason = ""
        self._error_server: ErrorServer | None = None
        self._supervision: asyncio.Future[None] | None = None
        #: The tokens of the sets of functions that the process got while it started.
        self._installed: set[tuple[str, ...]] = set()

    # Requests of the agent

    def start(self, settings: Mapping[str, Any]) -> None:
        """Start to supervise the task."""
        self.settings.update(settings)
        if self._supervision is None:
            self._supervision = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Stop the task and release its port."""
        await self._end()
        self._start_error_server(None)
        self._reserved_socket.close()
        self._enter(TaskState.STOPPED)

    def release(self) -> None:
        """Release the port of a task that was never started."""
        self._reserved_socket.close()

    async def remove(self) -> None:
        """Stop the task, but reserve its port, since the dispatcher still assigns tasks to it."""
        await self._end()
        if self.spec.role is Role.DATA_WORKER:
            self._start_error_server(
                f"[TFD302] {self.spec.name} has left the cluster", on_loss="warn"
            )
            if self.open_iterations:
                self.cluster.notice(
                    "warning",
                    f"{self.spec.name} left with {self.open_iterations} open iteration(s): the "
                    "elements that it had prepared for them are not delivered",
                    self,
                    fix="iterate again for a complete epoch",
                )
        self._enter(TaskState.STOPPED)

    def reset(self, spec: TaskSpec) -> None:
        """Prepare a removed task for another start on its port, with this `spec`."""
        self.spec = spec
        self._start_error_server(None)
        self._crashes = self.restarts = 0
        self.state = TaskState.PLANNED

    async def _end(self) -> None:
        supervision, self._supervision = self._supervision, None
        while supervision is not None and not supervision.done():
            # Before Python 3.12, wait_for() loses a cancellation that coincides with its result.
            supervision.cancel()
            await asyncio.wait({supervision}, timeout=_CANCEL_SECONDS)
        await self._end_process()
        self.connections.release()

    async def restart(self, settings: Mapping[str, Any]) -> None:
        """Start a new process on the same port, even after the task has failed.

        When this returns, the state of the task is restarting.
        """
        self.settings.update(settings)
        self._crashes = 0
        if self._supervision is None:
            return
        self._restart_requested = True
        self.restarts += 1
        if self.process is not None:
            self.process.kill()
        self._enter(TaskState.RESTARTING, "requested")
        self._wake.set()

    def kill(self) -> int | None:
        """Kill the process, as a crash would; return its pid."""
        if self.process is None or self.process.ended.done():
            return None
        self.process.kill()
        return self.process.pid

    def serve_error(self) -> None:
        """Start an error server on the port of a failed task."""
        if self.state is TaskState.FAILED and self._error_server is None:
            self._start_error_server(
                f"[TFD302] {self.spec.name} of cluster {self.cluster.name!r} has failed"
            )

    async def install(self, blob: bytes, removed: list[str]) -> None:
        """Send Python functions to the running process, and the tokens of functions to remove.

        Later processes get the functions in use at their start.
        """
        if self.process is not None and self.state in (TaskState.READY, TaskState.HUNG):
            stale = await self.process.request("install", 30.0, blob=blob, removed=removed)
            if stale:
                self.cluster.notice(
                    "warning",
                    f"{self.spec.name} still uses the old version of {', '.join(stale)}, "
                    "whose file has changed",
                    self,
                    fix=f"cluster.restart({self.spec.name!r})",
                )

    async def allow(self) -> None:
        """Accept connections to the running process from networks that the cluster has added.

        Later processes accept them from their start.
        """
        process = self.process
        if process is None or process.ended.done():
            return
        try:
            open_to = await process.request(
                "allow", _ALLOW_SECONDS, host=self.spec.host, allow=self.cluster.allow
            )
        except TfdError:
            if process is self.process and not process.ended.done():
                raise
            return
        if open_to:
            self.open_to = open_to
            self.cluster.task_changed(self, ())

    async def inspect(self) -> dict[str, list[str]] | None:
        """Return the stale modules and loaded ops of the running process, or None without reply."""
        if self.process is None or self.state is not TaskState.READY:
            return None
        if _is_suspended(self.process.pid):
            return None
        try:
            reply: dict[str, list[str]] = await self.process.request("inspect", _INSPECT_SECONDS)
        except TfdError:
            return None
        return reply

    async def stacks(self) -> TaskStacks:
        """Return the Python stacks of the process's threads, or the reason without a reply."""
        process = self.process
        if process is None or process.ended.done():
            return {"note": f"no process: the task is {self.state}", "threads": []}
        try:
            threads = await process.request("stacks", _STACKS_SECONDS)
        except TimeLimit:
            return {"note": self._why_silent(process.pid), "threads": []}
        except TfdError as error:
            return {"note": error.what, "threads": []}
        return {"note": "", "threads": threads}

    def _why_silent(self, pid: int) -> str:
        silent = f"no reply within {_STACKS_SECONDS:g} s"
        if _is_suspended(pid):
            return f"{silent}: its process is suspended"
        if self.state is TaskState.STARTING:
            return f"{silent}: it is starting"
        return f"{silent}: a thread holds the GIL, or another request runs"

    def record_probe(self, silence: str, late: bool = False) -> None:
        """Mark the task as hung after too long a silence, and as ready when it responds again.

        Long before that, the reason of the ready task is its silence.

        Parameters
        ----------
        silence : str
            The reason if the task did not respond; empty otherwise.
        late : bool
            Whether this process was delayed, so that the silence proves nothing.
        """
        now = asyncio.get_running_loop().time()
        if not silence:
            self._silent_since = None
            if self.state is TaskState.HUNG:
                self._enter(TaskState.READY, "responds again")
            elif self.reason.startswith(_SILENT):
                self._explain("")
        elif late or self._silent_since is None:
            self._silent_since = now
        elif self.state is TaskState.READY:
            seconds = now - self._silent_since
            if seconds > self.cluster.policy.hang_seconds:
                self._enter(TaskState.HUNG, f"no reply for {seconds:.0f} s: {silence}")
                if self.cluster.policy.on_hang == "restart" and self.process is not None:
                    self.process.kill()
            elif seconds > _SILENT_SECONDS and not self.reason.startswith(_SILENT):
                self._explain(f"{_SILENT}: {silence}")

    def limit_memory(self, megabytes: float) -> None:
        """End the process if it uses more memory than the administrator allows."""
        if self.process is not None:
            self._groups.sample(self.process.pid)
        self._memory_violation = self.cluster.limits.too_much_memory(megabytes)
        if self._memory_violation and self.process is not None:
            self.process.kill()

    def keep_connections(self, descriptors: Mapping[int, int]) -> None:
        """Keep the process's connections open beyond its end, if its peers benefit.

        Peers of a ``tf.distribute.Server`` must notice its end at once.
        """
        if self.process is not None and self.spec.role not in SERVER_ROLES:
            self.connections.keep(self.process.pid, descriptors)

    @property
    def kind(self) -> probe.Kind:
        """The kind of server that a probe of the task must find."""
        if self.spec.role is Role.DISPATCHER:
            return "dispatcher"
        return "data_worker" if self.spec.role is Role.DATA_WORKER else "server"

    async def probe_address(self, address: str, expect: probe.Kind) -> probe.Probe:
        """Probe `address`, which belongs to this task or one that it depends on."""
        return await asyncio.to_thread(
            self._prober.probe, address, timeout=_PROBE_SECONDS, expect=expect
        )

    # Supervision

    async def _run(self) -> None:
        while True:
            reason, final = await self._run_once_safely()
            if not self._restart_requested:
                self._crashes += 1
                if final or self._crashes > self.cluster.policy.restarts:
                    times = f", {self._crashes} times in a row" if self._crashes > 1 else ""
                    with self.cluster.reported(f"reporting the end of {self.spec.name}", self):
                        await self._mark_failed(f"{reason}{times}")
                    await self._wake.wait()  # until the user requests a restart
                else:
                    await self._back_off(reason)
            self._restart_requested = False
            self._wake.clear()
            self._start_error_server(None)

    async def _back_off(self, reason: str) -> None:
        """Wait before the next start, or until a restart is requested."""
        self.restarts += 1
        self._enter(TaskState.RESTARTING, reason)
        delay = _BACKOFF_SECONDS[min(self._crashes, len(_BACKOFF_SECONDS)) - 1]
        if delay:
            self._wake.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), delay)

    async def _run_once_safely(self) -> tuple[str, bool]:
        """Run one process; an exception in the supervision ends it and becomes the reason."""
        try:
            return await self._run_once()
        except Exception as error:
            traceback.print_exc()
            try:
                await self._end_process()
            except Exception:
                traceback.print_exc()
            return f"its supervision failed: {type(error).__name__}: {error}", False

    async def _run_once(self) -> tuple[str, bool]:
        """Run one process to its end; return the reason, and True if a retry cannot succeed."""
        if self.state is TaskState.PLANNED:
            self._enter(TaskState.STARTING)
        policy = self.cluster.policy
        self._groups.start()
        try:
            await asyncio.wait_for(self._start_process(), policy.start_timeout)
            # `install` skips a task that starts. The task is ready without a further await.
            await self._install_functions()
        except asyncio.TimeoutError:
            await self._end_process()
            error = StartTimeout(f"not ready within {policy.start_timeout:g} s")
            return error.what, False
        except TfdError as error:
            died = await self._has_died()
            reason = self._why_ended() if died else error.in_one_line
            await self._end_process()
            # An error that the task reports (an invalid preload or setting) would occur again.
            return reason, not died
        ready = asyncio.get_running_loop().time()
        assert self.process is not None
        # Peers of the previous process then reconnect to this one at once.
        self.connections.release()
        if not self._restart_requested:
            self._enter(TaskState.READY)
        await asyncio.shield(self.process.ended)
        reason = self._why_ended()
        await self._end_process()
        if asyncio.get_running_loop().time() - ready > _STEADY_SECONDS:
            self._crashes = 0
        return reason, False

    async def _start_process(self) -> None:
        cluster = self.cluster
        dispatcher = self.settings.get("dispatcher_address")
        if dispatcher:
            # TensorFlow's worker would wait for it in its constructor, without a timeout.
            await self._wait_until_alive(dispatcher, "dispatcher")
        self.process = await cluster.start_process(self.spec, self.log)
        # The new process satisfies a restart that was requested before it existed.
        self._restart_requested = False
        self._memory_violation = ""
        self._wake.clear()
        self._installed.clear()
        await self._install_functions()
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

    async def _install_functions(self) -> None:
        """Send the Python functions that the process of a data worker does not have yet."""
        if self.spec.role is not Role.DATA_WORKER or self.process is None:
            return
        while missing := [f for f in self.cluster.functions if f[0] not in self._installed]:
            for tokens, blob in missing:
                await self.process.request("install", 60.0, blob=blob, removed=[])
                self._installed.add(tokens)

    async def _wait_until_alive(self, address: str, kind: probe.Kind) -> None:
        """Return when `address` responds; raise LaunchError if the process ends before.

        The caller sets the timeout.
        """
        delay = 0.005
        while not (await self.probe_address(address, kind)).alive:
            if self.process is None:
                await asyncio.sleep(delay)
            elif (await asyncio.wait({self.process.ended}, timeout=delay))[0]:
                raise LaunchError("the process ended")
            delay = min(delay * 1.5, 0.2)

    async def _mark_failed(self, reason: str) -> None:
        """Mark the task as failed and serve an error on its port, so that consumers fail fast."""
        self.connections.release()
        self._enter(TaskState.FAILED, reason, log=last_lines(self.log, 5))
        name = f"{self.spec.name} of cluster {self.cluster.name!r}"
        fix = f"cluster.restart({self.spec.name!r}), then iterate again"
        if memory.is_reason(reason):
            fix = memory.FIX
        if self.spec.role is Role.DISPATCHER:
            self._start_error_server(f"[TFD306] {name} has failed: {reason}.\nNext: {fix}")
        elif self.spec.role is Role.DATA_WORKER:
            self._start_error_server(
                f"[TFD302] {name} has failed: {reason}. Its share of this epoch cannot be "
                f"delivered.\nNext: {fix}",
                on_loss=self.cluster.policy.on_loss,
            )

    def _start_error_server(self, message: str | None, on_loss: str = "raise") -> None:
        """Start an error server on the task's port that returns `message`; None stops it."""
        if self._error_server is not None:
            self._error_server.close()
            self._error_server = None
        if message is not None:
            host = Endpoint.parse(self.address).host
            error_server = ErrorServer(
                self.port,
                message,
                dispatcher=self.settings.get("dispatcher_address"),
                on_loss=on_loss,
                worker=self.address,
                allow=None if host == "localhost" else self.cluster.allow,
            )
            with self.cluster.reported(f"starting the error server of {self.spec.name}", self):
                error_server.start()
                self._error_server = error_server

    async def _has_died(self) -> bool:
        """Return True if the process ended without reporting an error."""
        if self.process is None or self.process.failed is not None:
            return False
        # The channel may close a moment before the status arrives.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.process.ended), 0.5)
            return True
        return False

    async def _end_process(self) -> None:
        process, self.process = self.process, None
        # One of the prober's open connections may lead to the old process.
        self._prober.close()
        if process is not None:
            process.kill()
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.shield(process.ended), 5.0)
                await process.close()
            except asyncio.CancelledError:
                self.process = process  # `_end`, which cancels this, waits for its end
                raise

    def _why_ended(self) -> str:
        assert self.process is not None
        violation, self._memory_violation = self._memory_violation, ""
        return violation or why_ended(self.process.ended.result(), self._groups.reached())

    def _enter(self, state: TaskState, reason: str = "", log: tuple[str, ...] = ()) -> None:
        self.state, self.reason = state, reason
        self._silent_since = None
        self.cluster.task_changed(self, log)

    def _explain(self, reason: str) -> None:
        """Publish another reason of the same state."""
        self.reason = reason
        self.cluster.task_changed(self, ())


def why_ended(status: int, limit: str = "") -> str:
    """Return how a process ended, given its status from ``os.waitpid``.

    Parameters
    ----------
    status : int
    limit : str
        The memory limit that was reached, as `memory.GroupHistory.reached` returns it.
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
    """Return up to `size` bytes of a log, and the offset to continue from.

    Without `offset` these are the last bytes, from the start of a line.
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
    """Limit the size of a log: about the last megabyte stays.

    Output written between the last read and the truncation is lost.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size > _LOG_LIMIT:
            # Linux locks a file to write and to change its times, so this waits for a long write.
            os.utime(path)
            kept, end = read_log(path, _LOG_KEPT)
            more, _ = read_log(path, _LOG_LIMIT, end)
            kept = (kept + more)[-_LOG_KEPT:]
            # Writers append (O_APPEND), so they continue at the new end.
            with path.open("r+b") as file:
                file.truncate(0)
            with path.open("ab") as file:
                file.write(b"[earlier output dropped]\n" + kept)


def last_lines(path: Path, count: int) -> tuple[str, ...]:
    """Return the last `count` lines of the file."""
    data, _ = read_log(path, 65536)
    return tuple(data.decode(errors="replace").splitlines()[-count:])
