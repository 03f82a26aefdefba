"""A kernel as a front end has it."""

from __future__ import annotations

import os
import queue
import re
import time
from types import TracebackType
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager


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
        #: The widgets' models that the kernel has announced, by comm.
        self.models: dict[str, dict[str, Any]] = {}

    def words_of(self, kind: str, content: dict[str, Any]) -> str:
        if kind in ("execute_result", "display_data"):
            return f"{content['data']['text/plain']}\n"
        if kind == "error":
            return "\n".join(content["traceback"]) + "\n"
        return super().words_of(kind, content)

    def subshell(self) -> str:
        request = self.client.session.msg("create_subshell_request")
        self.client.control_channel.send(request)
        reply = self.client.get_control_msg(timeout=10)
        return str(reply["content"]["subshell_id"])

    def click(self, comm: str, subshell: str, state: dict[str, Any] | None = None) -> None:
        """Click a button, or have a widget take a state, as a front end does."""
        data = (
            {"method": "custom", "content": {"event": "click"}}
            if state is None
            else {"method": "update", "state": state, "buffer_paths": []}
        )
        message = self.client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)

    def await_comm(self, text: str, timeout: float) -> None:
        """Wait until a widget is told to show `text`."""
        deadline = time.monotonic() + timeout
        while True:
            message = self._next(deadline, f"no widget shows {text!r}")
            if message["msg_type"] == "comm_msg":
                state = message["content"]["data"].get("state", {})
                if any(text in str(value) for value in state.values()):
                    return

    def _next(self, deadline: float, said: str) -> dict[str, Any]:
        message = super()._next(deadline, said)
        if message["msg_type"] == "comm_open":
            content = message["content"]
            self.models[content["comm_id"]] = content["data"]["state"]
        return message
