"""Supervisor of a node: a process that starts the user's process and reports to the driver.

It is forked from the executor's fork server and outlives the Spark task that requested it. It ends
with the executor's JVM, on the driver's order, or after a time without a message from the driver.
At its end, it kills the user's process and all children.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tfd_notebook.net import process_control, runtime_dir
from tfd_notebook.spark.executor import node_process, tensorboard
from tfd_notebook.spark.executor.driver_link import HEARTBEAT_SECONDS, DriverConnection

#: Timeout in seconds for the user's process to end after SIGTERM.
_TERM_SECONDS = 3.0
#: Timeout in seconds for the driver to acknowledge the last message.
_LAST_SECONDS = 3.0
#: Initial state of a node. Messages of its processes update the fields.
_INITIAL_STATE = {
    "state": "starting",
    "reason": "",
    "ended": False,
    "path": "",
    "board": "",
    "board_pid": 0,
    "board_error": "",
    "open_to": "",
    "error": "",
    "numbers": {},
}


def run(request: Mapping[str, Any], reserved_port: int, log: int) -> None:
    """Supervise the node that `request` describes until it has ended.

    Parameters
    ----------
    request : mapping
        See `launch_plan.launch`.
    reserved_port, log : int
        Descriptors: the socket that reserves the node's port, and a copy of the output.
    """
    NodeSupervisor(request, reserved_port, log).run()


def sweep(pid: int) -> None:
    """Remove the directories of a killed supervisor with this pid."""
    for directory in runtime_dir.runtime_dir().glob(f"{_prefix(pid)}*"):
        shutil.rmtree(directory, ignore_errors=True)


def _prefix(pid: int) -> str:
    return f"node-{pid}-"


class NodeSupervisor:
    """The supervisor of one node, which reports its state to the driver."""

    def __init__(self, request: Mapping[str, Any], reserved_port: int, log: int) -> None:
        self._request = request
        self._log = log
        self._reserved_port = reserved_port
        #: Reactions to events, which the main thread calls.
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        #: Part of every message to the driver, so that a lost message loses no state.
        self._state: dict[str, Any] = dict(_INITIAL_STATE)
        #: State and reason if this supervisor stops the node.
        self._stop_reason: tuple[str, str] | None = None
        #: Exit status of the user's process, after its end.
        self._status: int | None = None

    def run(self) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        process_control.name_process(f"{self._request['name']}+")
        # Adopt orphans of the user's process, to kill them at the end.
        process_control.adopt_orphans()
        directory = Path(
            tempfile.mkdtemp(prefix=_prefix(os.getpid()), dir=runtime_dir.runtime_dir())
        )
        try:
            self._supervise(directory)
        finally:
            self._kill_children()
            shutil.rmtree(directory, ignore_errors=True)

    def _supervise(self, directory: Path) -> None:
        output, output_writer = os.pipe()
        control, child_control = socket.socketpair()
        self._pid = self._fork(directory, output_writer, child_control, (output, control.fileno()))
        child_control.close()
        os.close(output_writer)
        os.close(self._reserved_port)
        self._control = control
        self._connection = DriverConnection(
            self._request["driver"],
            base64.b64decode(self._request["secret"]),
            lambda: {"node": self._request["node"], "pid": self._pid, "status": self._state},
            lambda order: self._call(self._execute_order, order),
        )
        board = tensorboard.start(
            self._request, directory, lambda fields: self._call(self._handle_message, fields)
        )
        reader = self._thread(lambda: self._read_log(output))
        self._reader = self._thread(self._read_control)
        self._thread(self._await_process)
        self._thread(self._watch_executor)
        self._loop()
        if board is not None:
            board.end()
        self._kill_children()
        reader.join(1.0)
        self._report_end()

    def _call(self, react: Callable[[Any], None], argument: Any) -> None:
        """Call `react` in the main thread."""
        self._events.put(functools.partial(react, argument))

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def _fork(
        self, directory: Path, output_writer: int, control: socket.socket, unneeded: tuple[int, ...]
    ) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setpgid(0, 0)
            for descriptor in unneeded:
                os.close(descriptor)
            process_control.end_with_parent(parent)
            os.dup2(output_writer, 1)
            os.dup2(output_writer, 2)
            os.close(output_writer)
            os.close(self._log)
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
            process_control.name_process(self._request["name"])
            node_process.run(self._request, self._reserved_port, control, directory)
        finally:
            os._exit(1)

    # Sources of events, each in a thread

    def _read_log(self, output: int) -> None:
        while True:
            try:
                data = os.read(output, 1 << 16)
            except OSError:
                return
            if not data:
                return
            with contextlib.suppress(OSError):
                os.write(self._log, data)
            self._connection.log(data.decode(errors="replace"))

    def _read_control(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._control.makefile("r"):
                self._call(self._handle_message, json.loads(line))

    def _await_process(self) -> None:
        _, status = os.waitpid(self._pid, 0)
        self._call(self._process_ended, os.waitstatus_to_exitcode(status))

    def _watch_executor(self) -> None:
        runtime_dir.wait_for_end(*self._request["jvm"])
        self._call(self._lose, "its executor has ended")

    # Reactions to events, in the main thread

    def _loop(self) -> None:
        """Handle events until the user's process has ended."""
        limit = float(self._request["heartbeat_limit"])
        while self._status is None:
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=HEARTBEAT_SECONDS)()
            if self._connection.silence_s > limit:
                self._lose(f"no message from the driver for {limit:g} s")
        # Handle the last messages of the user's process.
        self._reader.join(2.0)
        with contextlib.suppress(queue.Empty):
            while True:
                self._events.get_nowait()()

    def _process_ended(self, status: int) -> None:
        self._status = status

    def _execute_order(self, order: Mapping[str, Any]) -> None:
        if order["order"] == "stop":
            self._stop("stopped", str(order.get("reason", "")), signal.SIGTERM)
        elif order["order"] == "finish":
            with contextlib.suppress(OSError):
                self._control.sendall(json.dumps({"order": "finish"}).encode() + b"\n")

    def _handle_message(self, fields: Mapping[str, Any]) -> None:
        self._state = {**self._state, **fields}
        if "numbers" not in fields:  # the next heartbeat contains these
            self._connection.update()

    def _lose(self, reason: str) -> None:
        self._stop("lost", reason, signal.SIGKILL)

    def _stop(self, state: str, reason: str, signal_number: signal.Signals) -> None:
        if self._stop_reason is None and self._status is None:
            self._stop_reason = state, reason
            self._signal(signal_number)
            if signal_number != signal.SIGKILL:
                threading.Timer(_TERM_SECONDS, self._signal, (signal.SIGKILL,)).start()

    def _signal(self, signal_number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal_number)

    def _kill_children(self) -> None:
        """Kill all processes that the user's process has left running."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _report_end(self) -> None:
        state, reason = self._end_state()
        self._handle_message({"state": state, "reason": reason, "ended": True})
        self._connection.close(_LAST_SECONDS)

    def _end_state(self) -> tuple[str, str]:
        # The result of the function takes precedence over the end of its process.
        if self._state["state"] in ("finished", "failed"):
            return self._state["state"], ""
        if self._stop_reason is not None:
            return self._stop_reason
        status = self._status or 0
        if status < 0:
            return "lost", f"its process was killed by {signal.Signals(-status).name}"
        return "lost", f"its process exited with status {status} before its function returned"
