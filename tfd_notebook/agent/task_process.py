"""What runs in a task's own process: prepare it, start its server, answer its agent.

The agent talks to the task through a socket pair, one JSON object a line. The task's main thread
waits there with the interpreter lock released, so that it costs the server's threads nothing.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from tfd_notebook.agent import tf_servers, thread_activity
from tfd_notebook.errors import LaunchError, TfdError
from tfd_notebook.model.spec import Role
from tfd_notebook.net import agent_protocol, ports

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def run(request: Mapping[str, Any], control: socket.socket, log: int) -> None:
    """Be the task that `request` describes; does not return before the process shall end."""
    # A terminal's or notebook's Ctrl-C is not for tasks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _name_process(request["name"])
    end_with(request["parent"])
    answers = control.makefile("w")
    try:
        _prepare(request)
    except BaseException as error:
        send_reply(answers, {"failed": agent_protocol.pack_error(error)})
        traceback.print_exc()
        sys.exit(1)
    task = TaskProcess(answers)
    for line in control.makefile("r"):
        message = json.loads(line)
        try:
            value = getattr(task, message["do"])(**message.get("arguments", {}))
            send_reply(answers, {"re": message["id"], "ok": True, "value": value})
        except BaseException as error:
            if not isinstance(error, TfdError):
                traceback.print_exc()
            answer = {"re": message["id"], "ok": False, "error": agent_protocol.pack_error(error)}
            send_reply(answers, answer)


def end_with(parent: int) -> None:
    """Have the kernel end this process with its parent, whose pid is `parent`.

    Waits until the process that forked this one has gone and the parent is the one meant.
    """
    if sys.platform != "linux":
        return
    deadline = time.monotonic() + 10
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class TaskProcess:
    """The requests that an agent may make of a task."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers
        self._server: tf_servers.Server | None = None
        self._sent: ports.SentBytes | None = None
        self._samples = False
        self._modules: dict[str, float] = {}
        self._note_modules()

    def install(self, blob: str, gone: list[str]) -> list[str]:
        """Install Python functions and forget some; return the user's modules that are stale."""
        from tfd_notebook._compat.tf_data import py_functions

        changed = stale(self._modules)
        py_functions.forget(gone)
        py_functions.install(base64.b64decode(blob))
        self._note_modules()
        return changed

    def inspect(self) -> dict[str, list[str]]:
        """Return the user's modules that are stale here, and the ops of loaded op libraries."""
        from tfd_notebook._compat.tf_data import graph

        return {
            "stale": stale(self._modules),
            "ops": sorted(graph.loaded_ops()),
        }

    def _note_modules(self) -> None:
        """Remember how old the files of the user's modules are that are loaded now."""
        self._modules = {**loaded(), **self._modules}

    def start(
        self, role: str, port: int, host: str, settings: dict[str, Any], allow: list[str]
    ) -> dict[str, Any]:
        self._server = tf_servers.start(Role(role), port, settings)
        open_to = ports.restrict_port(self._server.port, allow, host)
        self._sent = ports.SentBytes(self._server.port)
        self._samples = role == Role.DATA_WORKER
        return {"port": self._server.port, "open_to": open_to}

    def stats(self) -> dict[str, Any]:
        if self._sent is None:
            return {"bytes_sent": None, "connections": [], "working": None}
        sent = self._sent.read()
        return {
            "bytes_sent": sent,
            "connections": list(self._sent.descriptors.items()),
            "working": thread_activity.working_share() if self._samples else None,
        }


def _prepare(request: Mapping[str, Any]) -> None:
    os.environ.clear()
    # What is added here would, in the environment itself, take a new fork server.
    os.environ.update({**request["defaults"], **request["environment"]})
    try:
        os.chdir(request["directory"])
    except OSError as error:
        raise LaunchError(
            f"cannot enter the working directory: {error}",
            task=request["name"],
            fix="change to a directory that exists before the cluster starts",
        ) from None
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    random.seed()
    with contextlib.suppress(ImportError):
        import numpy as np

        # Forked processes share the state of NumPy's generator: all would augment alike.
        np.random.seed()
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


def _name_process(name: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"tfd {name}"[:15].encode(), 0, 0, 0)


def send_reply(answers: Any, message: dict[str, Any]) -> None:
    """Send a message to the agent, or end this process if the agent is gone."""
    try:
        answers.write(json.dumps(message) + "\n")
        answers.flush()
    except OSError:
        os._exit(0)


def main() -> None:
    """Be one task in a process of its own, where forking is not possible."""
    control = socket.socket(fileno=int(os.environ["TFD_TASK_FD"]))
    request = json.loads(os.environ["TFD_TASK_REQUEST"])
    run(request, control, os.dup(2))


_INSTALLED = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(__file__)))
#: TensorFlow writes these itself, for functions that it converts.
_GENERATED = "__autograph_generated_file"


def changed_at(module: str) -> float | None:
    """When the file of a module of the user changed; None for modules that were installed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file or file.startswith(_INSTALLED) or module.startswith(_GENERATED):
        return None
    try:
        return os.stat(file).st_mtime
    except OSError:
        return None


def loaded() -> dict[str, float]:
    """Return when the file of each loaded module of the user changed last."""
    return {
        name: changed for name in tuple(sys.modules) if (changed := changed_at(name)) is not None
    }


def stale(seen: dict[str, float]) -> list[str]:
    """Return the modules whose files have changed since `loaded` returned `seen`."""
    return sorted(
        name
        for name, then in seen.items()
        if (changed := changed_at(name)) is not None and changed > then
    )
