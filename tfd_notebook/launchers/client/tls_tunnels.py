"""Encrypted tunnels between the hosts of a cluster by stunnel, as the kernel manages them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfd_notebook.errors import TfdError
from tfd_notebook.launchers.base import Node
from tfd_notebook.launchers.client.certificates import CertificateAuthority
from tfd_notebook.net import validation


@dataclass(frozen=True)
class TunnelHost:
    """A tunnel endpoint: hosts that share their ports are one."""

    node: Node
    name: str
    #: Address and port for its peers; empty for a host that no peer connects to.
    at: str


class TLSTunnels:
    """Tunnels of mutually authenticated TLS: each host has one port for all its peers.

    `tfd_notebook.agent.stunnel` has the agents' part. A task's port on all other hosts, and on this
    one, leads to the task's host.

    Parameters
    ----------
    hosts : sequence of (Node, str, str)
        For each host of the cluster its node, an identity that is equal for nodes that share ports,
        and the address for its peers.
    local_agent : Node, optional
        The agent of this process, if none of the hosts is this one. `end` closes it.

    Raises
    ------
    LaunchError
        A host has no stunnel.
    Unsupported
        The package cryptography is missing.
    """

    def __init__(self, hosts: Sequence[tuple[Node, str, str]], local_agent: Node | None) -> None:
        self._local_agent = local_agent
        self._ends: list[TunnelHost] = []
        self._end_of_host: list[TunnelHost] = []
        authority = CertificateAuthority()
        by_identity: dict[str, TunnelHost] = {}
        trust = [authority.certificate]
        for node, identity, address in hosts:
            if identity not in by_identity:
                end, others = _open_endpoint(node, authority, [authority.certificate], address)
                by_identity[identity] = end
                trust += others
            self._end_of_host.append(by_identity[identity])
        self._ends = list(by_identity.values())
        if local_agent is not None:
            self._ends.append(_open_endpoint(local_agent, authority, trust, "")[0])

    def open(self, port: int, host: int) -> None:
        target = self._end_of_host[host]
        try:
            target.node.request("serve_tunnel", port=port)
            for end in self._ends:
                if end is not target:
                    end.node.request("lead_tunnel", port=port, to=target.at, host=target.name)
        except BaseException:
            self.close(port)
            raise

    def close(self, port: int) -> None:
        for end in self._ends:
            with contextlib.suppress(TfdError):
                end.node.request("close_tunnel", port=port)

    def end(self) -> None:
        if self._local_agent is not None:
            self._local_agent.close()


def _open_endpoint(
    node: Node, authority: CertificateAuthority, trust: Sequence[str], address: str
) -> tuple[TunnelHost, list[str]]:
    """Open a host's endpoint; return it and the authorities it trusts in addition to `trust`."""
    name = f"{uuid.uuid4().hex[:12]}.tfd"
    reply: Mapping[str, Any] = node.request("open_tunnels", trust=list(trust), name=name)
    # An endpoint that runs already keeps its name and certificate. A new one creates a key.
    issued = "request" in reply
    if issued:
        certificate = authority.sign(reply["request"], name)
        reply = node.request(
            "certify_tunnels", trust=list(trust), name=name, certificate=certificate
        )
    bracketed = f"[{address}]" if ":" in address else address
    others = [ca for ca in reply["trust"] if ca not in trust]
    used_name, port = reply["name"], validation.port(reply["port"], "port")
    if validation.tunnel_name(used_name, "name") != name and issued:
        raise validation.invalid("name", used_name, name)
    return TunnelHost(node, used_name, f"{bracketed}:{port}"), others
