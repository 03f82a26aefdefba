"""Encrypted tunnels between the hosts of a cluster that need no ssh: the kernel's part."""

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
    """A host as the tunnels see it: what shares its ports is one."""

    node: Node
    name: str
    #: Where peers reach it; empty for a host that no peer has to reach.
    at: str


class TLSTunnels:
    """Each host has a port at which the others come in, if the cluster's authority signed for them.

    See `tfd_notebook.agent.stunnel` for what the agents do. A task's port leads to its host from
    all others, and from this one.

    Parameters
    ----------
    hosts : sequence of (Node, str, str)
        For each host of the cluster its node, a word that is the same for two that share ports, and
        the address at which its peers reach it.
    here : Node, optional
        The agent of this process, where none of the hosts is this one; it becomes the tunnels' own.

    Raises
    ------
    LaunchError
        A host has no stunnel.
    Unsupported
        The package cryptography is missing.
    """

    def __init__(self, hosts: Sequence[tuple[Node, str, str]], here: Node | None) -> None:
        self._here = here
        self._ends: list[TunnelHost] = []
        self._of_host: list[TunnelHost] = []
        authority = CertificateAuthority()
        made: dict[str, TunnelHost] = {}
        trust = [authority.certificate]
        for node, identity, address in hosts:
            if identity not in made:
                end, others = _opened(node, authority, [authority.certificate], address)
                made[identity] = end
                trust += others
            self._of_host.append(made[identity])
        self._ends = list(made.values())
        if here is not None:
            self._ends.append(_opened(here, authority, trust, "")[0])

    def open(self, port: int, host: int) -> None:
        target = self._of_host[host]
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
        if self._here is not None:
            self._here.close()


def _opened(
    node: Node, authority: CertificateAuthority, trust: Sequence[str], address: str
) -> tuple[TunnelHost, list[str]]:
    """Open a host's end; return it and the authorities it trusts in addition to `trust`."""
    name = f"{uuid.uuid4().hex[:12]}.tfd"
    said: Mapping[str, Any] = node.request("open_tunnels", trust=list(trust), name=name)
    # An end that runs already keeps its name and certificate. A new one makes its own key.
    issued = "request" in said
    if issued:
        certificate = authority.sign(said["request"], name)
        said = node.request(
            "certify_tunnels", trust=list(trust), name=name, certificate=certificate
        )
    bracketed = f"[{address}]" if ":" in address else address
    others = [one for one in said["trust"] if one not in trust]
    known, port = said["name"], validation.port(said["port"], "port")
    if validation.tunnel_name(known, "name") != name and issued:
        raise validation.invalid("name", known, name)
    return TunnelHost(node, known, f"{bracketed}:{port}"), others
