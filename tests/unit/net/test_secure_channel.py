"""Authenticated channels: accepted and rejected clients and messages."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import queue
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tfd_notebook.net import secure_channel, unix_socket
from tfd_notebook.spark.feed import decode

SECONDS = 60.0
SECRET = secure_channel.Secret.new()


def echo(channel: secure_channel.AuthenticatedChannel) -> None:
    while True:
        header, body = channel.receive()
        channel.send({**header, "size": len(body)}, body)


@pytest.fixture(params=["tcp", "unix"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[secure_channel.Server]:
    path = tmp_path / "socket" if request.param == "unix" else None
    with secure_channel.serve(SECRET, echo, path=path) as running:
        yield running


def raw(address: str) -> socket.socket:
    if address.startswith("unix:"):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        peer = socket.create_connection((host, int(port)))
    peer.settimeout(SECONDS)
    return peer


def until_end(peer: socket.socket) -> bytes:
    taken = b""
    try:
        while data := peer.recv(4096):
            taken += data
    except ConnectionResetError:
        pass
    return taken


def test_headers_and_bodies_are_echoed(server: secure_channel.Server) -> None:
    with secure_channel.connect(server.address, SECRET, SECONDS) as channel:
        for size in (0, 1, 70_000, 3_000_000):
            sent = os.urandom(size)
            channel.send({"n": size, "text": "ö"}, sent)
            header, body = channel.receive(SECONDS)
            assert header == {"n": size, "text": "ö", "size": size}
            assert body == sent
            assert not body.readonly


def test_many_buffers_form_one_body(server: secure_channel.Server) -> None:
    parts = [b"ab", bytearray(b"c"), memoryview(b"xyz")[1:], b""] * 600
    with secure_channel.connect(server.address, SECRET, SECONDS) as channel:
        channel.send({}, parts)
        assert channel.receive(SECONDS)[1] == b"".join(map(bytes, parts))


@pytest.mark.parametrize("arriving", [0, 100, 1000, 5000])
def test_memory_grows_with_the_data_that_arrives(
    arriving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_channel, "FIRST_ALLOCATION", 64, raising=False)
    sizes: list[int] = []

    def allocate(size: int) -> bytearray:
        sizes.append(size)
        return bytearray(min(size, 10_000))

    sender, receiver = socket.socketpair()
    with sender, secure_channel.AuthenticatedChannel(receiver) as channel:
        # The size of the header, the size of the body (2 GiB), and an empty header.
        sender.sendall(struct.pack("!IQ", 2, secure_channel.MAX_BODY) + b"{}" + bytes(arriving))
        sender.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError, match="middle of a message"):
            channel.receive(SECONDS, allocate)
    assert max(sizes) <= max(64, 2 * arriving)


def test_body_larger_than_the_first_allocation_arrives_complete(
    server: secure_channel.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_channel, "FIRST_ALLOCATION", 1000)
    with secure_channel.connect(server.address, SECRET, SECONDS) as channel:
        for size in (999, 1000, 1001, 2000, 70_001):
            sent = os.urandom(size)
            channel.send({}, sent)
            assert channel.receive(SECONDS, decode.aligned_buffer)[1] == sent


def test_timeout_leaves_the_channel_usable(server: secure_channel.Server) -> None:
    with secure_channel.connect(server.address, SECRET, SECONDS) as channel:
        with pytest.raises(TimeoutError):
            channel.receive(0.01)
        channel.send({"still": True})
        assert channel.receive(SECONDS)[0]["still"]


def test_waiting_receiver_is_notified_of_the_end(server: secure_channel.Server) -> None:
    channel = secure_channel.connect(server.address, SECRET, SECONDS)
    ended: queue.Queue[BaseException] = queue.Queue()

    def wait() -> None:
        try:
            channel.receive()
        except (EOFError, OSError) as error:
            ended.put(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    server.close()
    assert isinstance(ended.get(timeout=SECONDS), (EOFError, OSError))
    waiting.join()
    channel.close()
    with pytest.raises(OSError):  # noqa: PT011
        channel.send({})


def test_close_wakes_the_local_receiver(server: secure_channel.Server) -> None:
    channel = secure_channel.connect(server.address, SECRET, SECONDS)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises((EOFError, OSError)):
            channel.receive()
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    channel.close()
    assert ended.wait(SECONDS)
    waiting.join()


def test_wrong_secret_is_rejected(server: secure_channel.Server) -> None:
    with pytest.raises(PermissionError, match=r"secrets? differs?"):
        secure_channel.connect(server.address, secure_channel.Secret.new(), SECONDS)


def test_client_without_a_certificate_is_rejected() -> None:
    channels: queue.Queue[object] = queue.Queue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        secure_channel.serve(SECRET, channels.put) as server,
        raw(server.address) as peer,
        context.wrap_socket(peer) as client,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        client.recv(1)
    assert channels.empty()


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["TFD_BOMB"],)


@pytest.mark.parametrize(
    "what", ["pickle", "garbage", "http", "zeros", "nothing", "header without authentication"]
)
def test_unauthenticated_client_gets_no_data(
    server: secure_channel.Server, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = tmp_path / "bomb"
    monkeypatch.setenv("TFD_BOMB", str(bomb))
    blob = pickle.dumps(Bomb())
    header = json.dumps({"do": "end"}).encode()
    sent = {
        "pickle": blob * 10,
        "garbage": os.urandom(10_000),
        "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"x" * 100,
        "zeros": b"TFDSEAL1" + bytes(64),
        "nothing": b"",
        "header without authentication": struct.pack("!IQ", len(header), 0) + header + bytes(100),
    }[what]
    with raw(server.address) as peer:
        try:
            peer.sendall(sent)
            peer.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is already closed
        # At most an alert of TLS.
        assert len(until_end(peer)) <= 7
    assert not bomb.exists()
    with secure_channel.connect(server.address, SECRET, SECONDS) as channel:
        channel.send({"well": True})
        assert channel.receive(SECONDS)[0]["well"]


@pytest.fixture
def many() -> Iterator[Callable[[str, str, int], list[socket.socket]]]:
    """Return a function that opens idle connections from an address."""
    opened: list[socket.socket] = []

    def connect(source: str, address: str, count: int) -> list[socket.socket]:
        host, _, port = address.rpartition(":")
        created = []
        for _ in range(count):
            created.append(socket.create_connection((host, int(port)), SECONDS, (source, 0)))
            opened.append(created[-1])
        return created

    yield connect
    for peer in opened:
        peer.close()


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_idle_connections_do_not_block_other_clients(
    source: str,
    many: Callable[[str, str, int], list[socket.socket]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secure_channel, "AUTHENTICATION_SECONDS", SECONDS)
    with secure_channel.serve(SECRET, echo) as server:
        many(source, server.address, 64)
        with secure_channel.connect(server.address, SECRET, SECONDS) as channel:
            channel.send({"well": True})
            assert channel.receive(SECONDS)[0]["well"]


def test_unauthenticated_connections_per_address_are_limited(
    many: Callable[[str, str, int], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_channel, "AUTHENTICATION_SECONDS", SECONDS)
    with secure_channel.serve(SECRET, echo) as server:
        (second_client,) = many("127.0.0.3", server.address, 1)
        idle = many("127.0.0.2", server.address, 20)
        for peer in idle[:4]:
            until_end(peer)
        for peer in (second_client, *idle[4:]):
            peer.settimeout(0)
            with pytest.raises(BlockingIOError):
                peer.recv(1)


def test_total_of_unauthenticated_connections_is_limited(
    many: Callable[[str, str, int], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_channel, "AUTHENTICATION_SECONDS", SECONDS)
    with secure_channel.serve(SECRET, echo) as server:
        (first,) = many("127.0.0.2", server.address, 1)
        idle = [many(f"127.0.0.{n}", server.address, 16) for n in range(3, 7)]
        # The oldest connection of the address with the most connections is closed.
        until_end(idle[0][0])
        first.settimeout(0)
        with pytest.raises(BlockingIOError):
            first.recv(1)


def test_unauthenticated_connection_is_closed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert secure_channel.AUTHENTICATION_SECONDS == 2.0
    monkeypatch.setattr(secure_channel, "AUTHENTICATION_SECONDS", 0.1)
    with secure_channel.serve(SECRET, echo) as server, raw(server.address) as peer:
        assert until_end(peer) == b""


def test_vanished_peer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        secure_channel.serve(SECRET, echo) as server,
        secure_channel.connect(server.address, SECRET, SECONDS) as channel,
    ):
        connected = socket.socket(fileno=os.dup(channel.fileno()))
        option = functools.partial(connected.getsockopt, socket.IPPROTO_TCP)
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        probes = option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT)
        assert option(socket.TCP_KEEPIDLE) + probes <= 60
        assert option(socket.TCP_USER_TIMEOUT) == 60_000
        connected.close()


def test_listener_must_authenticate() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(PermissionError, match="authentication failed"):
            secure_channel.connect(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, SECONDS)
        thread.join()


def test_listener_on_a_unix_socket_must_answer(tmp_path: Path) -> None:
    with unix_socket.listen(tmp_path / "socket", 1) as listener:

        def pretend() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(bytes(8))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(PermissionError, match="another program listens"):
            secure_channel.connect(f"unix:{tmp_path}/socket", SECRET, SECONDS)
        thread.join()


class Proxy:
    """Forwards one TCP connection to a server, and records the bytes of both directions."""

    def __init__(
        self,
        address: str,
        change: Callable[[bytes], bytes] = bytes,
        forward: Callable[[socket.socket, bytes], None] = socket.socket.sendall,
    ) -> None:
        self.sent, self.received = bytearray(), bytearray()
        self._change = change
        self._send = forward
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._to = address
        self._thread = threading.Thread(target=self._forward)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._listener.close()

    def _forward(self) -> None:
        client, _ = self._listener.accept()
        server = raw(self._to)
        back = threading.Thread(target=self._copy, args=(server, client, self.received, bytes))
        back.start()
        self._copy(client, server, self.sent, self._change)
        back.join()
        client.close()
        server.close()

    def _copy(
        self,
        source: socket.socket,
        target: socket.socket,
        record: bytearray,
        change: Callable[[bytes], bytes],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                record.extend(data)
                self._send(target, change(data))
            target.shutdown(socket.SHUT_WR)


def slowly(send: Callable[[bytes], object], data: bytes, ended: threading.Event) -> None:
    """Send single bytes until `ended` is set or the receiver closes the connection."""
    with contextlib.suppress(OSError):
        for byte in data:
            if ended.wait(0.005):
                return
            send(bytes([byte]))


@pytest.fixture(params=["deadline", "rate"])
def timeout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float | None:
    """Return the timeout of a receiver; without one, messages have a rate."""
    if request.param == "deadline":
        return 0.3
    monkeypatch.setattr(secure_channel, "STALL_SECONDS", 0.3)
    return None


@pytest.mark.parametrize("size", [0, 10_000], ids=["header", "body"])
def test_slow_message_ends_at_the_deadline(timeout: float | None, size: int) -> None:
    ended = threading.Event()
    sender, receiver = socket.socketpair()
    message = struct.pack("!IQ", 1000, size) + (b"{}" + b" " * 998)[: 1000 * bool(size)]
    with sender, secure_channel.AuthenticatedChannel(receiver) as channel:
        sender.sendall(message)
        thread = threading.Thread(target=slowly, args=(sender.sendall, b" " * 10_000, ended))
        thread.start()
        with pytest.raises(TimeoutError):
            channel.receive(timeout)
        assert channel.closed
        ended.set()
        thread.join()


def test_slow_tls_record_ends_at_the_deadline(timeout: float | None) -> None:
    slow, ended = threading.Event(), threading.Event()
    errors: queue.Queue[BaseException] = queue.Queue()

    def receive(channel: secure_channel.AuthenticatedChannel) -> None:
        channel.receive(SECONDS)
        slow.set()
        try:
            channel.receive(timeout)
        except OSError as error:
            errors.put(error)
        ended.set()

    def forward(target: socket.socket, data: bytes) -> None:
        if slow.is_set():
            slowly(target.sendall, data, ended)
        else:
            target.sendall(data)

    with (
        secure_channel.serve(SECRET, receive) as server,
        Proxy(server.address, forward=forward) as proxy,
        secure_channel.connect(proxy.address, SECRET, SECONDS) as channel,
    ):
        channel.send({})
        assert slow.wait(SECONDS)
        channel.send({"text": "x" * 10_000})
        assert isinstance(errors.get(timeout=SECONDS), TimeoutError)


def test_recorded_connection_cannot_be_replayed() -> None:
    with secure_channel.serve(SECRET, echo) as server:
        with (
            Proxy(server.address) as proxy,
            secure_channel.connect(proxy.address, SECRET, SECONDS) as channel,
        ):
            channel.send({"once": True})
            channel.receive(SECONDS)
        with raw(server.address) as peer:
            peer.sendall(proxy.sent)
            assert b"once" not in until_end(peer)


def test_no_clear_text_travels() -> None:
    value = "value-of-an-environment-variable"
    with (
        secure_channel.serve(SECRET, echo) as server,
        Proxy(server.address) as proxy,
        secure_channel.connect(proxy.address, SECRET, SECONDS) as channel,
    ):
        channel.send({"env": {"PASSWORD": value}}, value.encode() * 10_000)
        header, body = channel.receive(SECONDS)
        assert header["env"] == {"PASSWORD": value}
        assert bytes(body) == value.encode() * 10_000
    for record in (proxy.sent, proxy.received):
        assert len(record) > len(body)
        assert not any(text in record for text in (value.encode(), b"PASSWORD", b'"env"'))


def test_modified_message_ends_the_channel() -> None:
    arrived: queue.Queue[object] = queue.Queue()
    damaging = threading.Event()

    def receive(channel: secure_channel.AuthenticatedChannel) -> None:
        try:
            while True:
                arrived.put(channel.receive()[0])
        except (OSError, EOFError) as error:
            arrived.put(error)

    def change(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if damaging.is_set() else data

    with (
        secure_channel.serve(SECRET, receive) as server,
        Proxy(server.address, change) as proxy,
        secure_channel.connect(proxy.address, SECRET, SECONDS) as channel,
    ):
        channel.send({"once": True})
        assert arrived.get(timeout=SECONDS) == {"once": True}
        damaging.set()
        channel.send({"twice": True})
        assert isinstance(arrived.get(timeout=SECONDS), ssl.SSLError)


def test_both_ends_send_and_receive_at_once(server: secure_channel.Server) -> None:
    bodies = [os.urandom(300_000) for _ in range(50)]
    with secure_channel.connect(server.address, SECRET, SECONDS) as channel:

        def send(thread: int) -> None:
            for n in range(thread, len(bodies), 2):
                channel.send({"n": n}, bodies[n])

        threads = [threading.Thread(target=send, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for _ in bodies:
            header, body = channel.receive(SECONDS)
            assert body == bodies[header["n"]]
        for thread in threads:
            thread.join()


def test_secret_is_not_in_its_repr() -> None:
    shown = f"{SECRET} {SECRET!r} {[SECRET]}"
    assert bytes(SECRET).hex() not in shown
    assert repr(bytes(SECRET)) not in shown
    assert pickle.loads(pickle.dumps(SECRET)) == SECRET
    assert secure_channel.Secret.new() != SECRET
