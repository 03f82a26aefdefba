"""Process of a node that runs the user's function."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfd_notebook.agent import fork_server
from tfd_notebook.errors import FilterFailed
from tfd_notebook.spark.executor.context import TFNodeContext

#: Interval in seconds between reports of the inbox's counters.
_NUMBERS_SECONDS = 0.5
#: Interval in seconds between checks for a server that the function opens.
_POLL_SECONDS = 0.2
#: Seconds for which the process stays after an error, so that feeders can receive it.
_ERROR_SECONDS = 30.0
#: Maximum characters of an error's message and of the end of its traceback, as sent to the driver.
_MAX_MESSAGE_CHARS = 1 << 13
_MAX_TRACEBACK_CHARS = 3 << 13


def run(
    request: Mapping[str, Any], reserved_port: int, control: socket.socket, directory: Path
) -> None:
    """Call the user's function, then exit the process.

    Parameters
    ----------
    request : mapping
        See `launch_plan.launch`.
    reserved_port : int
        Descriptor of the socket that reserves the node's port.
    control : socket.socket
        Socket to the supervisor: one JSON object per line.
    directory : Path
        Private directory of this node.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = 1
    try:
        NodeProcess(request, reserved_port, control, directory).run()
        status = 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


class NodeProcess:
    """The process of one node, which runs the user's function."""

    def __init__(
        self,
        request: Mapping[str, Any],
        reserved_port: int,
        control: socket.socket,
        directory: Path,
    ) -> None:
        self._request = request
        self._reserved_port = socket.socket(fileno=reserved_port)
        self._control = control
        self._directory = directory
        self._lock = threading.Lock()
        self._finish_ordered = threading.Event()
        self._inbox: Any = None

    def run(self) -> None:
        try:
            fork_server.set_up_process(self._request, self._request["environment"])
            inbox = self._open_inbox()
            function, args = self._function()
            context = self._context(inbox)
        except BaseException as error:
            self._report_failure(error)
            return
        for work in (
            self._handle_orders,
            self._report_counters,
            lambda: self._restrict_port(context.port),
        ):
            threading.Thread(target=work, name="tfd-node", daemon=True).start()
        self._send({"state": "running"})
        try:
            function(args, context)
        except SystemExit as error:
            if error.code not in (None, 0):
                self._report_failure(error)
                return
        except BaseException as error:
            self._report_failure(error)
            return
        self._report_success()

    def _open_inbox(self) -> Any:
        # Import time: it imports NumPy, which this module must not need in the fork server.
        from tfd_notebook.spark.feed.inbox import Inbox

        self._inbox = Inbox(
            self._directory / "in",
            base64.b64decode(self._request["secret"]),
            role=self._request["role"],
            index=self._request["index"],
            queues=tuple(self._request["queues"]),
        )
        self._send({"path": str(self._inbox.address)})
        return self._inbox

    def _function(self) -> tuple[Any, Any]:
        import cloudpickle

        # The bytes come from the closure of a task of the same Spark application.
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
            tmp_socket=self._reserved_port,
        )
        if request["release_port"]:
            context.release_port()
        return context

    def _report_failure(self, error: BaseException) -> None:
        what, text = failure(self._request["name"], error, __file__)
        self._send({"state": "failed", "error": shortened(what, text)})
        sys.stderr.write(text)
        if self._inbox is not None:
            self._inbox.fail({"what": what, "traceback": text})
            # Later feeders also receive the error, until the driver has stopped this node.
            self._finish_ordered.wait(_ERROR_SECONDS)

    def _report_success(self) -> None:
        self._inbox.finish("its function has returned")
        self._send_counters()
        self._send({"state": "finished"})
        if self._request["input_mode"] == "SPARK":
            # Further rows are received and dropped until the cluster shuts down.
            self._finish_ordered.wait()
        self._inbox.close()

    # Threads

    def _handle_orders(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._control.makefile("r"):
                if json.loads(line)["order"] == "finish":
                    self._inbox.end_of_feed()
                    self._finish_ordered.set()
        self._finish_ordered.set()

    def _report_counters(self) -> None:
        while True:
            self._send_counters()
            time.sleep(_NUMBERS_SECONDS)

    def _send_counters(self) -> None:
        self._send({"numbers": self._inbox.numbers()})

    def _restrict_port(self, port: int) -> None:
        """Restrict each server on the node's port to the hosts of the cluster."""
        # After the fork: `ports` imports grpc, which does not support forks of its users.
        from tfd_notebook.net import ports

        allow, host = self._request["peers"], self._request["host"]
        closed: set[int] = set()
        while True:
            inodes: set[int] = set()
            try:
                inodes = ports.listening_inodes(port)
                if inodes - closed:
                    self._send({"open_to": ports.restrict_port(port, allow, host)})
            except Exception as error:
                if isinstance(error, FilterFailed) and not inodes & ports.listening_inodes(port):
                    continue  # the function has closed its server meanwhile
                message = f"{self._request['name']}: {error}"
                self._send({"state": "failed", "error": message})
                os._exit(1)  # also closes the server, which other hosts can reach
            closed = inodes
            time.sleep(_POLL_SECONDS)

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")


def failure(name: str, error: BaseException, caller: str) -> tuple[str, str]:
    """Return description and traceback of an error that the user's function raised.

    The traceback starts after the frames of the file `caller`.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == caller:
        frame = frame.tb_next
    text = "".join(traceback.format_exception(type(error), error, frame))[-200_000:]
    return f"{name}: the function raised {type(error).__name__}: {error}", text


def shortened(what: str, text: str) -> str:
    """Return a description, and the end of a traceback, for a message to the driver."""
    return f"{what[:_MAX_MESSAGE_CHARS]}\n{text[-_MAX_TRACEBACK_CHARS:]}"
