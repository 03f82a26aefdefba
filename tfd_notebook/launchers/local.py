"""``launcher="local"``: tasks are child processes on this host, under an agent of this kernel."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import json
import os
import subprocess
import threading
import uuid
from pathlib import Path
from typing import Any, ClassVar

import psutil

from tfd_notebook.agent import interpreter
from tfd_notebook.errors import LaunchError, TfdError
from tfd_notebook.launchers.base import ALL_ROLES, Launcher, OnEvent, TaskHost
from tfd_notebook.launchers.client import agent_host
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.launchers.client.agent_host import AgentTaskHost
from tfd_notebook.launchers.client.orphans import sweep
from tfd_notebook.model.events import Event, Notice, TasksLost
from tfd_notebook.model.spec import ClusterConfig, Role
from tfd_notebook.net import runtime_dir
from tfd_notebook.net.bounded_write import write_to_pipe

#: TensorFlow is not preloaded if less memory than this is free.
_TIGHT_BYTES = 2_000_000_000
#: Seconds for an agent's start on a busy host.
_START_SECONDS = 120.0


class Local(Launcher):
    """Child processes on this host: the default.

    One agent per kernel supervises the tasks of all its clusters. The agent and the tasks end with
    the kernel, even if the kernel crashes.
    """

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "child processes on this host, restarted when they die (the default)"
    roles: ClassVar[frozenset[Role]] = ALL_ROLES

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[TaskHost, ...]:
        client = _agent().client
        environment = _task_environment(config.env)
        # Preload first, so that a Python without TensorFlow is one clear error.
        reply = agent_host.submit_preload(client, environment["environment"], environment["path"])
        reloaded = agent_host.await_preload(reply, "this host", config.policy.start_timeout)
        if reloaded:
            on_event(
                Notice(
                    "info",
                    f"{', '.join(reloaded)} changed since TensorFlow was imported for new tasks, "
                    "so it was imported again",
                )
            )
        directory = agent_host.open_cluster(client, config, on_event, environment)
        return (AgentTaskHost(client, config.name, directory),)


def local_tunnel_agent(config: ClusterConfig, on_event: OnEvent) -> AgentTaskHost:
    """Return a host under this kernel's agent that runs the local tunnels of a remote cluster.

    Parameters
    ----------
    config : ClusterConfig
    on_event : callable
        Receives the notices, and an error when the agent ends.
    """

    def forward(event: Event) -> None:
        if isinstance(event, TasksLost):
            event = Notice(
                "error",
                f"this kernel's agent ended, and its tunnels with it: {event.reason}",
                fix="start the cluster again",
            )
        if isinstance(event, Notice):
            on_event(event)

    client = _agent().client
    directory = agent_host.open_cluster(client, config, forward, _task_environment(config.env))
    return AgentTaskHost(client, config.name, directory)


def preload() -> bool:
    """Start this kernel's agent and its import of TensorFlow; return True if they were started.

    They are not if less than 2 GB of memory are free, unless ``TFD_PRELOAD`` is ``on``. An import
    that no task uses ends after ten minutes.
    """
    available = psutil.virtual_memory().available
    if os.environ.get("TFD_PRELOAD") != "on" and available < _TIGHT_BYTES:
        return False
    environment = _task_environment({})
    # The first cluster that needs the agent reports a failure, with its reason.
    with contextlib.suppress(TfdError):
        agent_host.submit_preload(_agent().client, environment["environment"], environment["path"])
    return True


def shutdown(timeout: float = 10.0) -> None:
    """End this kernel's agent, if any, and with it all its tasks."""
    global _current
    with _lock:
        agent, _current = _current, None
    if agent is not None:
        agent.close(timeout)


def agent_pids() -> tuple[int, ...]:
    """Return the pids of this kernel's agent and its fork server."""
    with _lock:
        agent = _current
    if agent is None or agent.pid is None:
        return ()
    pids = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(agent.pid).children():
            with contextlib.suppress(psutil.Error):  # a task that has just ended
                if not child.name().startswith("tfd "):
                    pids.append(child.pid)
        return (agent.pid, *pids)
    return ()


class _LocalAgent:
    """An agent in a child process, its pipes, and the thread that serves them."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.owner = os.getpid()
        self.pid: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._closed = False
        self.client = AgentClient(self.id, "localhost", self._send)
        # The thread that forks the agent must run as long as the kernel. When it ends, the agent
        # receives its parent-death signal (PR_SET_PDEATHSIG).
        self._thread = threading.Thread(target=self._serve, name="tfd-agent", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """True if the agent starts or runs, and belongs to this process."""
        return self.owner == os.getpid() and self.client.alive and not self._closed

    @property
    def directory(self) -> Path:
        return runtime_dir.runtime_dir() / f"agent-{self.id}"

    def wait(self) -> None:
        """Wait until the agent replies; raise the reason if it cannot."""
        try:
            self._ready.result(_START_SECONDS)
        except concurrent.futures.TimeoutError:
            raise LaunchError(
                f"the agent was not ready within {_START_SECONDS:g} s",
                fix=f"the host may be overloaded: see {self.directory / 'agent.log'}",
            ) from None

    def _serve(self) -> None:
        try:
            process = self._start()
        except BaseException as error:
            self.client.lost("the agent did not start")
            self._ready.set_exception(error)
            return
        assert process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in process.stdout:
                self.client.handle_line(line)
                answered = self.client.ready.is_set() and not self._closed
                if answered and not self._ready.done():
                    self._ready.set_result(None)
        if self.client.agent_detached:
            # The agent supervises detached clusters and outlives this process, which therefore
            # never waits for it.
            process.returncode = 0
            self.client.lost("the agent keeps running without this process")
            return
        status = process.wait()
        log: list[str] = []
        with contextlib.suppress(OSError):  # the agent removes its directory when it ends
            text = (self.directory / "agent.log").read_text(errors="replace")
            log = text.splitlines()[-3:]
        runtime_dir.remove(self.directory)
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        self.client.lost(f"this host's agent ended ({how})")
        if not self._ready.done():
            failed = LaunchError(
                "the agent was shut down during its start"
                if self._closed
                else f"the agent ended before it was ready ({how}): {'; '.join(log)}"
            )
            self._ready.set_exception(failed)

    def _start(self) -> subprocess.Popen[bytes]:
        sweep()
        directory, lock = runtime_dir.new_agent_dir(self.id)
        with lock, (directory / "agent.log").open("ab") as log:
            process = self._process = subprocess.Popen(
                interpreter.command("tfd_notebook.agent.agent"),
                env=dict(
                    interpreter.environment(),
                    TFD_OWNER=str(os.getpid()),
                    TFD_AGENT_DIR=json.dumps(str(directory)),
                    **{runtime_dir.AGENT_VARIABLE: self.id},
                ),
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(lock.fileno(),),
                start_new_session=True,
            )
        self.pid = process.pid
        if self._closed:  # set by another thread before this process existed
            process.kill()
        return process

    def _send(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        write_to_pipe(self._process.stdin, data)

    def disown(self) -> None:
        """Prevent a forked child from waiting for its parent's agent."""
        if self._process is not None:
            self._process.returncode = 0

    def close(self, timeout: float) -> None:
        self._closed = True
        # Do not wait for a start in progress: `_start` kills the process once it exists.
        if self._process is None or self.owner != os.getpid():
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if not self._ready.done():
            self._process.kill()
        self._thread.join(timeout)
        if self._thread.is_alive() and not self.client.agent_detached:
            self._process.kill()
            self._thread.join(timeout)
        self._process.stdout.close()


_current: _LocalAgent | None = None
_lock = threading.Lock()


def _agent() -> _LocalAgent:
    """Return this process's agent, started on demand."""
    global _current
    with _lock:
        if _current is None or not _current.usable:
            _current = _LocalAgent()
        agent = _current
    # Outside the lock, so that `shutdown` and `agent_pids` do not wait for a start.
    agent.wait()
    return agent


def _task_environment(extra: Any) -> dict[str, Any]:
    """Return the environment that tasks share with this kernel."""
    return {
        "environment": {**os.environ, **extra},
        "directory": os.getcwd(),
        "path": interpreter.task_path(),
    }


def _after_fork() -> None:
    """Leave the agent to the parent process; a forked child starts another agent on demand."""
    global _current, _lock
    if _current is not None:
        _current.disown()
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(shutdown)
