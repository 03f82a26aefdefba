"""The process of a task: prepare it, start its server, and handle the agent's requests.

Agent and task communicate through a socket pair, with one JSON object per line. The task's main
thread waits there without the GIL, so that it does not slow the server's threads down.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from tfd_notebook._compat import frames
from tfd_notebook._compat.tf_data import autograph, graph, py_functions
from tfd_notebook.agent import fork_server, rank_process, stacks, tf_servers
from tfd_notebook.errors import LaunchError
from tfd_notebook.model.spec import Role
from tfd_notebook.model.stacks import PythonThread
from tfd_notebook.net import agent_protocol, ports, process_control

#: Samples of the threads for one request of their share of work.
_THREAD_SAMPLES = 5
_SAMPLE_PAUSE_SECONDS = 0.01
_THREADS = "/proc/self/task"
#: Running or runnable, and waiting for a disk.
_WORKING_STATES = ("R", "D")


def run(request: Mapping[str, Any], control: socket.socket, log: int) -> None:
    """Run the task that `request` describes; return when the process must end."""
    # Ctrl-C in a terminal or notebook must not reach tasks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    process_control.name_process(request["name"])
    process_control.end_with_parent(request["parent"])
    replies = control.makefile("w")
    try:
        _prepare(request)
    except BaseException as error:
        send_reply(replies, {"failed": agent_protocol.pack_error(error)})
        traceback.print_exc()
        sys.exit(1)
    task = TaskProcess(replies)
    for line in control.makefile("r"):
        message = json.loads(line)
        try:
            value = getattr(task, message["method"])(**message.get("arguments", {}))
            send_reply(replies, {"reply_to": message["id"], "ok": True, "value": value})
        except BaseException as error:
            send_reply(replies, agent_protocol.failure(message["id"], error))


class TaskProcess:
    """The handlers of an agent's requests to a task."""

    def __init__(self, replies: Any) -> None:
        self._replies = replies
        self._server: tf_servers.Server | None = None
        self._samples = False
        self._modules: dict[str, float] = {}
        self._record_modules()

    def install(self, blob: str, removed: list[str]) -> list[str]:
        """Install Python functions and remove some; return the user's modules that are stale."""
        changed = stale(self._modules)
        py_functions.remove(removed)
        py_functions.install(base64.b64decode(blob))
        self._record_modules()
        return changed

    def inspect(self) -> dict[str, list[str]]:
        """Return the user's stale modules, and the ops of loaded op libraries."""
        return {
            "stale": stale(self._modules),
            "ops": sorted(graph.loaded_ops()),
        }

    def stacks(self) -> list[PythonThread]:
        """Return the Python stacks of the other threads."""
        return stacks.threads()

    def _record_modules(self) -> None:
        """Record the modification times of the user's modules that are loaded now."""
        self._modules = {**loaded(), **self._modules}

    def start(
        self, role: str, port: int, host: str, settings: dict[str, Any], allow: list[str]
    ) -> dict[str, Any]:
        self._server = tf_servers.Server(Role(role), port).start(settings, allow, host)
        self._samples = role == Role.DATA_WORKER
        return {"open_to": self._server.open_to}

    def allow(self, host: str, allow: list[str]) -> str:
        """Accept connections to the server from these networks, and return its peers."""
        if self._server is None:  # `start` follows
            return ""
        self._server.restrict(allow, host)
        return self._server.open_to

    def call(self, **arguments: Any) -> dict[str, Any]:
        return rank_process.call(**arguments)

    def stats(self) -> dict[str, Any]:
        if self._server is None:
            return {"bytes_sent": None, "connections": [], "working": None}
        ports.detect_lost_peers()
        if self._samples:
            stacks.observe()
        sent = self._server.sent
        return {
            "bytes_sent": sent.read(),
            "connections": list(sent.descriptors.items()),
            "working": _working_share() if self._samples else None,
        }


def _prepare(request: Mapping[str, Any]) -> None:
    # `defaults` are added here, because in `environment` they would require another fork server.
    fork_server.set_up_process(request, {**request["defaults"], **request["environment"]})
    for item in request["preload"]:
        try:
            if item.endswith((".so", ".dylib")):
                import tensorflow as tf

                tf.load_op_library(item)
            else:
                importlib.import_module(item)
        except Exception as error:
            raise LaunchError(
                f"preload={item!r} failed: {type(error).__name__}: {error}",
                task=request["name"],
                fix="name a module on sys.path or the path of an op library",
            ) from error


def send_reply(replies: Any, message: dict[str, Any]) -> None:
    """Send a message to the agent, or end this process if the connection is closed."""
    try:
        replies.write(json.dumps(message) + "\n")
        replies.flush()
    except OSError:
        os._exit(0)


def main() -> None:
    """Run one task in a spawned process, if forking is not possible."""
    control = socket.socket(fileno=int(os.environ["TFD_TASK_FD"]))
    request = json.loads(os.environ["TFD_TASK_REQUEST"])
    run(request, control, os.dup(2))


_INSTALLED = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(__file__)))


def changed_at(module: str) -> float | None:
    """Return the modification time of a user's module; None for an installed module."""
    try:
        # Not `getattr`, which runs the code of modules that are imported at first use.
        file = object.__getattribute__(sys.modules[module], "__dict__").get("__file__")
    except (KeyError, AttributeError):  # not loaded, or an object without a namespace
        return None
    if not file or file.startswith(_INSTALLED) or autograph.is_generated(module):
        return None
    try:
        return os.stat(file).st_mtime
    except OSError:
        return None


def loaded() -> dict[str, float]:
    """Return the modification time of each loaded module of the user."""
    return {
        name: changed for name in tuple(sys.modules) if (changed := changed_at(name)) is not None
    }


def stale(recorded: dict[str, float]) -> list[str]:
    """Return the modules whose files have changed since `loaded` returned `recorded`."""
    return sorted(
        name
        for name, then in recorded.items()
        if (changed := changed_at(name)) is not None and changed > then
    )


def _working_share() -> float | None:
    """Return the share of a few samples in which another thread of this process worked.

    A thread works while it computes, waits for a disk, or runs a Python function, which may block.
    TensorFlow's server threads mostly wait. The call takes 50 ms. It returns None without
    ``/proc``.
    """
    if not os.path.isdir(_THREADS):
        return None
    own_id = str(threading.get_native_id())
    working_samples = 0
    for number in range(_THREAD_SAMPLES):
        if number:
            time.sleep(_SAMPLE_PAUSE_SECONDS)
        # Python lists a thread of TensorFlow only while it runs a Python function.
        working_samples += bool(frames.stacks()) or _any_thread_works(own_id)
    return working_samples / _THREAD_SAMPLES


def _any_thread_works(own_id: str) -> bool:
    for thread in os.listdir(_THREADS):
        if thread != own_id:
            try:
                with open(f"{_THREADS}/{thread}/stat", "rb") as file:
                    state = file.read().rpartition(b") ")[2][:1].decode()
            except OSError:  # the thread has ended
                continue
            if state in _WORKING_STATES:
                return True
    return False
