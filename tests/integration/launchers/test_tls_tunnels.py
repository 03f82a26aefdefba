"""Attacks of a host on the encrypted tunnels of its cluster, with a real stunnel at the kernel."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests._ports import free_port
from tfd_notebook.launchers import local
from tfd_notebook.launchers.client.agent_host import AgentTaskHost
from tfd_notebook.launchers.client.tls_tunnels import TLSTunnels
from tfd_notebook.model.spec import ClusterConfig
from tfd_notebook.net.certificates import CertificateAuthority

# Slow, because it needs stunnel, which `make test` does not.
pytestmark = [pytest.mark.integration, pytest.mark.slow]

#: Name of the host B that an earlier kernel issued.
EARLIER_NAME = "0123456789ab.tfd"


class RemoteEnd:
    """A host of the cluster with its key, whose answers the test chooses."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.name = self.certificate = self.authority = ""
        self.port = free_port()
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.key = directory / "key.pem"
        self.key.write_bytes(
            self._key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )

    @property
    def request(self) -> str:
        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM).decode()

    # The requests of the kernel

    def open_tunnels(self, authority: str, name: str) -> dict[str, Any]:
        return {"request": self.request}

    def certify_tunnels(self, authority: str, name: str, certificate: str) -> dict[str, Any]:
        self.authority, self.name, self.certificate = authority, name, certificate
        return {"port": self.port}

    def serve_tunnel(self, port: int) -> None: ...
    def forward_tunnel(self, port: int, *target: str) -> None: ...
    def close_tunnel(self, port: int) -> None: ...

    @contextlib.contextmanager
    def serving(self, port: int, certificate: str, answer: bytes) -> Iterator[None]:
        """Answer each TLS connection at `port`, with a certificate for this host's key."""
        path = self._directory / "certificate.pem"
        path.write_text(certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path, self.key)
        with socket.create_server(("127.0.0.1", port)) as listener:

            def serve() -> None:
                while True:
                    try:
                        plain, _ = listener.accept()
                    except OSError:
                        return
                    with contextlib.suppress(OSError), plain:
                        plain.settimeout(60)
                        with context.wrap_socket(plain, server_side=True) as connection:
                            connection.sendall(answer)

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                yield
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                thread.join(60)


class Attacker(RemoteEnd):
    """A host that offers the kernel its own authority, when its tunnels are opened or attached."""

    def __init__(self, directory: Path, is_attached: bool, victim: RemoteEnd) -> None:
        super().__init__(directory)
        self.own_authority = CertificateAuthority()
        self._is_attached = is_attached
        self._victim = victim

    def open_tunnels(self, authority: str, name: str) -> dict[str, Any]:
        if not self._is_attached:
            return super().open_tunnels(authority, name)
        return {
            "port": self.port,
            "name": self._victim.name,
            "authority": self.own_authority.certificate,
        }

    def certify_tunnels(self, authority: str, name: str, certificate: str) -> dict[str, Any]:
        reply = super().certify_tunnels(authority, name, certificate)
        own = self.own_authority.certificate
        return {**reply, "name": name, "authority": own, "trust": [authority, own]}

    def forged_certificate(self) -> str:
        return self.own_authority.sign(self.request, self._victim.name)


class AttachedEnd(RemoteEnd):
    """A host whose tunnels an earlier kernel opened, with that kernel's authority."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        earlier = CertificateAuthority()
        self.name, self.authority = EARLIER_NAME, earlier.certificate
        self.certificate = earlier.sign(self.request, EARLIER_NAME)

    def open_tunnels(self, authority: str, name: str) -> dict[str, Any]:
        return {"port": self.port, "name": self.name, "authority": self.authority}


def received(port: int) -> bytes:
    """Return what a connection to the kernel's end of a tunnel receives until it is closed."""
    try:
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            return connection.recv(100)
    except ConnectionResetError:  # stunnel refused the peer's certificate
        return b""


@pytest.fixture
def kernel_end() -> Iterator[AgentTaskHost]:
    agent = local.local_tunnel_agent(ClusterConfig("attacked"), lambda event: None)
    yield agent
    agent.close()


@pytest.mark.parametrize("victim_type", [RemoteEnd, AttachedEnd], ids=["opened", "attached"])
@pytest.mark.parametrize("attached", [False, True], ids=["opened", "attached"])
def test_host_cannot_take_the_place_of_another_host(
    kernel_end: AgentTaskHost,
    tmp_path: Path,
    victim_type: Callable[[Path], RemoteEnd],
    attached: bool,
) -> None:
    victim = victim_type(tmp_path / "victim")
    attacker = Attacker(tmp_path / "attacker", attached, victim)
    tunnels = TLSTunnels(
        [(victim, "victim", "127.0.0.1"), (attacker, "attacker", "127.0.0.1")],  # type: ignore[list-item]
        kernel_end,
    )
    port = free_port()
    tunnels.open(port, 0)
    with victim.serving(victim.port, victim.certificate, b"the victim"):
        assert received(port) == b"the victim"
    # The attacker has the address of the victim now, and a certificate for its name.
    with attacker.serving(victim.port, attacker.forged_certificate(), b"the attacker"):
        assert received(port) == b""
    if attacker.certificate:  # of the cluster's authority, for the attacker's name
        with attacker.serving(victim.port, attacker.certificate, b"the attacker"):
            assert received(port) == b""
    # Each later connection reaches the victim again.
    with victim.serving(victim.port, victim.certificate, b"the victim"):
        assert received(port) == b"the victim"
