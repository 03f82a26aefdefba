"""Receivers of replies of a Jupyter server, and of the messages of its kernels."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from jupyter_client.session import Session
from traitlets.config import Config

from tests._fuzzing import (
    CLUSTER_STATE,
    ERROR,
    UPGRADED,
    Receiver,
    answered,
    as_json,
    like,
    near,
    web_server,
    websocket_frame,
)
from tests._jupyter_kernel import Kernel, jupyter_server, kernel_message
from tfd_notebook import errors
from tfd_notebook.launchers.client.jupyter_server import JupyterServer
from tfd_notebook.net import messages
from tfd_notebook.remote_kernel import RemoteKernel, display


@contextlib.contextmanager
def jupyter_requests(directory: Path) -> Iterator[Callable[[bytes], None]]:
    with web_server(directory) as (address, answer):
        server = JupyterServer(f"http://{address}", token="")

        def receive(data: bytes) -> None:
            answer[0] = data
            server.has("k")
            server.start_kernel("python3")

        yield receive


@contextlib.contextmanager
def jupyter_channels(directory: Path) -> Iterator[Callable[[bytes], None]]:
    with web_server(directory) as (address, answer):
        server = JupyterServer(f"http://{address}", token="")

        def receive(data: bytes) -> None:
            # websocket-client receives a handshake in single bytes.
            answer[0] = data[:9000]
            connection = server.connect("k")
            try:
                for _ in connection.messages():
                    pass
            finally:
                connection.close()

        yield receive


# Messages of a remote kernel

CODE = "code of the test"


class RandomKernel(Kernel):
    """A kernel that sends a message before the end of code."""

    def __init__(self) -> None:
        super().__init__()
        self.clusters["c"] = CLUSTER_STATE
        self.sent: Any = None

    def answers(self, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if message["content"].get("code") == CODE:
            with contextlib.suppress(TypeError, KeyError):
                self.sent["parent_header"]["msg_id"] = message["header"]["msg_id"]
            yield self.sent
        yield from super().answers(message)


@contextlib.contextmanager
def remote_kernel(directory: Path) -> Iterator[Callable[[Any], None]]:
    opened: list[RemoteKernel] = []
    random = RandomKernel()
    # Many inputs end the kernel.
    polls = mock.patch("tfd_notebook.remote_kernel.kernel._POLL_SECONDS", 0.01)
    with polls, jupyter_server(random) as url:

        def receive(value: Any) -> None:
            random.sent, random.result = value
            if not opened or opened[0].state != "ready":
                if opened:
                    opened.pop().close()
                opened.append(RemoteKernel(url, token=""))
            (kernel,) = opened
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.suppress(errors.TfdError),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore", RuntimeWarning)  # about clusters, if it is lost
                kernel.run(CODE, 60.0, plain=len(random.result) % 2 == 0)
            cluster = None
            with contextlib.suppress(errors.TfdError):
                cluster = kernel.clusters.get("c")
            assert repr(kernel)
            if cluster is not None and kernel.state == "ready":
                assert repr(cluster)
                for request in (cluster.logs, cluster.stacks, lambda: cluster.kill("worker:0")):
                    with contextlib.suppress(errors.TfdError):
                        request()

        yield receive
        for kernel in opened:
            kernel.close()


@contextlib.contextmanager
def ipython_display(directory: Path) -> Iterator[Callable[[Any], None]]:
    """Yield a function that shows an output of another kernel in IPython and in a kernel."""
    InteractiveShell.clear_instance()
    config = Config({"HistoryManager": {"enabled": False}})
    session = Session()

    def receive(message: Any) -> None:
        valid = messages.kernel_message(message)
        kind, content = valid["header"]["msg_type"], valid["content"]
        terminal = io.TextIOWrapper(io.BytesIO(), "utf-8")
        with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
            if kind == "error":
                assert str(display.failure("host", content))
            for show in (display.show, display.show_plain, display.silent):
                show(kind, content)
                with capture_output() as captured:
                    show(kind, content)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # NaN is sent as text, with a warning
                    for output in captured.outputs:
                        session.pack([output.data, output.metadata])
        terminal.flush()

    with mock.patch.object(builtins, "__IPYTHON__", True, create=True):
        InteractiveShell.instance(config=config)
        try:
            yield receive
        finally:
            InteractiveShell.clear_instance()


KERNELSPECS = {"kernelspecs": {"python3": {}}, "id": "k1"}
COMM = {"comm_id": "tfd_notebook-bus"}
SHOWN = ("stream", "display_data", "clear_output", "error")
KERNEL_MESSAGES = (
    kernel_message("stream", name="stdout", text="a"),
    kernel_message("status", execution_state="idle"),
    kernel_message("status", execution_state="restarting"),
    kernel_message("display_data", data={"text/plain": "a", "text/html": "b"}, metadata={}),
    kernel_message("error", ename="A", evalue="b", traceback=["c"]),
    kernel_message("clear_output", wait=True),
    kernel_message("execute_reply", status="aborted"),
    kernel_message("comm_open", comm_id="c", target_name="tfd_notebook-lease", data={}),
    kernel_message("comm_msg", comm_id="tfd_notebook-bus", data={"kind": "hello"}),
    kernel_message("comm_msg", comm_id="tfd_notebook-bus", data={"kind": "state", "seq": 2}),
)
PNG = "iVBORw0KGgo="
OUTPUTS = (
    *(message for message in KERNEL_MESSAGES if message["header"]["msg_type"] in SHOWN),
    kernel_message("stream", name="stderr", text="\x1b[31ma\x1b[0m\n"),
    kernel_message("execute_result", data={"text/plain": "a"}, metadata=None, execution_count=1),
    kernel_message(
        "update_display_data",
        data={"image/png": PNG, "application/json": {"a": [1]}},
        metadata={"image/png": {"width": 1}},
        transient={"display_id": "d"},
    ),
)
FRAMES = tuple(
    UPGRADED + websocket_frame(json.dumps(message).encode(), 1) for message in KERNEL_MESSAGES
)
STACK = {
    **dict.fromkeys(("task", "thread", "function", "file", "note"), "a"),
    **{"line": 1, "seconds": 0.5, "stack": []},
}
RESULTS = ({"text": "a"}, [STACK], 7)

JUPYTER = {
    "Jupyter requests": Receiver(
        as_json(like([KERNELSPECS], KERNELSPECS)).map(answered) | near(answered(b"{}")),
        jupyter_requests,
        (errors.LaunchError, errors.InvalidMessage, OSError),
        found=tuple(map(answered, [b"7", b'{"kernelspecs": null}', b'{"kernelspecs": [{}]}'])),
        gate=10,
    ),
    "Jupyter channels": Receiver(
        as_json(like(*KERNEL_MESSAGES)).map(
            lambda text: UPGRADED + websocket_frame(text[:60_000], 1)
        )
        | near(*FRAMES),
        jupyter_channels,
        (errors.LaunchError, errors.InvalidMessage, OSError),
        found=(b"\n",),
    ),
    "display in IPython": Receiver(
        like(*OUTPUTS),
        ipython_display,
        (errors.InvalidMessage,),
        found=(
            kernel_message("unknown", data=[]),
            kernel_message("display_data", data={"text/plain": "\ud800"}),
            kernel_message("display_data", data={"text/html": "\ud800"}),
            kernel_message("display_data", data={"a": {"\ud800": 1}}, metadata={"\ud800": 1}),
        ),
    ),
    "remote kernel": Receiver(
        st.tuples(
            like(*KERNEL_MESSAGES),
            st.fixed_dictionaries({"value": like(*RESULTS)})
            | st.fixed_dictionaries({"error": like(ERROR)}),
        ),
        remote_kernel,
        found=((KERNEL_MESSAGES[0], {"error": None}),),
        gate=10,
    ),
}
