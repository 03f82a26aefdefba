"""A node's supervisor: the process that starts the user's, watches over it and tells the driver.

It is forked from the executor's zygote and outlives the task of Spark that asked for it. It ends,
and the user's process and all its children with it, when the executor's JVM has ended, when the
driver has not been heard of for the limit, or when the driver says so.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tfd_notebook.net import runtime_dir
from tfd_notebook.spark.executor import node_process, tensorboard
from tfd_notebook.spark.executor.driver_link import BEAT_SECONDS, DriverConnection
from tfd_notebook.spark.executor.executor import Watch

#: Seconds for the user's process to end by itself when it is told to.
_TERM_SECONDS = 3.0
#: Seconds for the driver to hear the last word.
_LAST_SECONDS = 3.0
#: What is known of a node at first; each word of its processes tells some of it.
_KNOWN = {
    "state": "starting",
    "path": "",
    "board": "",
    "board_pid": 0,
    "no_board": "",
    "open_to": "",
    "error": "",
}
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def run(request: Mapping[str, Any], held: int, log: int) -> None:
    """Supervise the node that `request` describes until it has ended.

    Parameters
    ----------
    request : mapping
        See `launching.request`.
    held, log : int
        Descriptors: the socket that holds the node's port, and where its output is copied to.
    """
    NodeSupervisor(request, held, log).run()


def name_process(name: str) -> None:
    """Give this process the name that ``ps`` and ``top`` show."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"tfd {name}"[:15].encode(), 0, 0, 0)


def sweep(pid: int) -> None:
    """Remove what the supervisor of that pid, which was killed, has left."""
    for directory in runtime_dir.runtime_dir().glob(f"{_prefix(pid)}*"):
        shutil.rmtree(directory, ignore_errors=True)


def _prefix(pid: int) -> str:
    return f"node-{pid}-"


class NodeSupervisor:
    """Starts the process of one node, and reports its state to the driver."""

    def __init__(self, request: Mapping[str, Any], held: int, log: int) -> None:
        self._request = request
        self._log = log
        self._held = held
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._numbers: dict[str, Any] = {}
        #: What every word to the driver carries, so that none that is lost is missed.
        self._known = dict(_KNOWN)
        #: Why this supervisor ends the node itself: its state then, and the reason.
        self._ending: tuple[str, str] | None = None

    def run(self) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        name_process(f"{self._request['name']}+")
        if sys.platform == "linux":
            # Children of the user's process are this one's when that has gone.
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        directory = Path(
            tempfile.mkdtemp(prefix=_prefix(os.getpid()), dir=runtime_dir.runtime_dir())
        )
        try:
            self._supervise(directory)
        finally:
            self._end_all()
            shutil.rmtree(directory, ignore_errors=True)

    def _supervise(self, directory: Path) -> None:
        output, into = os.pipe()
        mine, theirs = socket.socketpair()
        self._pid = self._fork(directory, into, theirs, (output, mine.fileno()))
        theirs.close()
        os.close(into)
        os.close(self._held)
        self._control = mine
        self._line = DriverConnection(
            self._request["driver"],
            base64.b64decode(self._request["secret"]),
            self._hello,
            self._carried,
            lambda order: self._events.put(("order", order)),
        )
        board = tensorboard.start(self._request, directory, self._say_board)
        reader = self._thread(lambda: self._read_log(output))
        self._reader = self._thread(self._read_body)
        self._thread(self._await_body)
        self._thread(self._watch_executor)
        status = self._loop()
        if board is not None:
            board.end()
        self._end_all()
        reader.join(1.0)
        self._last_words(status)

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def _fork(
        self, directory: Path, into: int, control: socket.socket, unneeded: tuple[int, ...]
    ) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setpgid(0, 0)
            for descriptor in unneeded:
                os.close(descriptor)
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)
            os.dup2(into, 1)
            os.dup2(into, 2)
            os.close(into)
            os.close(self._log)
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
            name_process(self._request["name"])
            node_process.run(self._request, self._held, control, directory)
        finally:
            os._exit(1)

    # What happens, each in a thread of its own

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
            self._line.log(data.decode(errors="replace"))

    def _read_body(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._control.makefile("r"):
                self._events.put(("body", json.loads(line)))

    def _await_body(self) -> None:
        _, status = os.waitpid(self._pid, 0)
        self._events.put(("ended", os.waitstatus_to_exitcode(status)))

    def _watch_executor(self) -> None:
        watch = Watch(*self._request["jvm"])
        watch.wait()
        self._events.put(("executor", None))

    def _hello(self) -> dict[str, Any]:
        return {
            "say": "hello",
            "node": self._request["node"],
            "pid": self._pid,
            "supervisor": os.getpid(),
            "known": self._known,
        }

    def _carried(self) -> dict[str, Any]:
        return {"known": self._known, "numbers": self._numbers}

    # What follows from it, in the main thread

    def _loop(self) -> int:
        """Return the exit status of the user's process when it has ended."""
        beat = time.monotonic()
        while True:
            try:
                kind, what = self._events.get(timeout=max(0.0, beat - time.monotonic()))
            except queue.Empty:
                beat = time.monotonic() + BEAT_SECONDS
                self._beat()
                continue
            if kind == "ended":
                self._hear_the_rest()
                return int(what)
            if kind == "executor":
                self._end("lost", "its executor has ended", signal.SIGKILL)
            elif kind == "order":
                self._obey(what)
            else:
                self._hear(what)

    def _hear_the_rest(self) -> None:
        """Hear what the user's process said last."""
        self._reader.join(2.0)
        while True:
            try:
                kind, what = self._events.get_nowait()
            except queue.Empty:
                return
            if kind == "body":
                self._hear(what)

    def _beat(self) -> None:
        limit = float(self._request["heartbeat_limit"])
        if self._line.silent > limit:
            self._end("lost", f"the driver was not heard of for {limit:g} s", signal.SIGKILL)
        self._line.beat()

    def _obey(self, order: Mapping[str, Any]) -> None:
        if order["order"] == "stop":
            self._end("stopped", str(order.get("reason", "")), signal.SIGTERM)
        elif order["order"] == "finish":
            self._tell_body({"order": "finish"})

    def _hear(self, said: Mapping[str, Any]) -> None:
        if said["say"] == "numbers":
            self._numbers = said["numbers"]
            return
        self._known = {**self._known, **{name: said[name] for name in _KNOWN if name in said}}
        self._line.say({"say": said["say"]})

    def _end(self, state: str, reason: str, how: signal.Signals) -> None:
        if self._ending is None:
            self._ending = state, reason
            self._signal(how)
            if how != signal.SIGKILL:
                threading.Timer(_TERM_SECONDS, self._signal, (signal.SIGKILL,)).start()

    def _signal(self, how: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, how)

    def _end_all(self) -> None:
        """End what the user's process has left behind."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _last_words(self, status: int) -> None:
        state, reason = self._ending or self._how_it_ended(status)
        self._line.say({"say": "ended", "state": state, "reason": reason})
        self._line.close(_LAST_SECONDS)

    def _how_it_ended(self, status: int) -> tuple[str, str]:
        if self._known["state"] in ("finished", "failed"):
            return self._known["state"], ""
        if status < 0:
            return "lost", f"its process was killed by {signal.Signals(-status).name}"
        return "lost", f"its process exited with status {status} before its function returned"

    def _say_board(self, said: dict[str, Any]) -> None:
        self._events.put(("body", {"say": "tensorboard", **said}))

    def _tell_body(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")
