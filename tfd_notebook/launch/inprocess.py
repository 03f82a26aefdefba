"""``launcher="inprocess"``: tasks live in the calling process, next to their consumer.

The cheapest way to start and to move data, and the one where a task cannot be killed, restarted
or measured apart from the kernel.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tfd_notebook.errors import StateError, TfdError, UnknownName
from tfd_notebook.launch import runtime, servers, sockets
from tfd_notebook.launch.base import Launcher, Node, OnEvent
from tfd_notebook.spec import ClusterConfig, Role, TaskState

_STOP_SECONDS = 3.0

#: Up to here it is heartbeats: consumers in this process take their batches in memory.
_CHATTER_BYTES = 1 << 16


class InProcess(Launcher):
    """Servers in the calling process."""

    name: ClassVar[str] = "inprocess"
    summary: ClassVar[str] = "inside this kernel: cheapest transfer, but no isolation and no kill"
    in_process: ClassVar[bool] = True

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[Node, ...]:
        return (InProcessNode(config, on_event),)


@dataclass
class _Hosted:
    """A task of this process."""

    role: Role
    settings: dict[str, Any]
    holder: socket.socket
    port: int
    address: str
    server: servers.Server | None = None
    sent: sockets.SentBytes | None = None
    open_to: str = ""
    restarts: int = field(default=0)


class InProcessNode(Node):
    """The calling process as a host; answers the requests that an agent answers."""

    host = "localhost"

    def __init__(self, config: ClusterConfig, on_event: OnEvent) -> None:
        self._cluster = config.name
        self._allow = config.allow
        self._on_event = on_event
        self._tasks: dict[str, _Hosted] = {}
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._measuring = threading.Thread(
            target=self._measure, name=f"tfd-inprocess-{config.name}", daemon=True
        )
        self._measuring.start()
        agent_id = uuid.uuid4().hex[:12]
        self._directory = runtime.new_agent_dir(agent_id)
        self.directory = str(self._directory)
        pid = os.getpid()
        owner = {"owner_pid": pid, "owner_start": runtime.process_start(pid)}
        runtime.write_state(self._directory, {"agent": agent_id, "pid": pid, **owner})

    def request(self, do: str, *, timeout: float = 30.0, **arguments: Any) -> Any:
        with self._lock:
            return getattr(self, f"_do_{do}")(**arguments)

    def close(self, timeout: float = 10.0) -> None:
        self._closing.set()
        with self._lock:
            names = sorted(self._tasks, key=lambda name: self._tasks[name].role is Role.DISPATCHER)
            for name in names:
                with contextlib.suppress(TfdError):
                    self._do_stop([name])
        self._measuring.join(timeout)
        runtime.remove(self._directory)

    def _do_hold(self, tasks: list[dict[str, Any]]) -> dict[str, str]:
        held: dict[str, str] = {}
        for packed in tasks:
            holder = sockets.hold_port(packed["port"])
            port = holder.getsockname()[1]
            name = f"{packed['role']}:{packed['index']}"
            address = f"{packed['host']}:{port}"
            role, settings = Role(packed["role"]), dict(packed["settings"])
            self._tasks[name] = _Hosted(role, settings, holder, port, address)
            held[name] = address
        return held

    def _do_start(self, tasks: dict[str, dict[str, Any]]) -> None:
        for name, settings in tasks.items():
            task = self._task(name)
            task.settings.update(settings)
            self._serve(name, task)

    def _serve(self, name: str, task: _Hosted) -> None:
        self._tell(name, task, TaskState.STARTING)
        try:
            task.server = servers.start(task.role, task.port, task.settings)
        except TfdError as error:
            self._tell(name, task, TaskState.FAILED, error.what)
            return
        task.open_to = sockets.close_to_strangers(task.port, self._allow)
        task.sent = sockets.SentBytes(task.port)
        self._tell(name, task, TaskState.READY)

    def _do_stop(self, tasks: list[str]) -> None:
        for name in tasks:
            task = self._task(name)
            stopped = task.server is None or task.server.stop(_STOP_SECONDS)
            task.server = None
            task.holder.close()
            reason = "" if stopped else "TensorFlow keeps it until its last consumer ends"
            self._tell(name, task, TaskState.STOPPED, reason)
            del self._tasks[name]

    def _do_restart(self, task: str, settings: Mapping[str, Any]) -> None:
        hosted = self._task(task)
        hosted.settings.update(settings)
        hosted.restarts += 1
        self._tell(task, hosted, TaskState.RESTARTING, "asked for")
        if hosted.server is not None and not hosted.server.stop(_STOP_SECONDS):
            raise StateError(
                "it cannot stop while a consumer of this process iterates",
                task=task,
                fix="stop the stream or leave the loop first",
            )
        self._serve(task, hosted)

    def _do_kill(self, task: str) -> None:
        self._task(task)
        raise StateError(
            "a task in this process cannot be killed without the kernel",
            task=task,
            fix='use launcher="local" to try failures',
        )

    def _do_install(self, blob: str) -> None:
        """Python functions of this process are here already."""

    def _do_logs(self, task: str, size: int, offset: int | None = None) -> list[Any]:
        self._task(task)
        text = "Tasks in this process write to the kernel's own output.\n"
        return [text if not offset else "", len(text)]

    def _task(self, name: str) -> _Hosted:
        if name not in self._tasks:
            raise UnknownName(
                f"cluster {self._cluster!r} has no task {name!r}",
                fix=f"its tasks are {', '.join(self._tasks) or 'none'}",
            )
        return self._tasks[name]

    def _tell(self, name: str, task: _Hosted, state: TaskState, reason: str = "") -> None:
        self._on_event(
            {
                "event": "task",
                "cluster": self._cluster,
                "task": name,
                "state": str(state),
                "reason": reason,
                "address": task.address,
                "pid": os.getpid() if not state.ended else None,
                "restarts": task.restarts,
                "open_to": task.open_to if state is TaskState.READY else "",
                "log": [],
            }
        )

    def _measure(self) -> None:
        while not self._closing.wait(1.0):
            with self._lock:
                measured = {
                    name: task.sent.read() for name, task in self._tasks.items() if task.sent
                }
            for name, sent in measured.items():
                if sent < _CHATTER_BYTES:
                    continue
                self._on_event(
                    {
                        "event": "measure",
                        "cluster": self._cluster,
                        "task": name,
                        "bytes_sent": sent,
                    }
                )
