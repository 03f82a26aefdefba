"""Limits of bytes and time of HTTP replies, with each client that has them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import googleapiclient.discovery
import pytest
from google.oauth2.credentials import Credentials

from tests._slow_servers import slow_names, trickle, wait_for_end
from tfd_notebook import errors
from tfd_notebook.launchers.client import kubernetes_api
from tfd_notebook.net import validation
from tfd_notebook.resolvers import GCEResolver, KubernetesResolver, gce, kubernetes

pytestmark = pytest.mark.usefixtures("plain_environment")

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
#: The limit of bytes of these tests.
MOST = 2000

Reply = Callable[[socket.socket], None]


@contextlib.contextmanager
def serving(reply: Reply) -> Iterator[int]:
    """Run a server that replies to each request; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def serve() -> None:
            while True:
                channel, _ = listener.accept()
                if ended.is_set():
                    channel.close()
                    return
                with channel, contextlib.suppress(ConnectionError):
                    channel.settimeout(60)
                    with channel.makefile("rb") as request:
                        request.readline()
                        fields = http.client.parse_headers(request)
                        request.read(int(fields.get("Content-Length", 0)))
                    reply(channel)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            socket.create_connection(listener.getsockname()).close()
            thread.join()


def kubeconfig(path: Path, port: int) -> str:
    """Write the configuration for a server without TLS."""
    parts = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(parts))
    return str(path)


class Client:
    """A client of this package, and the errors that it raises."""

    def __init__(self, name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = name
        self._path = directory / "config"
        self._monkeypatch = monkeypatch
        self.refused: type[Exception] = errors.Malformed
        self.late: type[Exception] = errors.NoAnswer
        if name == "kubernetes launcher":
            self.refused, self.late = errors.InvalidMessage, OSError
        self._limit("MAX_REPLY_BYTES", MOST)
        self.limit_seconds(60.0)

    def limit_seconds(self, seconds: float) -> None:
        self._limit("REQUEST_SECONDS", seconds)

    def _limit(self, name: str, limit: float) -> None:
        module = {"kubernetes resolver": kubernetes, "gce resolver": gce}.get(self.name)
        if module is None:
            self._monkeypatch.setattr(kubernetes_api, name, limit)
        else:
            self._monkeypatch.setattr(module, f"_{name}", limit)

    def request(self, port: int) -> Any:
        if self.name == "kubernetes launcher":
            path = kubeconfig(self._path, port)
            return kubernetes_api.KubernetesApi(path, None, "").request("GET", "pods")
        if self.name == "kubernetes resolver":
            path = kubeconfig(self._path, port)
            return KubernetesResolver({"worker": "a=b"}, kubeconfig=path).cluster_spec()
        build = googleapiclient.discovery.build
        options = {"api_endpoint": f"http://127.0.0.1:{port}/"}
        self._monkeypatch.setattr(
            googleapiclient.discovery,
            "build",
            lambda *names, **more: build(*names, client_options=options, **more),
        )
        return GCEResolver("p", "z", "g", credentials=Credentials("token")).cluster_spec()


@pytest.fixture(params=["kubernetes launcher", "kubernetes resolver", "gce resolver"])
def client(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Client:
    return Client(request.param, tmp_path, monkeypatch)


def test_short_reply_is_received(client: Client) -> None:
    reply = HEAD + b"Content-Length: 2\r\nContent-Encoding: identity\r\n\r\n{}"
    with serving(lambda channel: channel.sendall(reply)) as port:
        if client.name == "kubernetes launcher":
            assert client.request(port) == {}
        else:
            with pytest.raises(errors.ResolveError) as caught:
                client.request(port)
            assert "invalid reply" not in str(caught.value)


@pytest.mark.parametrize(
    "start",
    [
        HEAD + b"\r\n",
        HEAD + b"Content-Length: 600000000000\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffff\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 200,
    ],
    ids=["until the end", "length", "chunk", "chunks", "statuses"],
)
def test_long_reply_is_not_received(client: Client, start: bytes) -> None:
    sent = 0

    def reply(channel: socket.socket) -> None:
        nonlocal sent
        channel.sendall(start)
        for _ in range(100):
            channel.sendall(b" " * 1_000_000)
            sent += 1

    with (
        serving(reply) as port,
        pytest.raises(client.refused, match=f"longer than {MOST} bytes"),
    ):
        client.request(port)
    assert sent < 20  # the buffers of the system take the rest


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"br", b"gzip, gzip"])
def test_compressed_reply_is_not_unpacked(client: Client, encoding: bytes) -> None:
    bomb = gzip.compress(b" " * 100_000 + b"{}")

    def reply(channel: socket.socket) -> None:
        head = HEAD + b"Content-Encoding: " + encoding
        channel.sendall(head + b"\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb)
        wait_for_end(channel)

    with serving(reply) as port, pytest.raises(client.refused, match="expected no compression"):
        client.request(port)


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\nX: ",
        HEAD + b"Content-Length: 1500\r\n\r\n",
        HEAD + b"\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n500\r\n",
    ],
    ids=["header", "length", "until the end", "chunked"],
)
def test_slow_reply_ends_at_the_deadline(client: Client, start: bytes) -> None:
    client.limit_seconds(0.3)
    with (
        serving(lambda channel: trickle(channel, start)) as port,
        pytest.raises(client.late, match=r"timed out|no complete reply"),
    ):
        client.request(port)


@pytest.mark.parametrize("client", ["kubernetes resolver", "gce resolver"], indirect=True)
def test_slow_reply_ends_at_the_deadline_of_all_requests(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kubernetes, gce):
        monkeypatch.setattr(module, "RESOLVE_SECONDS", 0.3)
    # Google's client may need the 0.3 s to read the description of its API.
    late = r"timed out|no (complete (reply|answer)|connection) within"
    with (
        serving(lambda channel: trickle(channel, HEAD)) as port,
        pytest.raises(client.late, match=late),
    ):
        client.request(port)


def test_name_that_is_not_resolved_ends_at_the_deadline(client: Client) -> None:
    client.limit_seconds(0.3)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        slow_names(),
        pytest.raises(client.late, match="no connection within"),
    ):
        pool.submit(client.request, 9).result(10)


def test_reply_with_too_many_values_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MAX_VALUES", 10)
    client = Client("kubernetes launcher", tmp_path, monkeypatch)
    text = json.dumps([{}] * 10).encode()
    reply = HEAD + b"Content-Length: %d\r\n\r\n" % len(text) + text
    with (
        serving(lambda channel: channel.sendall(reply)) as port,
        pytest.raises(errors.InvalidMessage, match="more than 10 values"),
    ):
        client.request(port)
