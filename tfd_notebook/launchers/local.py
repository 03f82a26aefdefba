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
from tfd_notebook.launchers.base import ALL_ROLES, Launcher, Node, OnEvent
from tfd_notebook.launchers.client.agent_client import AgentClient, AgentNode
from tfd_notebook.launchers.client.orphans import sweep
from tfd_notebook.model.spec import ClusterConfig, Role
from tfd_notebook.net import runtime_dir
from tfd_notebook.net.bounded_write import write_to_pipe

#: With less free memory than this TensorFlow is not imported ahead of its use.
_TIGHT_BYTES = 2_000_000_000
#: Seconds for an agent's start on a busy host.
_START_SECONDS = 120.0


class Local(Launcher):
    """Child processes on this host: the default.

    One agent per kernel looks after the tasks of all its clusters. It and they end with the
    kernel, however that ends.
    """

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "child processes on this host, restarted when they die (the default)"
    roles: ClassVar[frozenset[Role]] = ALL_ROLES

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[Node, ...]:
        client = _agent().client
        surroundings = _task_environment(config.env)
        # First, so that a Python without TensorFlow is one clear error.
        changed = client.request(
            "preload",
            config.policy.start_timeout,
            environment=surroundings["environment"],
            path=surroundings["path"],
        )
        if changed:
            on_event(
                {
                    "event": "notice",
                    "severity": "info",
                    "what": f"{', '.join(changed)} changed since TensorFlow was imported for new "
                    "tasks, so it was imported again for them",
                    "task": None,
                    "fix": None,
                }
            )
        return (AgentNode.open(client, config, on_event, surroundings),)


def local_tunnel_agent(config: ClusterConfig, on_event: OnEvent) -> AgentNode:
    """Have this kernel's agent do here what a cluster on other hosts needs.

    Parameters
    ----------
    config : ClusterConfig
    on_event : callable
        Gets what there is to say, and a warning when the agent ends.
    """

    def heard(body: dict[str, Any]) -> None:
        if body["event"] == "lost":
            body = {
                "event": "notice",
                "cluster": config.name,
                "severity": "error",
                "what": f"this kernel's own agent has ended, and its tunnels: {body['reason']}",
                "task": None,
                "fix": "start the cluster again",
            }
        if body["event"] == "notice":
            on_event(body)

    return AgentNode.open(_agent().client, config, heard, _task_environment(config.env))


def preload() -> bool:
    """Start importing TensorFlow for tasks in the background; return whether that was done.

    ``TFD_PRELOAD`` decides: ``on``, ``off``, or ``auto`` (the default), which does it unless
    less than 2 GB of memory are free. An import that nobody uses ends after ten minutes.
    """
    wish = os.environ.get("TFD_PRELOAD", "auto")
    if wish == "off" or (wish != "on" and psutil.virtual_memory().available < _TIGHT_BYTES):
        return False
    surroundings = _task_environment({})

    def work() -> None:
        # A failure is told, with its reason, to the first cluster that needs the agent.
        with contextlib.suppress(TfdError):
            _agent().client.submit(
                "preload", environment=surroundings["environment"], path=surroundings["path"]
            )

    threading.Thread(target=work, name="tfd-preload", daemon=True).start()
    return True


def shutdown(timeout: float = 10.0) -> None:
    """End this kernel's agent and with it all its tasks; does nothing where there is none."""
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
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(agent.pid).children()
        return (agent.pid, *(c.pid for c in children if not c.name().startswith("tfd ")))
    return ()


class _LocalAgent:
    """An agent in a child process: its pipes, and the thread that serves them."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.owner = os.getpid()
        self.pid: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._answered: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._closed = False
        self.client = AgentClient(self.id, "localhost", self._send)
        # The thread that forks the agent must live as long as the kernel: when it ends, the
        # agent's parent-death signal fires.
        self._thread = threading.Thread(target=self._serve, name="tfd-agent", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """True if the agent starts or runs and works for this process."""
        return self.owner == os.getpid() and self.client.alive and not self._closed

    @property
    def directory(self) -> Path:
        return runtime_dir.runtime_dir() / f"agent-{self.id}"

    def wait(self) -> None:
        """Wait until the agent answers; raise the reason why it cannot."""
        try:
            self._answered.result(_START_SECONDS)
        except concurrent.futures.TimeoutError:
            raise LaunchError(
                f"the agent did not answer within {_START_SECONDS:g} s",
                fix=f"is the host overloaded? See {self.directory / 'agent.log'}",
            ) from None

    def _serve(self) -> None:
        try:
            process = self._start()
        except BaseException as error:
            self.client.lost("the agent did not start")
            self._answered.set_exception(error)
            return
        assert process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in process.stdout:
                self.client.handle_line(line)
                answered = self.client.ready.is_set() and not self._closed
                if answered and not self._answered.done():
                    self._answered.set_result(None)
        if self.client.stays:
            # It looks after clusters that outlive this process, which therefore never waits for it.
            process.returncode = 0
            self.client.lost("the agent goes on alone")
            return
        status = process.wait()
        log: list[str] = []
        with contextlib.suppress(OSError):  # the agent removes its directory when it ends
            text = (self.directory / "agent.log").read_text(errors="replace")
            log = text.splitlines()[-3:]
        runtime_dir.remove(self.directory)
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        self.client.lost(f"the agent that looks after this host's tasks ended ({how})")
        if not self._answered.done():
            failed = LaunchError(
                "the agent was shut down while it started"
                if self._closed
                else f"the agent ended before it answered ({how}): {'; '.join(log)}"
            )
            self._answered.set_exception(failed)

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
        if self._closed:  # meanwhile, by a thread that found no process yet
            process.kill()
        return process

    def _send(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        write_to_pipe(self._process.stdin, data)

    def disown(self) -> None:
        """Keep a forked child from waiting for the process of its parent."""
        if self._process is not None:
            self._process.returncode = 0

    def close(self, timeout: float) -> None:
        self._closed = True
        # A start is not waited for: `_start` ends a process that is not there yet.
        if self._process is None or self.owner != os.getpid():
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if not self._answered.done():
            self._process.kill()
        self._thread.join(timeout)
        if self._thread.is_alive() and not self.client.stays:
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
    # Without the lock: `shutdown` and `agent_pids` wait for no start.
    agent.wait()
    return agent


def _task_environment(extra: Any) -> dict[str, Any]:
    """What tasks share with this kernel as it is now."""
    return {
        "environment": {**os.environ, **extra},
        "directory": os.getcwd(),
        "path": interpreter.task_path(),
    }


def _after_fork() -> None:
    """Leave the agent to the parent; a forked child that needs one starts its own."""
    global _current, _lock
    if _current is not None:
        _current.disown()
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(shutdown)
