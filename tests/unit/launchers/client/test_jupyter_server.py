"""Addresses of Jupyter servers, as people copy them, and connections to kernels."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfd_notebook import errors
from tfd_notebook.launchers.client.jupyter_server import JupyterServer, split

#: Part of the reply to the handshake of a websocket (RFC 6455).
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


@pytest.mark.parametrize(
    ("page", "base"),
    [
        ("/?token=abc", ""),
        ("/lab?token=abc", ""),
        ("/tree/?token=abc", ""),
        ("/lab/tree/some/where.ipynb?token=abc", ""),
        ("/lab/workspaces/auto-1/tree/where.ipynb?token=abc", ""),
        ("/tree/where.ipynb?token=abc", ""),
        ("/user/ada/notebooks/where.ipynb?token=abc", "/user/ada"),
        ("/user/tree/lab?token=abc", "/user/tree"),
        ("/user/lab/lab/tree/where.ipynb?token=abc", "/user/lab"),
        ("/a/lab/b/?token=abc", "/a/lab/b"),
    ],
)
def test_page_is_removed_from_the_address(page: str, base: str) -> None:
    assert split(f"https://one:8888{page}") == (f"https://one:8888{base}", "abc")


@pytest.mark.parametrize("url", ["", "one:8888", "grpc://one:1", "https://one:0", None, ["a"]])
def test_invalid_address_is_refused(url: object) -> None:
    with pytest.raises(errors.UsageError, match="invalid Jupyter server address"):
        split(url)  # type: ignore[arg-type]


def test_connection_that_the_server_has_closed_is_closed() -> None:
    def serve() -> bool:
        channel, _ = listener.accept()
        with channel:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                request += channel.recv(65_536)
            (key,) = re.findall(rb"Sec-WebSocket-Key: (\S+)", request)
            accept = base64.b64encode(hashlib.sha1(key + _GUID).digest())
            channel.sendall(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"
                b"\x88\x00"  # a frame that closes the connection
            )
            channel.settimeout(60)
            while channel.recv(65_536):
                pass
            return True

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        served = pool.submit(serve)
        server = JupyterServer(f"http://127.0.0.1:{listener.getsockname()[1]}", token="")
        connection = server.connect("kernel")
        assert list(connection.messages()) == []
        connection.close()
        assert served.result()
