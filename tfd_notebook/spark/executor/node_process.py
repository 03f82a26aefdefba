"""The process of the user's function in a node."""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfd_notebook.spark.executor.context import TFNodeContext

#: Seconds between two reports of what was fed.
_NUMBERS_SECONDS = 0.5
#: Seconds between two looks for the server that the function opens.
_LOOK_SECONDS = 0.2
#: Seconds that a function's error waits here for feeders to hear of it.
_ERROR_SECONDS = 30.0
#: Characters of an error that the driver hears: of its message, and of its traceback's end.
_MOST_WHAT = 1 << 13
_MOST_TRACEBACK = 3 << 13


def run(request: Mapping[str, Any], held: int, control: socket.socket, directory: Path) -> None:
    """Call the user's function; does not return.

    Parameters
    ----------
    request : mapping
        See `launching.request`.
    held : int
        Descriptor of the socket that holds the node's port.
    control : socket.socket
        To the supervisor: a JSON object a line.
    directory : Path
        Of this node alone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = 1
    try:
        NodeProcess(request, held, control, directory).run()
        status = 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


class NodeProcess:
    """The process of one node, which runs the user's function."""

    def __init__(
        self, request: Mapping[str, Any], held: int, control: socket.socket, directory: Path
    ) -> None:
        self._request = request
        self._held = socket.socket(fileno=held)
        self._control = control
        self._directory = directory
        self._lock = threading.Lock()
        self._told_to_end = threading.Event()
        self._inbox: Any = None

    def run(self) -> None:
        try:
            _prepare(self._request)
            inbox = self._open_inbox()
            function, args = self._function()
            context = self._context(inbox)
        except BaseException as error:
            self._failed(error)
            return
        for work in (self._obey, self._count, lambda: self._close_port(context.port)):
            threading.Thread(target=work, name="tfd-node", daemon=True).start()
        self._say({"say": "state", "state": "running"})
        try:
            function(args, context)
        except SystemExit as error:
            if error.code not in (None, 0):
                self._failed(error)
                return
        except BaseException as error:
            self._failed(error)
            return
        self._finished()

    def _open_inbox(self) -> Any:
        from tfd_notebook.spark.feed import Inbox

        self._inbox = Inbox(
            self._directory / "in",
            base64.b64decode(self._request["secret"]),
            role=self._request["role"],
            index=self._request["index"],
            queues=tuple(self._request["queues"]),
        )
        self._say({"say": "inbox", "path": str(self._inbox.address)})
        return self._inbox

    def _function(self) -> tuple[Any, Any]:
        import cloudpickle

        # It came in the closure of Spark's own task.
        function, args = cloudpickle.loads(base64.b64decode(self._request["closure"]))
        if isinstance(args, list):
            sys.argv = [str(arg) for arg in args]
        return function, args

    def _context(self, inbox: Any) -> TFNodeContext:
        request = self._request
        context = TFNodeContext(
            executor_id=request["node"],
            job_name=request["role"],
            task_index=request["index"],
            cluster_spec=request["spec"],
            default_fs=request["default_fs"],
            working_dir=request["directory"],
            mgr=inbox,
            tmp_socket=self._held,
        )
        if request["release_port"]:
            context.release_port()
        return context

    def _failed(self, error: BaseException) -> None:
        kind = type(error).__name__
        what = f"{self._request['name']}: the function raised {kind}: {error}"
        text = _traceback(error)
        told = f"{what[:_MOST_WHAT]}\n{text[-_MOST_TRACEBACK:]}"
        self._say({"say": "error", "state": "failed", "error": told})
        sys.stderr.write(text)
        if self._inbox is not None:
            self._inbox.fail({"what": what, "traceback": text})
            # Feeders that come later hear of it, too, until the driver has stopped this node.
            self._told_to_end.wait(_ERROR_SECONDS)

    def _finished(self) -> None:
        self._inbox.finish("its function has returned")
        self._say_numbers()
        self._say({"say": "state", "state": "finished"})
        if self._request["input_mode"] == "SPARK":
            # Rows that are still to come are taken and dropped, until the cluster shuts down.
            self._told_to_end.wait()
        self._inbox.close()

    # Threads

    def _obey(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._control.makefile("r"):
                if json.loads(line)["order"] == "finish":
                    self._inbox.end_of_feed()
                    self._told_to_end.set()
        self._told_to_end.set()

    def _count(self) -> None:
        while True:
            self._say_numbers()
            time.sleep(_NUMBERS_SECONDS)

    def _say_numbers(self) -> None:
        self._say({"say": "numbers", "numbers": self._inbox.numbers()})

    def _close_port(self, port: int) -> None:
        """Close each server that listens at the node's port to hosts outside the cluster."""
        from tfd_notebook.errors import FilterFailed
        from tfd_notebook.net import ports

        allow, host = self._request["peers"], self._request["host"]
        closed: set[int] = set()
        while True:
            found = ports.listening_inodes(port)
            if found - closed:
                try:
                    open_to = ports.restrict_port(port, allow, host)
                except FilterFailed as error:
                    if not found & ports.listening_inodes(port):
                        continue  # the function has closed its listener meanwhile
                    told = f"{self._request['name']}: {error}"
                    self._say({"say": "error", "state": "failed", "error": told})
                    os._exit(1)  # with the server, which other hosts can reach
                self._say({"say": "port", "open_to": open_to})
            closed = found
            time.sleep(_LOOK_SECONDS)

    def _say(self, message: dict[str, Any]) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")


def _prepare(request: Mapping[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    # Forked processes share the state of random generators: all would augment alike.
    random.seed()
    import numpy as np

    np.random.seed()


def _traceback(error: BaseException) -> str:
    """Return the traceback from the user's function on."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))[-200_000:]
