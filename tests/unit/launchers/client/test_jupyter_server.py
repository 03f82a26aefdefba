"""Addresses of Jupyter servers, as people copy them, and connections to kernels."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import itertools
import json
import os
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import websocket
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from tests._slow_servers import slow_names, trickle, wait_for_end
from tfd_notebook import errors
from tfd_notebook.launchers import jupyter
from tfd_notebook.launchers.client import limited_transport
from tfd_notebook.launchers.client.jupyter_server import JupyterServer, split
from tfd_notebook.launchers.jupyter import JupyterHost, KernelChannel
from tfd_notebook.net import validation
from tfd_notebook.net.certificates import CertificateAuthority

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


def test_token_that_a_header_cannot_have_is_not_quoted() -> None:
    server = JupyterServer("https://one:8888", "SECRET\n")
    assert server.headers == {"Authorization": "token SECRET"}
    for token in ("SEC\nRET", "SECRET\x00", "SECRET\u00e9"):
        with pytest.raises(errors.UsageError, match="invalid token") as caught:
            JupyterServer("https://one:8888", token)
        assert "SEC" not in str(caught.value)


# Servers that attack


@pytest.fixture(autouse=True)
def _short_close(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "tfd_notebook.launchers.client.jupyter_server"
    monkeypatch.setattr(f"{module}._CLOSE_SECONDS", 0.05, raising=False)


KERNELS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[socket.socket, bytes], None]], JupyterServer]]:
    """Return a function that starts a server, which passes each client and its request on."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())

        def start(reply: Callable[[socket.socket, bytes], None]) -> JupyterServer:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve_one() -> None:
                channel, _ = listener.accept()
                with channel:
                    channel.settimeout(60)
                    request = b""
                    while not request.endswith(b"\r\n\r\n"):
                        if not (data := channel.recv(65_536)):
                            return
                        request += data
                    with contextlib.suppress(ConnectionError):
                        reply(channel, request)

            stack.callback(pool.submit(serve_one).result)
            return JupyterServer(f"http://127.0.0.1:{listener.getsockname()[1]}", token="")

        yield start


def accept(channel: socket.socket, request: bytes, headers: bytes = b"") -> None:
    """Complete the handshake of a websocket, with more headers."""
    (key,) = re.findall(rb"Sec-WebSocket-Key: (\S+)", request)
    digest = base64.b64encode(hashlib.sha1(key + _GUID).digest())
    channel.sendall(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\n" + headers + b"Sec-WebSocket-Accept: " + digest + b"\r\n\r\n"
    )


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_transport, "MAX_REPLY_BYTES", 1000)
    monkeypatch.setattr(limited_transport, "MAX_HANDSHAKE_BYTES", 1000)
    monkeypatch.setattr(validation, "MAX_MESSAGE_BYTES", 1000)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("length", [b"Content-Length: 600000000\r\n", b""])
def test_long_reply_is_not_received(serve: Any, length: bytes) -> None:
    sent = 0

    def reply(channel: socket.socket, request: bytes) -> None:
        nonlocal sent
        channel.sendall(KERNELS + length + b"\r\n")
        for _ in range(600):
            channel.sendall(bytes(1_000_000))
            sent += 1

    with pytest.raises(errors.InvalidMessage, match="longer than 1000 bytes"):
        serve(reply).request("GET", "/api/kernels")
    assert sent < 20  # the buffers of the system take the rest


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"gzip, gzip"])
def test_compressed_reply_is_not_unpacked(serve: Any, encoding: bytes) -> None:
    requests: list[bytes] = []

    def reply(channel: socket.socket, request: bytes) -> None:
        requests.append(request)
        bomb = gzip.compress(b" " * 100_000 + b"[]")
        head = KERNELS + b"Content-Encoding: " + encoding
        channel.sendall(head + b"\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb)
        wait_for_end(channel)

    with pytest.raises(errors.InvalidMessage, match="expected no compression"):
        serve(reply).request("GET", "/api/kernels")
    assert b"Accept-Encoding: identity" in requests[0]


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\nX: ",
        KERNELS + b"Content-Length: 2000\r\n\r\n",
        KERNELS + b"\r\n",
        KERNELS + b"Transfer-Encoding: chunked\r\n\r\n800\r\n",
    ],
    ids=["header", "length", "until the end", "chunked"],
)
def test_slow_reply_ends_at_the_deadline(
    serve: Any, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_transport, "REQUEST_SECONDS", 0.05)
    server = serve(lambda channel, request: trickle(channel, start))
    with pytest.raises(TimeoutError, match=r"no complete reply within 0\.05 s"):
        server.request("GET", "/api/kernels")


def test_silent_server_reaches_the_same_deadline(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_transport, "REQUEST_SECONDS", 0.05)
    with pytest.raises(TimeoutError, match=r"no complete reply within 0\.05 s"):
        serve(lambda channel, request: wait_for_end(channel)).request("GET", "/api/kernels")


@pytest.fixture
def proxied(serve: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], JupyterServer]:
    """Return a function that starts an HTTP proxy, and returns a server behind it."""
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)

    def start(reply: Callable[[socket.socket, bytes], None], scheme: str) -> JupyterServer:
        monkeypatch.setenv(f"{scheme}_proxy", serve(reply).url)
        return JupyterServer(f"{scheme}://host.test:8888", token="")

    return start


TUNNEL = b"HTTP/1.1 200 Connection established\r\n"


def long_tunnel(channel: socket.socket, request: bytes) -> None:
    assert request.startswith(b"CONNECT host.test:8888 HTTP/1.")
    channel.sendall(TUNNEL + b"X: x\r\n" * 400_000 + b"\r\n")
    wait_for_end(channel)
    raise AssertionError("the client has read the whole reply")


def test_reply_of_a_proxy_to_a_request_has_a_limit(proxied: Any) -> None:
    with pytest.raises((OSError, errors.InvalidMessage), match="longer than 65536 bytes"):
        proxied(long_tunnel, "https").request("GET", "/api/kernels")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_reply_of_a_proxy_to_a_websocket_has_a_limit(proxied: Any, scheme: str) -> None:
    with pytest.raises(OSError, match="longer than 65536 bytes"):
        proxied(long_tunnel, scheme).connect("kernel")


def test_slow_reply_of_a_proxy_ends_at_the_deadline(
    proxied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfd_notebook.net.reconnect.SILENT_SECONDS", 0.3)
    monkeypatch.setattr(limited_transport, "REQUEST_SECONDS", 0.3)
    with pytest.raises(OSError, match=r"no (connection|complete reply) within|timed out"):
        proxied(lambda channel, request: trickle(channel, TUNNEL), "http").connect("kernel")
    with pytest.raises(TimeoutError, match=r"no complete reply within 0\.3 s"):
        proxied(lambda channel, request: trickle(channel, TUNNEL), "https").request("GET", "/")


def test_websocket_opens_through_a_proxy(proxied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[bytes] = []

    def reply(channel: socket.socket, request: bytes) -> None:
        requests.append(request)
        channel.sendall(TUNNEL + b"\r\n")
        accept(channel, channel.recv(65_536))
        wait_for_end(channel)

    server = proxied(reply, "http")
    monkeypatch.setenv("http_proxy", os.environ["http_proxy"].replace("//", "//user:word@"))
    server.connect("kernel").close()
    assert b"Proxy-Authorization: Basic " + base64.b64encode(b"user:word") in requests[0]
    assert b"Host: host.test:8888\r\n" in requests[0]


def test_name_of_a_host_that_is_not_resolved_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jupyter, "_NAME_SECONDS", 0.05)
    host = JupyterHost(JupyterServer("http://host.test:8888", token=""), "python3")
    with slow_names(), pytest.raises(TimeoutError, match=r"no connection within 0\.05 s"):
        host.connect("agent", start=True)


@pytest.mark.parametrize(
    "proxy",
    [
        "http://ada:PASS/WORD@127.0.0.1:1",
        "http://ada:PASS#WORD@127.0.0.1:1",
        "http://ada:PASS?WORD@127.0.0.1:1",
        "http://ada:PASS[WORD@127.0.0.1:1",
        "http://ada:1/WORD@127.0.0.1:1",
        "ada:PASS/WORD@127.0.0.1:1",
        "http://ada:PASSWORD@127.0.0.1:x",
        "http://ada:PASSWORD@127.0.0.1:99999",
        "http://ada:PASSWORD@",
    ],
)
@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "HTTPS_PROXY"])
def test_error_does_not_quote_the_password_of_a_proxy(
    monkeypatch: pytest.MonkeyPatch, variable: str, proxy: str
) -> None:
    for name in ("no_proxy", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(variable, proxy)
    server = JupyterServer(f"{variable.partition('_')[0].lower()}://host.test:8888", token="")
    for call in (lambda: server.request("GET", "/api"), lambda: server.connect("kernel")):
        with pytest.raises(errors.LaunchError) as caught:
            call()
        assert f"the variable {variable} is not a valid address\nNext: encode / as %2F" in str(
            caught.value
        )
        assert not re.search("PASS|WORD|ada", str(caught.value))
    monkeypatch.setenv("no_proxy", "host.test")  # not used
    monkeypatch.setattr(limited_transport, "CONNECT_SECONDS", 0.01)
    with slow_names(), pytest.raises(OSError, match="no connection within"):
        server.request("GET", "/api")


@pytest.fixture
def certified(tmp_path: Path) -> ssl.SSLContext:
    """Return the context of a server at localhost, whose authority is in ``ca.pem``."""
    authority = CertificateAuthority()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, SHA256())
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    certificate = authority.sign(request.public_bytes(pem).decode(), "localhost")
    (tmp_path / "server.pem").write_bytes(secret + certificate.encode())
    (tmp_path / "ca.pem").write_text(authority.certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    return context


@pytest.mark.parametrize("is_trusted", [True, False])
def test_websocket_through_a_proxy_checks_the_certificate(
    proxied: Any, certified: ssl.SSLContext, tmp_path: Path, is_trusted: bool, monkeypatch: Any
) -> None:
    def reply(channel: socket.socket, request: bytes) -> None:
        channel.sendall(TUNNEL + b"\r\n")
        with (
            contextlib.suppress(ssl.SSLError),
            certified.wrap_socket(channel, server_side=True) as encrypted,
        ):
            accept(encrypted, encrypted.recv(65_536))
            wait_for_end(encrypted)

    proxied(reply, "https")
    monkeypatch.setenv("no_proxy", "other.test")  # by default, localhost has no proxy
    other = CertificateAuthority().certificate
    if not is_trusted:
        (tmp_path / "ca.pem").write_text(other)
    server = JupyterServer("https://localhost:8888", token="", ca=str(tmp_path / "ca.pem"))
    if is_trusted:
        server.connect("kernel").close()
    else:
        with pytest.raises(errors.LaunchError, match="is not trusted"):
            server.connect("kernel")


def test_tls_of_a_silent_server_reaches_the_same_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_transport, "REQUEST_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        server = JupyterServer(f"https://127.0.0.1:{listener.getsockname()[1]}", token="")
        request = pool.submit(server.request, "GET", "/api/kernels")
        with pytest.raises(TimeoutError, match=r"no complete reply within 0\.3 s"):
            request.result(5)


def test_name_that_is_not_resolved_reaches_the_same_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limited_transport, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr("tfd_notebook.net.reconnect.SILENT_SECONDS", 0.3)
    with ThreadPoolExecutor(1) as pool, slow_names():
        server = JupyterServer("http://127.0.0.1:9", token="")
        with pytest.raises(TimeoutError, match=r"no complete reply within 0\.3 s"):
            pool.submit(server.request, "GET", "/api/kernels").result(5)
        with pytest.raises(OSError, match="no connection within"):
            pool.submit(server.connect, "kernel").result(5)


def test_nested_reply_is_refused(serve: Any) -> None:
    def reply(channel: socket.socket, request: bytes) -> None:
        channel.sendall(KERNELS + b"Content-Length: 100000\r\n\r\n" + b"[" * 100_000)
        wait_for_end(channel)

    with pytest.raises(errors.LaunchError, match="invalid JSON"):
        serve(reply).request("GET", "/api/kernels")


def test_reply_with_too_many_values_is_not_parsed(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MAX_VALUES", 10)
    text = json.dumps([{}] * 10).encode()

    def reply(channel: socket.socket, request: bytes) -> None:
        channel.sendall(KERNELS + b"Content-Length: %d\r\n\r\n" % len(text) + text)
        wait_for_end(channel)

    with pytest.raises(errors.InvalidMessage, match="more than 10 values"):
        serve(reply).request("GET", "/api/kernels")


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 101 Switching Protocols\r\nX: "])
def test_slow_handshake_ends_at_the_deadline(
    serve: Any, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfd_notebook.net.reconnect.SILENT_SECONDS", 0.05)
    server = serve(lambda channel, request: trickle(channel, start))
    with pytest.raises(OSError, match=r"no complete reply in time|timed out"):
        server.connect("kernel")


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nX: ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2000000000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
    ],
)
def test_long_handshake_is_not_received(serve: Any, start: bytes) -> None:
    sent = 0

    def reply(channel: socket.socket, request: bytes) -> None:
        nonlocal sent
        channel.sendall(start)
        for _ in range(100):
            channel.sendall(b"x" * 1_000_000)
            sent += 1

    with pytest.raises((OSError, errors.LaunchError)):
        serve(reply).connect("kernel")
    assert sent < 20


@pytest.mark.parametrize("line", [b"X: " + b"x" * 100_000 + b"\r\n", b"X: x\r\n" * 20_000])
def test_headers_of_a_handshake_have_a_limit(serve: Any, line: bytes) -> None:
    def reply(channel: socket.socket, request: bytes) -> None:
        accept(channel, request, line)
        wait_for_end(channel)

    with pytest.raises((OSError, errors.LaunchError), match="reply is too long"):
        serve(reply).connect("kernel").close()
    serve(lambda channel, request: accept(channel, request, line[:9] + b"\r\n")).connect(
        "kernel"
    ).close()


@pytest.mark.parametrize("sent", [b"x\r\n\r\n", b"HTTP/1.1 x y\r\n\r\n", b"\xff \xff\r\n\r\n"])
def test_invalid_handshake_is_refused(serve: Any, sent: bytes) -> None:
    def reply(channel: socket.socket, request: bytes) -> None:
        channel.sendall(sent)
        wait_for_end(channel)

    with pytest.raises((OSError, errors.LaunchError)):
        serve(reply).connect("kernel")


def frame(opcode: int, size: int, *, fin: bool = True) -> bytes:
    """Return the start of a frame of a websocket, without its data."""
    return struct.pack("!BBQ", opcode | fin << 7, 127, size)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    "sent",
    [
        frame(1, 300_000_000),
        frame(2, 2**63 - 1),
        frame(2, 900, fin=False) + bytes(900) + frame(0, 300_000_000),
        frame(9, 300_000_000),
    ],
    ids=["text", "binary", "fragments", "ping"],
)
def test_long_message_is_refused_before_it_arrives(serve: Any, sent: bytes) -> None:
    def reply(channel: socket.socket, request: bytes) -> None:
        accept(channel, request)
        channel.sendall(sent)  # and none of the data
        wait_for_end(channel)

    connection = serve(reply).connect("kernel")
    with pytest.raises(errors.InvalidMessage, match="longer than 1000 bytes"):
        next(connection.messages())
    connection.close()


def test_message_that_arrives_too_slowly_ends_the_connection(serve: Any) -> None:
    """A server that sends a byte every few seconds would never reach the timeout of a read."""

    def reply(channel: socket.socket, request: bytes) -> None:
        accept(channel, request)
        channel.sendall(b"\x89\x00" * 10 + b"\x81\x02ok")  # pings, and a message
        channel.sendall(b"\x01\x01." + b"\x00\x01." * 10)  # fragments of another one
        wait_for_end(channel)

    seconds = itertools.count(0, 10)  # the time of each read
    server = serve(reply)
    connection = limited_transport.LimitedWebSocket(lambda: next(seconds))
    connection.settimeout(60)
    connection.connect(server.url.replace("http", "ws"))
    assert connection.recv() == "ok"
    with pytest.raises(websocket.WebSocketProtocolException, match="too slowly"):
        connection.recv()
    connection.close(timeout=0.05)


@pytest.mark.parametrize("opcode", [1, 2], ids=["text", "binary"])
def test_message_with_too_many_values_is_not_parsed(
    serve: Any, monkeypatch: pytest.MonkeyPatch, opcode: int
) -> None:
    monkeypatch.setattr(validation, "MAX_VALUES", 10)
    text = json.dumps({"header": [{}] * 10}).encode()
    start = struct.pack("!II", 1, 8) if opcode == 2 else b""

    def reply(channel: socket.socket, request: bytes) -> None:
        accept(channel, request)
        channel.sendall(frame(opcode, len(start + text)) + start + text)
        wait_for_end(channel)

    connection = serve(reply).connect("kernel")
    with pytest.raises(errors.InvalidMessage, match="more than 10 values"):
        next(connection.messages())
    connection.close()


def test_line_before_the_handshake_has_a_limit(serve: Any) -> None:
    def reply(channel: socket.socket, request: bytes) -> None:
        accept(channel, request)
        kernels_request = json.loads(received_frame(channel))
        parent = {"msg_id": kernels_request["header"]["msg_id"]}
        content = {"name": "stdout", "text": "." * 600_000}
        message = {"header": {"msg_type": "stream"}, "parent_header": parent, "content": content}
        text = json.dumps(message).encode()
        with contextlib.suppress(OSError):
            for _ in range(10):
                channel.sendall(frame(1, len(text)) + text)
            wait_for_end(channel)

    channel = KernelChannel(serve(reply).connect("kernel"))
    with pytest.raises(errors.InvalidMessage, match="printed a line of over 1000000 characters"):
        list(channel.execute("code"))
    channel.close()


def received_frame(channel: socket.socket) -> bytes:
    """Return the data of a received frame, which has a mask and at least 126 bytes."""
    file = channel.makefile("rb")
    (size,) = struct.unpack("!2xH", file.read(4))
    mask, data = file.read(4), file.read(size)
    return bytes(byte ^ mask[position % 4] for position, byte in enumerate(data))


def test_text_is_checked_by_the_decoder_only(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(
        {"header": {"msg_type": "other"}, "parent_header": {}, "content": {"text": "ö"}},
        ensure_ascii=False,
    ).encode()
    first, second = text[:50], text[50:]

    def reply(channel: socket.socket, request: bytes) -> None:
        accept(channel, request)
        channel.sendall(frame(1, len(text)) + text)
        channel.sendall(frame(1, len(first), fin=False) + first + frame(0, 0, fin=False))
        channel.sendall(frame(0, len(second)) + second)
        channel.sendall(frame(1, 1) + b"\xff")
        wait_for_end(channel)

    def fail(_: bytes) -> bool:
        raise AssertionError("the check of websocket-client was called")

    monkeypatch.setattr("websocket._abnf.validate_utf8", fail)
    connection = serve(reply).connect("kernel")
    received = list(connection.messages())
    assert [message["content"] for message in received] == [{"text": "ö"}] * 2
    connection.close()


@pytest.mark.parametrize(
    "offsets", [[12, 500, 12, 500], [12, 2**32 - 1, 12], range(20_000)], ids=lambda o: str(o)[:12]
)
def test_buffers_cannot_need_more_memory_than_their_message(serve: Any, offsets: Any) -> None:
    head = struct.pack(f"!{1 + len(offsets)}I", len(offsets), *offsets)

    def reply(channel: socket.socket, request: bytes) -> None:
        accept(channel, request)
        channel.sendall(frame(2, len(head) + 500) + head + bytes(500))
        wait_for_end(channel)

    connection = serve(reply).connect("kernel")
    with pytest.raises(errors.InvalidMessage, match="expected JSON and its buffers"):
        next(connection.messages())
    connection.close()


def test_slow_message_does_not_delay_the_close(serve: Any) -> None:
    arrived = threading.Event()

    def reply(channel: socket.socket, request: bytes) -> None:
        accept(channel, request)
        arrived.set()
        trickle(channel, frame(2, 1_000_000))

    connection = serve(reply).connect("kernel")
    assert arrived.wait(60)
    connection.close()
    assert list(connection.messages()) == []


def test_connection_that_the_server_has_closed_is_closed(serve: Any) -> None:
    ended = threading.Event()

    def reply(channel: socket.socket, request: bytes) -> None:
        accept(channel, request)
        channel.sendall(b"\x88\x00")  # a frame that closes the connection
        wait_for_end(channel)
        ended.set()

    connection = serve(reply).connect("kernel")
    assert list(connection.messages()) == []
    connection.close()
    assert ended.wait(60)
