"""Connections to processes in pods."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import kubernetes
import tornado.httpserver
import tornado.netutil
import tornado.web
import tornado.websocket

from tfd_notebook.launchers.client.kubernetes_api import ExecConnection

LARGE, SMALL = b"x" * 10_000_000, b"y"


def test_large_message_to_a_process_is_not_interrupted() -> None:
    """Heartbeats are sent by another thread."""
    received = bytearray()
    complete = threading.Event()

    class Exec(tornado.websocket.WebSocketHandler):
        def select_subprotocol(self, subprotocols: list[str]) -> str:
            return subprotocols[0]

        def on_message(self, message: str | bytes) -> None:
            assert isinstance(message, bytes)
            received.extend(message[1:])
            if len(received) == len(LARGE) + len(SMALL):
                complete.set()

    with ThreadPoolExecutor(3) as pool:
        loop = asyncio.new_event_loop()
        ended = asyncio.Event()
        (listener,) = tornado.netutil.bind_sockets(0, "127.0.0.1")

        async def serve() -> None:
            server = tornado.httpserver.HTTPServer(tornado.web.Application([("/exec", Exec)]))
            server.add_sockets([listener])
            await ended.wait()
            server.stop()
            await server.close_all_connections()

        serving = pool.submit(loop.run_until_complete, serve())
        try:
            url = f"ws://127.0.0.1:{listener.getsockname()[1]}/exec"
            configuration = kubernetes.client.Configuration()
            connection = ExecConnection(configuration, url, lambda status, content: None)
            connection.open()
            list(pool.map(connection.send, (LARGE, SMALL)))
            assert complete.wait(60)
            connection.close()
        finally:
            loop.call_soon_threadsafe(ended.set)
            serving.result(60)
            loop.close()
    assert received in (LARGE + SMALL, SMALL + LARGE)
