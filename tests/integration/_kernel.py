"""A kernel as a front end has it."""

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
    """A running kernel; a context manager that ends it."""

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
        """Restart as the button does."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=False)
        self._connect()

    def begin(self, code: str, until: str) -> str:
        """Start a cell, wait until it has said `until`, and return its id."""
        cell = self.client.execute(code)
        self.finish(cell, until=until)
        return cell

    def run(self, code: str, timeout: float = 90) -> str:
        """Run a cell; return what it said."""
        return self.finish(self.client.execute(code), timeout)

    def finish(self, cell: str, timeout: float = 90, until: str | None = None) -> str:
        """Return what the cell says up to its end, or up to a match of `until`."""
        said, deadline = "", time.monotonic() + timeout
        while True:
            message = self._next(deadline, said)
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            said += self.words_of(kind, content)
            if until is not None and re.search(until, said):
                return said
            if kind == "status" and content["execution_state"] == "idle":
                assert until is None, said
                return said

    def words_of(self, kind: str, content: dict[str, Any]) -> str:
        """Return what a message adds to what a cell said."""
        if kind == "stream":
            return str(content["text"])
        return f"{content['ename']}: {content['evalue']}\n" if kind == "error" else ""

    def _next(self, deadline: float, said: str) -> dict[str, Any]:
        try:
            left = max(deadline - time.monotonic(), 0.01)
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=left)
        except queue.Empty:
            raise AssertionError(f"nothing more came after:\n{said}") from None
        return message


class Notebook(Kernel):
    """A kernel, and what a front end knows of it."""

    def __init__(self) -> None:
        # The tasks shall have something to write.
        super().__init__(TF_CPP_MIN_LOG_LEVEL="0")
        #: The state of the widgets' models that the kernel has announced, by comm.
        self.models: dict[str, Tree] = {}
        self._widgets: dict[str, Widget] = {}
        # What came while somebody waited for a widget, and is some cell's.
        self._kept: deque[Tree] = deque()

    def words_of(self, kind: str, content: dict[str, Any]) -> str:
        if kind in ("execute_result", "display_data"):
            return f"{content['data']['text/plain']}\n"
        if kind == "error":
            return "\n".join(content["traceback"]) + "\n"
        return super().words_of(kind, content)

    def widget(self, view: str) -> Widget:
        """Open the latest widget that shows `view`, as the page does that gets it."""
        comm = [comm for comm, state in self.models.items() if state.get("view") == view][-1]
        self._widgets[comm] = made = Widget(self, comm, self.subshell())
        made.open()
        return made

    def await_that(self, holds: Callable[[], Any], timeout: float = 20) -> Any:
        """Read what the kernel sends until `holds()` is true, and return what it is."""
        deadline = time.monotonic() + timeout
        while not (value := holds()):
            self._kept.append(self._hear(deadline, "what a widget waits for did not come"))
        return value

    def send_beside(self, subshell: str, kind: str, content: Tree) -> None:
        """Send a message that is taken while a cell runs."""
        message = self.client.session.msg(kind, content)
        message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)

    def begin_beside(self, code: str) -> None:
        """Start a cell beside the one that runs."""
        self.send_beside(self.subshell(), "execute_request", {"code": code, "silent": False})

    def subshell(self) -> str:
        request = self.client.session.msg("create_subshell_request")
        self.client.control_channel.send(request)
        reply = self.client.get_control_msg(timeout=10)
        return str(reply["content"]["subshell_id"])

    def _next(self, deadline: float, said: str) -> dict[str, Any]:
        return self._kept.popleft() if self._kept else self._hear(deadline, said)

    def _hear(self, deadline: float, said: str) -> dict[str, Any]:
        message = super()._next(deadline, said)
        content = message["content"]
        if message["msg_type"] == "comm_open":
            self.models[content["comm_id"]] = content["data"]["state"]
        elif message["msg_type"] == "comm_msg" and content["comm_id"] in self._widgets:
            self._widgets[content["comm_id"]].hear(content["data"], message["buffers"])
        return message


class Widget:
    """A widget in a page: it speaks the protocol of docs/bus.md by the model's custom messages."""

    def __init__(self, notebook: Notebook, comm: str, subshell: str) -> None:
        self._notebook, self._comm, self._subshell = notebook, comm, subshell
        self._asked = 0
        #: All messages of the kernel's, with their buffers.
        self.heard: list[tuple[Tree, list[Any]]] = []

    def open(self) -> None:
        """Say hello, and wait for what there is to be seen."""
        self.says("hello", protocol=PROTOCOL, version="test", acks=False)
        self.await_that(lambda: self.received("state"))

    def says(self, kind: str, **content: Any) -> None:
        data = {"method": "custom", "content": {"kind": kind, "client": "page", **content}}
        message = {"comm_id": self._comm, "data": data}
        self._notebook.send_beside(self._subshell, "comm_msg", message)

    def hear(self, data: Tree, buffers: list[Any]) -> None:
        """Take what the kernel sent on its comm."""
        if data["method"] == "custom":
            self.heard.append((data["content"], buffers))

    def asks(self, command: str, **arguments: Any) -> Tree:
        """Give a command, and return the answer to it."""
        self._asked += 1
        self.says("command", request_id=str(self._asked), command=command, **arguments)
        return self.await_that(lambda: self._answer(str(self._asked)))  # type: ignore[no-any-return]

    def await_that(self, holds: Callable[[], Any]) -> Any:
        return self._notebook.await_that(holds)

    def received(self, kind: str) -> list[Tree]:
        return [message for message, _ in self.heard if message["kind"] == kind]

    @property
    def cluster(self) -> Tree:
        """What it knows of its cluster."""
        (cluster,) = tree_of(self.received("state"))["clusters"].values()
        return cluster  # type: ignore[no-any-return]

    def _answer(self, request_id: str) -> Tree | None:
        return next(
            (reply for reply in self.received("reply") if reply["request_id"] == request_id), None
        )
