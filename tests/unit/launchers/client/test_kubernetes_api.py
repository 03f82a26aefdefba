"""Connections to processes in pods."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kubernetes
import pytest
import tornado.httpserver
import tornado.netutil
import tornado.web
import tornado.websocket

from tfd_notebook import errors
from tfd_notebook.launchers.client.kubernetes_api import ExecConnection
from tfd_notebook.net import kubernetes_config

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


def test_token_of_a_kubeconfig_is_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "config"

    def write(token: str) -> None:
        cluster = {"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        user = {"name": "u", "user": {"token": token}}
        lists = {"clusters": [cluster], "contexts": [context], "users": [user]}
        file.write_text(json.dumps({"current-context": "c", "kind": "Config", **lists}))

    write("SECRET\n")
    configuration, _ = kubernetes_config.configure(str(file), None)
    assert [*configuration.api_key.values()] == ["Bearer SECRET"]
    write("SEC\nRET")
    with pytest.raises(errors.AccessDenied, match="invalid token") as caught:
        kubernetes_config.configure(str(file), None)
    assert "SEC" not in str(caught.value)
