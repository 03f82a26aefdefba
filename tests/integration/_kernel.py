"""A kernel and its client, as in a front end."""

from __future__ import annotations

import os
import queue
import re
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests._patch import Tree, tree_of
from tfd_notebook.bus import PROTOCOL


class Kernel:
    """A running kernel, and a context manager that ends it."""

    def __init__(self, **env: str) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=dict(os.environ, **env))
        self._connect()

    def _connect(self) -> None:
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def restart(self) -> None:
        """Restart the kernel as the button of JupyterLab does."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=False)
        self._connect()

    def begin(self, code: str, until: str) -> str:
        """Start a cell, wait until its output matches `until`, and return its id."""
        cell = self.client.execute(code)
        self.finish(cell, until=until)
        return cell

    def run(self, code: str, timeout: float = 90) -> str:
        """Run a cell and return its output."""
        return self.finish(self.client.execute(code), timeout)

    def finish(self, cell: str, timeout: float = 90, until: str | None = None) -> str:
        """Return the output of a cell up to its end, or up to a match of `until`."""
        output, deadline = "", time.monotonic() + timeout
        while True:
            message = self._next(deadline, output)
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            output += self.output_of(kind, content)
            if until is not None and re.search(until, output):
                return output
            if kind == "status" and content["execution_state"] == "idle":
                assert until is None, output
                return output

    def output_of(self, kind: str, content: dict[str, Any]) -> str:
        """Return the output in a message of a cell."""
        if kind == "stream":
            return str(content["text"])
        return f"{content['ename']}: {content['evalue']}\n" if kind == "error" else ""

    def _next(self, deadline: float, output: str) -> dict[str, Any]:
        try:
            left = max(deadline - time.monotonic(), 0.01)
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=left)
        except queue.Empty:
            raise AssertionError(f"no further message after:\n{output}") from None
        return message


class Notebook(Kernel):
    """A kernel, and the state of its widgets in a front end."""

    def __init__(self) -> None:
        # Level 0 makes TensorFlow log its start, so that the logs of tasks are not empty.
        super().__init__(TF_CPP_MIN_LOG_LEVEL="0")
        #: The state of the widgets' models that the kernel has announced, by comm.
        self.models: dict[str, Tree] = {}
        self._widgets: dict[str, Widget] = {}
        # Messages of cells that arrived during a wait for a widget.
        self._kept: deque[Tree] = deque()

    def output_of(self, kind: str, content: dict[str, Any]) -> str:
        if kind in ("execute_result", "display_data", "update_display_data"):
            return f"{content['data']['text/plain']}\n"
        if kind == "error":
            return "\n".join(content["traceback"]) + "\n"
        return super().output_of(kind, content)

    def widget(self, view: str) -> Widget:
        """Open the latest widget that shows `view`, as a page does."""
        comm = [comm for comm, state in self.models.items() if state.get("view") == view][-1]
        self._widgets[comm] = widget = Widget(self, comm, self.subshell())
        widget.open()
        return widget

    def await_that(self, holds: Callable[[], Any], timeout: float = 60) -> Any:
        """Read messages of the kernel until `holds()` is true, and return its value."""
        deadline = time.monotonic() + timeout
        while not (value := holds()):
            self._kept.append(self._receive(deadline, "a wait for a widget"))
        return value

    def send_on_subshell(self, subshell: str, kind: str, content: Tree) -> None:
        """Send a message that the kernel handles while a cell runs."""
        message = self.client.session.msg(kind, content)
        message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)

    def begin_on_subshell(self, code: str) -> None:
        """Start a cell while another one runs."""
        self.send_on_subshell(self.subshell(), "execute_request", {"code": code, "silent": False})

    def subshell(self) -> str:
        request = self.client.session.msg("create_subshell_request")
        self.client.control_channel.send(request)
        reply = self.client.get_control_msg(timeout=60)
        return str(reply["content"]["subshell_id"])

    def _next(self, deadline: float, output: str) -> dict[str, Any]:
        return self._kept.popleft() if self._kept else self._receive(deadline, output)

    def _receive(self, deadline: float, output: str) -> dict[str, Any]:
        message = super()._next(deadline, output)
        content = message["content"]
        if message["msg_type"] == "comm_open":
            self.models[content["comm_id"]] = content["data"]["state"]
        elif message["msg_type"] == "comm_msg" and content["comm_id"] in self._widgets:
            self._widgets[content["comm_id"]].handle(content["data"], message["buffers"])
        return message


class Widget:
    """A widget in a page, with the protocol of docs/bus.md in custom messages of its model."""

    def __init__(self, notebook: Notebook, comm: str, subshell: str) -> None:
        self._notebook, self._comm, self._subshell = notebook, comm, subshell
        self._requests = 0
        #: All messages of the kernel, with their buffers.
        self.messages: list[tuple[Tree, list[Any]]] = []

    def open(self) -> None:
        """Send hello, and wait for the first state."""
        self.send("hello", protocol=PROTOCOL, version="test", acks=False)
        self.await_that(lambda: self.received("state"))

    def send(self, kind: str, **content: Any) -> None:
        data = {"method": "custom", "content": {"kind": kind, "client": "page", **content}}
        message = {"comm_id": self._comm, "data": data}
        self._notebook.send_on_subshell(self._subshell, "comm_msg", message)

    def handle(self, data: Tree, buffers: list[Any]) -> None:
        """Store a custom message of the kernel."""
        if data["method"] == "custom":
            self.messages.append((data["content"], buffers))

    def request(self, command: str, **arguments: Any) -> Tree:
        """Send a command and return its reply."""
        self._requests += 1
        self.send("command", request_id=str(self._requests), command=command, **arguments)
        return self.await_that(lambda: self._answer(str(self._requests)))  # type: ignore[no-any-return]

    def await_that(self, holds: Callable[[], Any]) -> Any:
        return self._notebook.await_that(holds)

    def received(self, kind: str) -> list[Tree]:
        return [message for message, _ in self.messages if message["kind"] == kind]

    @property
    def cluster(self) -> Tree:
        """The received state of its cluster."""
        (cluster,) = tree_of(self.received("state"))["clusters"].values()
        return cluster  # type: ignore[no-any-return]

    def _answer(self, request_id: str) -> Tree | None:
        return next(
            (reply for reply in self.received("reply") if reply["request_id"] == request_id), None
        )
