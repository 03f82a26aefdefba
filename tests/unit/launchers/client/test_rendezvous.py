"""Attacks by a host of a cluster that connects to the kernel in the place of another one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import socket
import ssl
import struct
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest

from tfd_notebook.agent.bridges import rendezvous as bridge
from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import LaunchError
from tfd_notebook.launchers.client import engine_workers
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.launchers.client.rendezvous import LineChannel, Rendezvous, RendezvousHost
from tfd_notebook.net import secure_channel
from tfd_notebook.net.tls_socket import TlsSocket, pinned_context

KEY = {"host": "0", "process": 1}


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous("127.0.0.1")
    yield rendezvous
    rendezvous.close()


def connect_from(
    address: str, rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch, **key: str
) -> secure_channel.AuthenticatedChannel:
    with monkeypatch.context() as patch:
        connect = functools.partial(socket.create_connection, source_address=(address, 0))
        patch.setattr(socket, "create_connection", connect)
        channel = secure_channel.connect(f"127.0.0.1:{rendezvous.port}", rendezvous.secret)
    channel.send({**KEY, **key})
    return channel


def test_other_host_cannot_take_the_session_of_a_host(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hosts of a cluster have the secret of its channels, and can send any key."""
    host = RendezvousHost("one", rendezvous)
    rendezvous.expect({("0", 1): host})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for mode in ("start", "reconnect"):
            session = pool.submit(host.connect, "0123456789ab", mode == "start")
            with connect_from("127.0.0.1", rendezvous, monkeypatch) as honest:
                assert honest.receive(60)[0] == {"agent": "0123456789ab", "mode": mode}
            with pytest.raises(OSError, match="closed"):
                session.result(60)
            with (
                connect_from("127.0.0.2", rendezvous, monkeypatch) as liar,
                pytest.raises(EOFError),
            ):
                liar.receive(60)
    host.close()


def test_process_at_the_same_address_cannot_take_the_session_of_a_host(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes behind one gateway have one address, and Slurm's nodes have numbers as keys."""
    host = RendezvousHost("one", rendezvous)
    rendezvous.expect({("0", 1): host})
    for token in ("first", "second", "", "first"):
        with (
            concurrent.futures.ThreadPoolExecutor(1) as pool,
            connect_from("127.0.0.1", rendezvous, monkeypatch, token=token) as channel,
        ):
            if token == "first":
                session = pool.submit(host.connect, "0123456789ab", True)
                assert channel.receive(60)[0] == {"agent": "0123456789ab", "mode": "start"}
                channel.close()
                with pytest.raises(OSError, match="closed"):
                    session.result(60)
            else:
                with pytest.raises(EOFError):
                    channel.receive(60)
    host.close()


def test_end_of_a_process_is_read_before_its_agent_ends(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends its agent when this connection is closed, and the agent reports that."""
    host = RendezvousHost("one", rendezvous)
    client = AgentClient("0123456789ab", "one", lambda data: None, reconnects=True)
    host.session = types.SimpleNamespace(client=client)  # type: ignore[assignment]
    rendezvous.expect({("0", 1): host})
    with connect_from("127.0.0.1", rendezvous, monkeypatch) as channel:
        channel.send({"ended": "its worker\x1b has ended"})
        with pytest.raises(EOFError):
            channel.receive(60)
        assert client.why_lost == "one: its worker\ufffd has ended"
    host.close()


def test_key_of_a_bridge_cannot_be_guessed() -> None:
    """Identity and pid of a worker are known to other workers of its host."""
    handshakes = [bridge.describe("127.0.0.1:1") for _ in range(2)]
    tokens = {handshake["token"] for handshake in handshakes}
    assert len(tokens) == 2
    keys: list[Any] = []

    def start(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for number, handshake in enumerate(handshakes):
            yield str(number), reply(handshake, number + 1)

    class Recorded(Rendezvous):
        def expect(self, hosts: Any) -> None:
            keys.extend(hosts)
            super().expect(hosts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_workers, "Rendezvous", Recorded)
        hosts = engine_workers.hosts_of_workers(
            start, bound="127.0.0.1", grace=1.0, end_reason="over"
        )
    assert {token for token, _ in keys} == tokens
    for host in hosts:
        host.close()


def reply(handshake: dict[str, Any], process: int) -> dict[str, Any]:
    line = stdio.HANDSHAKE + json.dumps(handshake)
    return {"host": "one", "process": process, "line": line}


def test_host_that_cannot_reach_this_one_gets_the_address(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfd_notebook.launchers.client.rendezvous._CONNECT_SECONDS", 0.0)
    host = RendezvousHost("one", rendezvous)
    rendezvous.expect({("0", 1): host})
    with pytest.raises(LaunchError) as caught:
        host.open_session(None, 1.0)
    address = f"127.0.0.1:{rendezvous.port}"
    assert f"one failed: its process did not connect to {address}" in caught.value.what
    assert f"reaches {address} (TCP)" in str(caught.value.fix)
    host.close()


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Is released when this process begins to read a message of a host."""
    began = threading.Semaphore(0)
    receive = secure_channel.AuthenticatedChannel.receive

    def recorded(*arguments: Any, **options: Any) -> Any:
        began.release()
        return receive(*arguments, **options)

    monkeypatch.setattr(secure_channel.AuthenticatedChannel, "receive", recorded)
    return began


@contextlib.contextmanager
def slow_host(rendezvous: Rendezvous) -> Iterator[TlsSocket]:
    """Yield a connection of a host, which has sent its key and can send parts of messages."""
    connected = socket.create_connection(("127.0.0.1", rendezvous.port))
    context = pinned_context(rendezvous.secret, ssl.PROTOCOL_TLS_CLIENT)
    sender = TlsSocket(connected, context, time.monotonic() + 60)
    key = json.dumps(KEY).encode()
    sender.sendmsg([memoryview(struct.pack("!IQ", len(key), 0) + key)])
    with connected:
        yield sender


def test_slow_message_does_not_delay_the_close(
    rendezvous: Rendezvous, began: threading.Semaphore
) -> None:
    host = RendezvousHost("one", rendezvous)
    rendezvous.expect({("0", 1): host})
    with slow_host(rendezvous) as sender, concurrent.futures.ThreadPoolExecutor(1) as pool:
        sender.sendmsg([memoryview(b"\0")])
        for _ in ("key", "message"):
            assert began.acquire(timeout=60)
        pool.submit(host.close).result(4)


def test_close_ends_a_session_that_a_slow_host_opens(
    rendezvous: Rendezvous, began: threading.Semaphore
) -> None:
    host = RendezvousHost("one", rendezvous)
    rendezvous.expect({("0", 1): host})
    with slow_host(rendezvous) as sender, concurrent.futures.ThreadPoolExecutor(2) as pool:
        session = pool.submit(host.connect, "0123456789ab", True)
        for _ in ("key", "answer"):
            assert began.acquire(timeout=60)
        sender.sendmsg([memoryview(b"\0")])
        pool.submit(host.close).result(4)
        with pytest.raises(OSError, match="closed"):
            session.result(4)


def test_answer_of_a_slow_host_ends_at_the_deadline(
    rendezvous: Rendezvous, began: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfd_notebook.launchers.client.rendezvous._ANSWER_SECONDS", 1.0)
    host = RendezvousHost("one", rendezvous)
    rendezvous.expect({("0", 1): host})
    with slow_host(rendezvous) as sender, concurrent.futures.ThreadPoolExecutor(1) as pool:
        session = pool.submit(host.connect, "0123456789ab", True)
        for _ in ("key", "answer"):
            assert began.acquire(timeout=60)
        sender.sendmsg([memoryview(b"\0")])
        with pytest.raises(OSError, match="in time"):
            session.result(20)
    host.close()


def test_large_message_to_an_agent_is_divided(rendezvous: Rendezvous) -> None:
    """Each part must arrive within a timeout. No other message arrives in between."""
    large, small = b"x" * 10_000_000, b"y"

    def send(channel: secure_channel.AuthenticatedChannel) -> None:
        lines = LineChannel(channel)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(lines.send, (large, small)))

    with secure_channel.serve(rendezvous.secret, send) as server:
        received = b""
        with secure_channel.connect(server.address, rendezvous.secret) as channel:
            while len(received) < len(large) + len(small):
                _, part = channel.receive(60)
                assert len(part) <= 1 << 16
                received += part
    assert received in (large + small, small + large)
