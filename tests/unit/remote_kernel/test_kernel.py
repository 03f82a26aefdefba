"""Remote kernels that answer late, without end, or with more than this process can show."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tornado.web

from tests._jupyter_kernel import Kernel, jupyter_server, kernel_message
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.remote_kernel import RemoteKernel

CODE = "code of the test"


def line(number: str, text: str) -> dict[str, Any]:
    return kernel_message("stream", number, name="stdout", text=text)


class EndlessKernel(Kernel):
    """Its code prints until it is interrupted."""

    interrupted = False

    def answers(self, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if message["content"].get("code") == CODE:
            while not self.interrupted:
                yield line(message["header"]["msg_id"], "")
        yield from super().answers(message)

    def interrupt(self) -> None:
        self.interrupted = True


def test_timeout_ends_code_that_prints() -> None:
    with jupyter_server(EndlessKernel()) as url, RemoteKernel(url, token="") as kernel:
        with pytest.raises(errors.TimeLimit, match=r"within 0\.5 s"):
            kernel.run(CODE, timeout=0.5)
        kernel.run("next code", timeout=60)


class RefusingServer(EndlessKernel):
    """Its server refuses each interrupt."""

    interrupts = 0

    def interrupt(self) -> None:
        self.interrupts += 1
        raise tornado.web.HTTPError(self.status)

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


#: A LaunchError, and an OSError.
REFUSALS = (403, 503)


@pytest.mark.parametrize("status", REFUSALS)
def test_refused_interrupt_does_not_replace_the_timeout(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfd_notebook.remote_kernel.kernel._INTERRUPT_SECONDS", 0.2)
    remote = RefusingServer(status)
    with jupyter_server(remote) as url, RemoteKernel(url, token="") as kernel:
        with pytest.raises(errors.TimeLimit, match=r"within 0\.5 s, and the interrupt failed"):
            kernel.run(CODE, timeout=0.5)
        remote.interrupted = True


@pytest.mark.parametrize("status", REFUSALS)
def test_refused_interrupt_does_not_replace_ctrl_c(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(*message: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tfd_notebook.remote_kernel.kernel.show", show)
    remote = RefusingServer(status)
    with jupyter_server(remote) as url, RemoteKernel(url, token="") as kernel:
        with pytest.raises(KeyboardInterrupt):
            kernel.run(CODE)
        assert remote.interrupts == 1
        remote.interrupted = True


def test_refused_interrupt_is_an_error_of_its_caller() -> None:
    with (
        jupyter_server(RefusingServer(403)) as url,
        RemoteKernel(url, token="") as kernel,
        pytest.raises(errors.LaunchError, match="requires a token"),
    ):
        kernel.interrupt()


def test_kernel_that_did_not_start_has_a_repr() -> None:
    """A debugger shows it in the traceback."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(errors.LaunchError, match="cannot be reached") as caught:
            RemoteKernel(url, token="")
    frames = [entry.frame.f_locals.get("self") for entry in caught.traceback]
    (kernel,) = {id(each): each for each in frames if isinstance(each, RemoteKernel)}.values()
    assert "cannot be reached" in repr(kernel)


class EvasiveKernel(Kernel):
    """It answers a request with messages of another kind."""

    def answers(self, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if message["header"]["msg_type"] != "kernel_info_request":
            yield from super().answers(message)
        else:
            while True:
                yield line(message["header"]["msg_id"], "")


def test_request_ends_although_other_messages_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfd_notebook.remote_kernel.kernel._START_SECONDS", 2.0)
    with (
        jupyter_server(EvasiveKernel()) as url,
        pytest.raises(errors.LaunchError, match="did not answer"),
    ):
        RemoteKernel(url, token="")


def test_start_ends_with_the_reason_if_the_state_is_invalid() -> None:
    remote = Kernel()
    remote.clusters["c"] = {"tasks": 7}
    with (
        jupyter_server(remote) as url,
        pytest.raises(errors.LaunchError, match="invalid message: invalid tasks 7"),
    ):
        RemoteKernel(url, token="")


class BusyKernel(Kernel):
    """While it is busy, it does not send its current state."""

    def __init__(self) -> None:
        super().__init__()
        self.clusters["train"] = {"coordinator": {}}
        self.busy = False

    def answers(self, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        flush = message["content"].get("data", {}).get("kind") == "flush"
        return [] if flush and self.busy else super().answers(message)


def test_earlier_state_of_a_busy_kernel_is_not_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`join` returned while closures could be queued, and a cell that ended showed them."""
    monkeypatch.setattr("tfd_notebook.remote_kernel.kernel._CATCH_UP_SECONDS", 0.2)
    remote = BusyKernel()
    with jupyter_server(remote) as url, RemoteKernel(url, token="") as kernel:
        coordinator = kernel.clusters["train"].coordinator
        coordinator.join(timeout=60)
        remote.busy = True
        with pytest.raises(errors.TimeLimit, match="join failed"):
            coordinator.join(timeout=0.5)
        with pytest.raises(errors.TimeLimit, match="the current state"):
            coordinator.step(timeout=0.5)
        with pytest.raises(errors.TimeLimit, match="the current state"):
            kernel.clusters["later"]
        with pytest.warns(RuntimeWarning, match="shown with an earlier state"):
            kernel.run(CODE)
        remote.busy = False
        coordinator.join(timeout=60)


class DyingKernel(Kernel):
    """It ends at the first command for its clusters."""

    def answers(self, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if message["content"].get("data", {}).get("kind") == "command":
            return [kernel_message("status", execution_state="dead")]
        return super().answers(message)


def test_command_ends_with_its_kernel() -> None:
    with (
        jupyter_server(DyingKernel()) as url,
        RemoteKernel(url, token="") as kernel,
        pytest.raises(errors.RemoteError, match="its process died"),
    ):
        kernel.perform("list", timeout=60.0)


class LoudKernel(Kernel):
    """Its code prints 50 MB."""

    sent, last = 0, 0.0

    def answers(self, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if message["content"].get("code") == CODE:
            for self.sent in range(1, 201):
                self.last = time.monotonic()
                yield line(message["header"]["msg_id"], "x" * 250_000)
        yield from super().answers(message)


class BlockedOutput:
    """An output that writes nothing before it is released."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        self.written = 0

    def write(self, text: str) -> None:
        self.reached.set()
        assert self.released.wait(60)
        self.written += len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("closed", [False, True])
def test_output_waits_at_the_server_while_it_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    output, loud = BlockedOutput(), LoudKernel()
    monkeypatch.setattr(sys, "stdout", output)
    with (
        jupyter_server(loud) as url,
        RemoteKernel(url, token="") as kernel,
        ThreadPoolExecutor() as pool,
    ):
        run = pool.submit(kernel.run, CODE)
        output.reached.wait(60)
        until(lambda: time.monotonic() - loud.last > 1.0)
        sent = loud.sent
        if closed:
            kernel.close()
        output.released.set()
        if closed:
            assert isinstance(run.exception(60), errors.RemoteError)
        else:
            run.result(60)
            assert output.written == 50_000_000
    assert sent < 150
