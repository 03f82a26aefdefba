"""Attacks by a host of a cluster that connects to the kernel in the place of another one."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import socket
import types
from collections.abc import Iterator
from typing import Any

import pytest

from tfd_notebook.agent.bridges import rendezvous as bridge
from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import LaunchError
from tfd_notebook.launchers.client import engine_workers
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.launchers.client.rendezvous import Rendezvous, RendezvousHost
from tfd_notebook.net import secure_channel

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
