"""Server of a test with the interface of Jupyter, whose kernel answers as the test requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import tornado.web
import tornado.websocket


def kernel_message(kind: str, request: str = "1", **content: Any) -> dict[str, Any]:
    """Return a message of a kernel, which belongs to this request."""
    header, parent = {"msg_type": kind, "msg_id": "2"}, {"msg_id": request}
    return {"header": header, "parent_header": parent, "content": content, "channel": "iopub"}


class Kernel:
    """A kernel in which all code ends at once.

    Attributes
    ----------
    clusters : dict
        The clusters in its state, by name. Default none.
    result : dict
        The reply to each command. Default a null value.
    """

    def __init__(self) -> None:
        self.clusters: dict[str, Any] = {}
        self.result: dict[str, Any] = {"value": None}
        self.exists = False

    def answers(self, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """Return the messages that this kernel sends for a message to it."""
        kind, content = message["header"]["msg_type"], message["content"]
        number, data = message["header"]["msg_id"], content.get("data", {})
        if kind == "execute_request":
            idle = kernel_message("status", number, execution_state="idle")
            return [kernel_message("execute_reply", number, status="ok"), idle]
        if kind.endswith("_request"):
            return [kernel_message(kind.replace("request", "reply"), number)]
        if data.get("kind") == "hello":
            bus = {"kind": "state", "seq": 1, "full": True, "state": {"clusters": self.clusters}}
        elif data.get("kind") in ("flush", "command"):
            names = ("client", "request_id")
            bus = {**self.result, "kind": "reply", **{name: data[name] for name in names}}
        else:
            return []
        return [kernel_message("comm_msg", comm_id=content["comm_id"], data=bus)]

    def interrupt(self) -> None:
        """End the running code."""


class Requests(tornado.web.RequestHandler):
    """The kernels of the server, of which it has one."""

    def initialize(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def get(self, path: str) -> None:
        kernels = [{"id": "k"}] * self.kernel.exists
        listed = {"kernelspecs": {"kernelspecs": {"python3": {}}}, "kernels": kernels}
        self.finish(json.dumps(listed[path]))

    def post(self, path: str) -> None:
        if path.endswith("interrupt"):
            self.kernel.interrupt()
        self.kernel.exists = True
        self.finish({"id": "k"})

    def delete(self, path: str) -> None:
        self.kernel.exists = False
        self.set_status(204)


class Channels(tornado.websocket.WebSocketHandler):
    """The connection to the kernel."""

    def initialize(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def open(self, *arguments: str, **named: str) -> None:
        self.set_nodelay(True)

    async def on_message(self, message: str | bytes) -> None:
        with contextlib.suppress(tornado.websocket.WebSocketClosedError):
            for sent in self.kernel.answers(json.loads(message)):
                await self.write_message(json.dumps(sent))
                await asyncio.sleep(0)  # for the other requests


@contextlib.contextmanager
def jupyter_server(kernel: Kernel) -> Iterator[str]:
    """Yield the address of a server with this kernel."""
    opened: list[str] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        handlers = {r"/api/kernels/k/channels": Channels, r"/api/(.*)": Requests}
        routes = [(path, handler, {"kernel": kernel}) for path, handler in handlers.items()]
        server = tornado.web.Application(routes).listen(0, "127.0.0.1")
        sockets = server._sockets.values()
        opened.extend(f"http://127.0.0.1:{socket.getsockname()[1]}" for socket in sockets)
        ready.set()
        await end.wait()
        server.stop()
        await server.close_all_connections()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    try:
        ready.wait(60)
        yield opened[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()
