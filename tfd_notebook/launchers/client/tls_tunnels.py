"""Encrypted tunnels between the hosts of a cluster by stunnel, as the kernel manages them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from tfd_notebook.errors import TfdError
from tfd_notebook.launchers.client.agent_host import AgentTaskHost
from tfd_notebook.model.spec import Endpoint
from tfd_notebook.net import validation
from tfd_notebook.net.certificates import CertificateAuthority


@dataclass(frozen=True)
class TunnelHost:
    """A tunnel endpoint: hosts that share their ports are one."""

    task_host: AgentTaskHost
    name: str
    #: Address and port for its peers; empty for a host that no peer connects to.
    at: str
    #: The authority, in PEM, that signed its certificate. Peers trust it for this host only.
    authority: str


class TLSTunnels:
    """Tunnels of mutually authenticated TLS: each host has one port for all its peers.

    `tfd_notebook.agent.stunnel` has the agents' part. A task's port on all other hosts, and on this
    one, leads to the task's host.

    Parameters
    ----------
    hosts : sequence of (AgentTaskHost, str, str)
        For each host of the cluster its agent, its identity, and the address for its peers. Hosts
        that share ports have the same identity.
    local_agent : AgentTaskHost, optional
        The agent of this process, if none of the hosts is this one. `end` closes it.

    Raises
    ------
    LaunchError
        A host has no stunnel.
    Unsupported
        The package cryptography is missing.
    """

    def __init__(
        self, hosts: Sequence[tuple[AgentTaskHost, str, str]], local_agent: AgentTaskHost | None
    ) -> None:
        self._local_agent = local_agent
        self._ends: list[TunnelHost] = []
        self._end_of_host: list[TunnelHost] = []
        authority = CertificateAuthority()
        by_identity: dict[str, TunnelHost] = {}
        for task_host, identity, address in hosts:
            if identity not in by_identity:
                by_identity[identity] = _open_endpoint(task_host, authority, address)
            self._end_of_host.append(by_identity[identity])
        self._ends = list(by_identity.values())
        if local_agent is not None:
            self._ends.append(_open_endpoint(local_agent, authority, ""))

    def open(self, port: int, host: int) -> None:
        target = self._end_of_host[host]
        try:
            target.task_host.serve_tunnel(port)
            for end in self._ends:
                if end is not target:
                    end.task_host.forward_tunnel(port, target.at, target.name, target.authority)
        except BaseException:
            self.close(port)
            raise

    def close(self, port: int) -> None:
        for end in self._ends:
            with contextlib.suppress(TfdError):
                end.task_host.close_tunnel(port)

    def end(self) -> None:
        if self._local_agent is not None:
            self._local_agent.close()


def _open_endpoint(
    task_host: AgentTaskHost, authority: CertificateAuthority, address: str
) -> TunnelHost:
    name, trusted = f"{uuid.uuid4().hex[:12]}.tfd", authority.certificate
    reply = task_host.open_tunnels(trusted, name)
    if "request" in reply:
        certificate = authority.sign(reply["request"], name)
        reply = task_host.certify_tunnels(trusted, name, certificate)
    else:
        # An endpoint that an earlier kernel opened keeps its name and certificate.
        name = validation.tunnel_name(reply["name"], "name")
        trusted = validation.certificate(reply["authority"], "authority")
    port = validation.port(reply["port"], "port")
    return TunnelHost(task_host, name, str(Endpoint(address, port)), trusted)
