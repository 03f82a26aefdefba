"""Attacks by a host that claims to share its ports with another host or with the kernel."""

from __future__ import annotations

import concurrent.futures
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.launchers.client.handshake import HostHandshake
from tfd_notebook.launchers.client.shared_hosts import prove_identities
from tfd_notebook.launchers.remote import RemoteHost
from tfd_notebook.net import shared_loopback
from tfd_notebook.net.host import address_towards, identity


class Agent:
    """The part of an agent that proves its loopback; all of these share that of the test."""

    def __init__(self) -> None:
        self.servers: list[shared_loopback.NonceServer] = []

    def request(self, method: str, timeout: float, **arguments: Any) -> Any:
        return getattr(self, method)(**arguments)

    def serve_nonce(self, nonce: str) -> int:
        self.servers.append(shared_loopback.NonceServer(nonce))
        return self.servers[-1].port

    def read_nonce(self, port: int) -> str:
        return shared_loopback.read_nonce(port)


class Guessing(Agent):
    """An attacker on another host, whose own nonce arrives through a tunnel."""

    def read_nonce(self, port: int) -> str:
        return shared_loopback.new_nonce()


class Silent(Agent):
    def request(self, method: str, timeout: float, **arguments: Any) -> Any:
        raise errors.TimeLimit("no reply")


class Redirecting(Guessing):
    """An attacker that names a port of another program on the other host."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def serve_nonce(self, nonce: str) -> int:
        return self._port


class Host(RemoteHost):
    def __init__(self, agent: Agent, claimed: str) -> None:
        super().__init__("host")
        self.session = type("Session", (), {"client": agent})()
        self.handshake = HostHandshake("0", "3", "python", None, claimed, "")

    def connect(self, agent: str, start: bool) -> Any:
        raise NotImplementedError


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    started: list[Agent] = []
    yield started
    for agent in started:
        for server in agent.servers:
            server.close()


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def proven(agents: list[Agent], claimed: str, *present: Agent) -> list[Host]:
    agents.extend(present)
    hosts = [Host(agent, claimed) for agent in present]
    prove_identities(hosts)
    return hosts


def test_entries_of_one_host_share_an_identity(agents: list[Agent]) -> None:
    one, two, three = proven(agents, "boot:1", Agent(), Agent(), Agent())
    assert one.identity == two.identity == three.identity
    assert not any(host.is_local for host in (one, two, three))


def test_entries_of_this_host_are_local(agents: list[Agent]) -> None:
    one, two = proven(agents, identity(), Agent(), Agent())
    assert one.is_local
    assert two.is_local
    assert one.identity == two.identity


def test_different_claims_are_different_hosts(agents: list[Agent]) -> None:
    agents += [Agent(), Agent()]
    one, two = hosts = [Host(agents[0], "boot:1"), Host(agents[1], "boot:2")]
    prove_identities(hosts)
    assert one.identity != two.identity


@pytest.mark.parametrize("attacker", [Guessing, Silent])
def test_host_cannot_claim_to_be_the_kernels(agents: list[Agent], attacker: type[Agent]) -> None:
    liar, honest = proven(agents, identity(), attacker(), Agent())
    assert not liar.is_local
    assert honest.is_local
    assert liar.identity != honest.identity


@pytest.mark.parametrize("attacker", [Guessing, Silent])
@pytest.mark.parametrize("first", [True, False])
def test_host_cannot_claim_the_identity_of_another(
    agents: list[Agent], attacker: type[Agent], first: bool
) -> None:
    """The first host with an identity would serve the tasks of the others."""
    present = [attacker(), Agent()] if first else [Agent(), attacker()]
    hosts = proven(agents, "boot:1", *present, Agent())
    liar, honest = hosts[:2] if first else hosts[1::-1]
    assert liar.identity != honest.identity
    assert hosts[2].identity == honest.identity


def test_host_cannot_direct_another_to_a_program_there(
    agents: list[Agent], closed_port: int
) -> None:
    liar, honest = proven(agents, "boot:1", Redirecting(closed_port), Agent())
    assert liar.identity != honest.identity


def test_only_a_nonce_is_read(
    closed_port: int, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    assert shared_loopback.read_nonce(closed_port) == ""
    for sent in (secrets.token_hex(15), secrets.token_hex(17), "SSH-2.0-OpenSSH_9.9 0123456789ab"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            reading = pool.submit(shared_loopback.read_nonce, port)
            with listener.accept()[0] as peer:
                peer.sendall(sent.encode())
            assert reading.result(60) == ""
    with shared_loopback.NonceServer(sent := shared_loopback.new_nonce()) as server:
        assert shared_loopback.read_nonce(server.port) == sent


@pytest.mark.parametrize("address", [address_towards("10.253.9.2"), "::1"])
def test_nonce_is_served_on_loopback_only(address: str) -> None:
    with shared_loopback.NonceServer(nonce := shared_loopback.new_nonce()) as server:
        assert shared_loopback.read_nonce(server.port) == nonce
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, server.port), 60)


def test_nonce_is_served_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_loopback, "SERVE_SECONDS", 0.5)
    with shared_loopback.NonceServer(shared_loopback.new_nonce()) as server:
        # Each client is served, and none extends the time.
        until(lambda: not shared_loopback.read_nonce(server.port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), 60)
