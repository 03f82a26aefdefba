"""Authenticated channels: accepted and rejected clients and messages."""

from __future__ import annotations

import functools
import json
import os
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tfd_notebook.net import secure_channel

SECONDS = 30.0


def echo(channel: secure_channel.AuthenticatedChannel) -> None:
    while True:
        header, body = channel.receive()
        channel.send({**header, "size": len(body)}, body)


@pytest.fixture(params=["tcp", "unix"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[secure_channel.Server]:
    path = tmp_path / "socket" if request.param == "unix" else None
    with secure_channel.serve(b"secret", echo, path=path) as running:
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
    with secure_channel.connect(server.address, b"secret", SECONDS) as channel:
        for size in (0, 1, 70_000, 3_000_000):
            sent = os.urandom(size)
            channel.send({"n": size, "text": "ö"}, sent)
            header, body = channel.receive(SECONDS)
            assert header == {"n": size, "text": "ö", "size": size}
            assert body == sent
            assert not body.readonly


def test_many_buffers_form_one_body(server: secure_channel.Server) -> None:
    parts = [b"ab", bytearray(b"c"), memoryview(b"xyz")[1:], b""] * 600
    with secure_channel.connect(server.address, b"secret", SECONDS) as channel:
        channel.send({}, parts)
        assert channel.receive(SECONDS)[1] == b"".join(map(bytes, parts))


def test_timeout_leaves_the_channel_usable(server: secure_channel.Server) -> None:
    with secure_channel.connect(server.address, b"secret", SECONDS) as channel:
        with pytest.raises(TimeoutError):
            channel.receive(0.01)
        channel.send({"still": True})
        assert channel.receive(SECONDS)[0]["still"]


def test_waiting_receiver_is_notified_of_the_end(server: secure_channel.Server) -> None:
    channel = secure_channel.connect(server.address, b"secret", SECONDS)
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
    channel = secure_channel.connect(server.address, b"secret", SECONDS)
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
    with pytest.raises(PermissionError, match="secret differs"):
        secure_channel.connect(server.address, b"Secret", SECONDS)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["TFD_BOMB"],)


@pytest.mark.parametrize(
    "what", ["pickle", "garbage", "http", "zeros", "nothing", "header without proof"]
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
        "header without proof": struct.pack("!IQ", len(header), 0) + header + bytes(100),
    }[what]
    with raw(server.address) as peer:
        try:
            peer.sendall(sent)
            peer.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is already closed
        # Only the challenge, which is random.
        assert len(until_end(peer)) <= 40
    assert not bomb.exists()
    with secure_channel.connect(server.address, b"secret", SECONDS) as channel:
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
            created[-1].recv(1)  # it was accepted
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
    monkeypatch.setattr(secure_channel, "PROOF_SECONDS", SECONDS)
    with secure_channel.serve(b"secret", echo) as server:
        many(source, server.address, 64)
        with secure_channel.connect(server.address, b"secret", SECONDS) as channel:
            channel.send({"well": True})
            assert channel.receive(SECONDS)[0]["well"]


def test_unauthenticated_connections_per_address_are_limited(
    many: Callable[[str, str, int], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_channel, "PROOF_SECONDS", SECONDS)
    with secure_channel.serve(b"secret", echo) as server:
        (second_client,) = many("127.0.0.3", server.address, 1)
        idle = many("127.0.0.2", server.address, 20)
        for peer in idle[:4]:
            until_end(peer)
        for peer in (second_client, *idle[4:]):
            peer.settimeout(0)
            peer.recv(100)  # the rest of the challenge
            with pytest.raises(BlockingIOError):
                peer.recv(1)


def test_total_of_unauthenticated_connections_is_limited(
    many: Callable[[str, str, int], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_channel, "PROOF_SECONDS", SECONDS)
    with secure_channel.serve(b"secret", echo) as server:
        (first,) = many("127.0.0.2", server.address, 1)
        idle = [many(f"127.0.0.{n}", server.address, 16) for n in range(3, 7)]
        # The oldest connection of the address with the most connections is closed.
        until_end(idle[0][0])
        first.settimeout(0)
        first.recv(100)
        with pytest.raises(BlockingIOError):
            first.recv(1)


def test_unauthenticated_connection_is_closed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert secure_channel.PROOF_SECONDS == 2.0
    monkeypatch.setattr(secure_channel, "PROOF_SECONDS", 0.1)
    with secure_channel.serve(b"secret", echo) as server, raw(server.address) as peer:
        assert len(until_end(peer)) == 40


def test_vanished_peer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        secure_channel.serve(b"secret", echo) as server,
        secure_channel.connect(server.address, b"secret", SECONDS) as channel,
    ):
        option = functools.partial(channel._socket.getsockopt, socket.IPPROTO_TCP)
        assert channel._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        probes = option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT)
        assert option(socket.TCP_KEEPIDLE) + probes <= 60
        assert option(socket.TCP_USER_TIMEOUT) == 60_000


def test_listener_must_authenticate() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"TFDSEAL1" + bytes(32))
                peer.recv(4096)
                peer.sendall(bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(PermissionError, match="server does not have the secret"):
            secure_channel.connect(f"127.0.0.1:{listener.getsockname()[1]}", b"secret", SECONDS)
        thread.join()


def test_proof_cannot_be_replayed(server: secure_channel.Server) -> None:
    if server.address.startswith("unix:"):
        return
    recorded = bytearray()
    host, _, port = server.address.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def between() -> None:
            peer, _ = listener.accept()
            with peer, socket.create_connection((host, int(port))) as way:
                peer.sendall(way.recv(4096))
                proof = peer.recv(4096)
                recorded.extend(proof)
                way.sendall(proof)
                peer.sendall(way.recv(4096))

        thread = threading.Thread(target=between)
        thread.start()
        secure_channel.connect(f"127.0.0.1:{listener.getsockname()[1]}", b"secret", SECONDS).close()
        thread.join()
    with raw(server.address) as peer:
        peer.sendall(recorded)
        assert len(until_end(peer)) == 40


def test_modified_message_ends_the_channel() -> None:
    arrived: queue.Queue[object] = queue.Queue()

    def receive(channel: secure_channel.AuthenticatedChannel) -> None:
        try:
            while True:
                arrived.put(channel.receive()[0])
        except (OSError, EOFError) as error:
            arrived.put(error)

    with (
        secure_channel.serve(b"secret", receive) as server,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        host, _, port = server.address.rpartition(":")

        def between() -> None:
            peer, _ = listener.accept()
            with peer, socket.create_connection((host, int(port))) as way:
                peer.sendall(way.recv(4096))
                way.sendall(peer.recv(4096))
                peer.sendall(way.recv(4096))
                message = peer.recv(4096)
                way.sendall(message)
                # Replay the same bytes.
                way.sendall(message)
                until_end(way)

        thread = threading.Thread(target=between)
        thread.start()
        channel = secure_channel.connect(
            f"127.0.0.1:{listener.getsockname()[1]}", b"secret", SECONDS
        )
        channel.send({"once": True})
        assert arrived.get(timeout=SECONDS) == {"once": True}
        assert "authentication failed" in str(arrived.get(timeout=SECONDS))
        thread.join()
        channel.close()


def test_secret_is_not_in_its_repr() -> None:
    secret = secure_channel.Secret.new()
    assert len(secret) == 32
    shown = f"{secret} {secret!r} {[secret]}"
    assert bytes(secret).hex() not in shown
    assert repr(bytes(secret)) not in shown
    assert pickle.loads(pickle.dumps(secret)) == secret
