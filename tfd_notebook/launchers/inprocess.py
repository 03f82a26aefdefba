"""``launcher="inprocess"``: tasks run in the calling process, next to their consumer.

Start and data transfer cost least here. A task cannot be killed, restarted or measured separately
from the kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from tfd_notebook.agent import stacks, tf_servers
from tfd_notebook.agent.error_server import ErrorServer
from tfd_notebook.errors import AgentLost, StateError, TfdError, Unsupported, unknown_task
from tfd_notebook.launchers.base import ALL_ROLES, Launcher, OnEvent, TaskHost, forwarded
from tfd_notebook.launchers.local import Local
from tfd_notebook.model.events import Event, Notice, TaskChanged, TaskMeasured, TasksLost
from tfd_notebook.model.spec import (
    SERVER_ROLES,
    STOP_ORDER,
    ClusterConfig,
    Endpoint,
    Role,
    TaskSpec,
    TaskState,
)
from tfd_notebook.model.stacks import TaskStacks
from tfd_notebook.net import ports, runtime_dir

_STOP_SECONDS = 3.0

#: Fewer bytes than these are heartbeats: consumers in this process read batches from memory.
_HEARTBEAT_BYTES = 1 << 16


class InProcess(Launcher):
    """Servers in the calling process."""

    name: ClassVar[str] = "inprocess"
    summary: ClassVar[str] = (
        "in this kernel: cheapest transfer, but tasks are not isolated and cannot be killed"
    )
    roles: ClassVar[frozenset[Role]] = ALL_ROLES
    in_process: ClassVar[bool] = True

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[TaskHost, ...]:
        count = sum(config.counts.get(role, 0) for role in SERVER_ROLES)
        tf_servers.check_room(count)
        if tf_servers.unstoppable() and count:
            on_event(
                Notice(
                    "warning",
                    f"{tf_servers.unstoppable()} servers of earlier clusters still run in this "
                    "process, with about 40 MB and 85 threads each: TensorFlow cannot stop them",
                    fix='restart the kernel to end them; launcher="local" does not have this limit',
                )
            )
        return (InProcessTaskHost(config, on_event),)


@dataclass
class _InProcessTask:
    """A task of this process."""

    spec: TaskSpec
    settings: dict[str, Any]
    reserved_socket: socket.socket
    port: int
    address: str
    server: tf_servers.Server | None = None
    restarts: int = field(default=0)
    error_server: ErrorServer | None = None

    @classmethod
    def reserve(cls, spec: TaskSpec) -> _InProcessTask:
        """Reserve a port for a task."""
        reserved_socket = ports.reserve_port(spec.port)
        port = reserved_socket.getsockname()[1]
        return cls(spec, dict(spec.settings), reserved_socket, port, str(Endpoint(spec.host, port)))

    @property
    def role(self) -> Role:
        return self.spec.role

    def close(self) -> None:
        """Close the error server and release the port."""
        if self.error_server is not None:
            self.error_server.close()
            self.error_server = None
        self.reserved_socket.close()


class InProcessTaskHost(TaskHost):
    """The calling process as a host."""

    host = "localhost"

    def __init__(self, config: ClusterConfig, on_event: OnEvent) -> None:
        self._config = config
        self._cluster = config.name
        self._allow = config.allow
        self._on_event = on_event
        self._tasks: dict[str, _InProcessTask] = {}
        #: Removed data workers, by name: the dispatcher still assigns tasks to their addresses.
        #: A name occurs several times if an earlier worker of that name has not stopped yet.
        self._removed: list[tuple[str, _InProcessTask]] = []
        #: Host of the processes of `Cluster.run`. None before the first run.
        self._rank_host: TaskHost | None = None
        self._lock = threading.RLock()
        self._closing = threading.Event()
        # `tfd sweep` removes it if this process, which locks it, ends without `close`.
        self._directory, self._directory_lock = runtime_dir.new_agent_dir(uuid.uuid4().hex[:12])
        self.directory = str(self._directory)
        # Last: only `close` ends the thread.
        self._measuring = threading.Thread(
            target=self._measure, name=f"tfd-inprocess-{config.name}", daemon=True
        )
        self._measuring.start()

    def close(self, timeout: float = 10.0) -> None:
        self._closing.set()
        with self._lock:
            in_stop_order = [[n for n, t in self._tasks.items() if t.role in r] for r in STOP_ORDER]
            for name in itertools.chain(*in_stop_order):
                with contextlib.suppress(TfdError):
                    self.stop([name])
            for _, task in self._removed:
                task.close()
            self._removed.clear()
            ranks, self._rank_host = self._rank_host, None
        if ranks is not None:
            ranks.close(timeout)
        self._measuring.join(timeout)
        runtime_dir.remove(self._directory)
        self._directory_lock.close()

    def detach(self) -> None:
        """Do nothing: the tasks cannot outlive this process."""

    def lease(self, seconds: float, renew: bool = False, *, timeout: float = 30.0) -> float:
        raise Unsupported(
            "tasks in this process cannot outlive it", fix='start them with launcher="local"'
        )

    def reserve_ports(self, tasks: Sequence[TaskSpec], *, timeout: float = 30.0) -> dict[str, str]:
        with self._lock:
            for spec in tasks:
                removed = self._take_removed_task(spec.name)
                self._tasks[spec.name] = removed or _InProcessTask.reserve(spec)
            return {spec.name: self._tasks[spec.name].address for spec in tasks}

    def _take_removed_task(self, name: str) -> _InProcessTask | None:
        """Return the removed task with this name, whose error server is closed, or None."""
        for index, (removed_name, task) in enumerate(self._removed):
            if removed_name == name and task.error_server is not None:
                task.error_server.close()
                task.error_server = None
                del self._removed[index]
                return task
        return None

    def start(self, tasks: Mapping[str, Mapping[str, Any]], *, timeout: float = 30.0) -> None:
        with self._lock:
            for name, settings in tasks.items():
                task = self._task(name)
                task.settings.update(settings)
                if task.role in SERVER_ROLES:
                    # The GPUs belong to the kernel. All servers of a process share the thread pool
                    # of the first server. A worker waits forever if its ps finds no free thread.
                    task.settings.update(gpus=False, threads=tf_servers.MAX_UNSTOPPABLE + 1)
                self._serve(name, task)

    def _serve(self, name: str, task: _InProcessTask) -> None:
        self._publish(name, task, TaskState.STARTING)
        host = Endpoint.parse(task.address).host
        server, task.server = tf_servers.Server(task.role, task.port), None
        try:
            task.server = server.start(task.settings, self._allow, host)
        except TfdError as error:
            self._publish(name, task, TaskState.FAILED, error.in_one_line)
        else:
            self._publish(name, task, TaskState.READY)

    def stop(self, tasks: Sequence[str], *, timeout: float = 30.0) -> None:
        with self._lock:
            for name in tasks:
                self._stop(name)

    def _stop(self, name: str) -> None:
        task = self._task(name)
        server, task.server = task.server, None
        stopped = server is None or server.stop(_STOP_SECONDS)
        reason = "" if stopped or server is None else server.why_not_stopped
        del self._tasks[name]
        if task.role is Role.DATA_WORKER and not self._closing.is_set():
            self._removed.append((name, task))
            if stopped:
                self._start_error_server(name, task)
            else:
                threading.Thread(
                    target=self._start_error_server_later,
                    args=(name, task, server),
                    name="tfd-inprocess-stop",
                    daemon=True,
                ).start()
        else:
            task.close()
        self._publish(name, task, TaskState.STOPPED, reason)

    def _start_error_server(self, name: str, task: _InProcessTask) -> None:
        """Serve an error on the port of a removed data worker."""
        error_server = ErrorServer(
            task.port,
            f"[TFD302] {name} has left the cluster",
            dispatcher=task.settings.get("dispatcher_address"),
            on_loss="warn",
            in_process=True,
            workers_remain=any(other.role is Role.DATA_WORKER for other in self._tasks.values()),
            worker=task.address,
        )
        with contextlib.suppress(TfdError):
            error_server.start()
            task.error_server = error_server

    def _start_error_server_later(
        self, name: str, task: _InProcessTask, server: tf_servers.Server
    ) -> None:
        while not server.stop(_STOP_SECONDS):
            if self._closing.is_set() or server.unstoppable:
                return
        with self._lock:
            if not self._closing.is_set():
                self._start_error_server(name, task)

    def restart(self, task: str, settings: Mapping[str, Any], *, timeout: float = 30.0) -> None:
        with self._lock:
            in_process = self._task(task)
            if in_process.server is not None and in_process.server.unstoppable:
                raise StateError(
                    f"{task} cannot be restarted in this process: "
                    f"{in_process.server.why_not_stopped}",
                    task=task,
                    fix='restart the kernel, or use launcher="local"',
                )
            in_process.settings.update(settings)
            in_process.restarts += 1
            self._publish(task, in_process, TaskState.RESTARTING, "requested")
            if in_process.server is not None and not in_process.server.stop(timeout):
                why = f"its server did not stop within {timeout:g} s"
                self._publish(task, in_process, TaskState.FAILED, why)
                raise StateError(
                    f"restarting {task} failed: {why}",
                    task=task,
                    fix="stop the stream or leave the loop that reads from it, and try again; "
                    "TensorFlow's autotuning thread can delay the stop by up to 60 s",
                )
            self._serve(task, in_process)

    def kill(self, task: str, *, timeout: float = 30.0) -> int | None:
        self._task(task)
        raise StateError(
            "a task in this process cannot be killed without the kernel",
            task=task,
            fix='use launcher="local" to test failures',
        )

    def install(
        self,
        functions: bytes,
        tokens: Sequence[str],
        removed: Sequence[str],
        *,
        timeout: float = 60.0,
    ) -> None:
        """Do nothing: the Python functions are already in this process."""

    def stacks(self, tasks: Sequence[str], *, timeout: float = 30.0) -> dict[str, TaskStacks]:
        """Return the threads of this process that run Python functions of datasets.

        They are those of ``kernel``: its tasks share the threads.
        """
        threads = stacks.threads(pipelines_only=True)
        note = "" if threads else "no Python function of a dataset runs in the kernel"
        return {"kernel": {"note": note, "threads": threads}}

    def logs(
        self, task: str, size: int, offset: int | None = None, *, timeout: float = 30.0
    ) -> tuple[str, int]:
        self._task(task)
        text = "Tasks in this process write to the output of the kernel.\n"
        return text if not offset else "", len(text)

    def open_ranks(self, tasks: Sequence[str], *, timeout: float = 30.0) -> dict[str, str]:
        with self._lock:
            # The agent takes the name and the log of each process from a task. These tasks never
            # start, and have no GPUs.
            specs = [replace(self._task(name).spec, port=0, settings={}, gpus=()) for name in tasks]
            host = self._rank_host
        if host is None:
            (host,) = Local().connect(self._config, self._on_rank_event)
        try:
            with self._lock:
                if self._closing.is_set():
                    raise StateError(f"cluster {self._cluster!r} was stopped")
                self._rank_host = host
            host.reserve_ports(specs, timeout=timeout)
            return host.open_ranks(tasks, timeout=timeout)
        except BaseException:
            self._rank_host = None
            host.close()
            raise

    run_rank = forwarded(TaskHost.run_rank)
    rank_output = forwarded(TaskHost.rank_output)

    def request(self, method: str, timeout: float, **arguments: Any) -> Any:
        """Pass on the call of a method for ranks to the host of their processes."""
        return getattr(self._ranks, method)(timeout=timeout, **arguments)

    def close_ranks(self, tasks: Sequence[str], *, timeout: float = 30.0) -> None:
        if (host := self._rank_host) is not None:  # None after its agent has ended
            try:
                host.close_ranks(tasks, timeout=timeout)
            finally:
                host.stop(tasks, timeout=timeout)

    @property
    def _ranks(self) -> TaskHost:
        if (host := self._rank_host) is None:
            raise AgentLost("the agent of this kernel has ended", fix="run the function again")
        return host

    def _on_rank_event(self, event: Event) -> None:
        if isinstance(event, TasksLost):
            self._rank_host = None
        elif isinstance(event, Notice):
            self._on_event(event)

    def _task(self, name: str) -> _InProcessTask:
        if name not in self._tasks:
            raise unknown_task(self._cluster, name, self._tasks)
        return self._tasks[name]

    def _publish(self, name: str, task: _InProcessTask, state: TaskState, reason: str = "") -> None:
        self._on_event(
            TaskChanged(
                name,
                state,
                reason,
                address=task.address,
                pid=os.getpid() if not state.ended else None,
                restarts=task.restarts,
                open_to=task.server.open_to if task.server and state is TaskState.READY else "",
            )
        )

    def _measure(self) -> None:
        while not self._closing.wait(1.0):
            stacks.observe()
            with self._lock:
                measured = {
                    name: task.server.sent.read()
                    for name, task in self._tasks.items()
                    if task.server
                }
            for name, sent in measured.items():
                if sent < _HEARTBEAT_BYTES:
                    continue
                self._on_event(TaskMeasured(name, bytes_sent=sent))
