"""Proof of which hosts of a cluster share their ports, with each other or with this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfd_notebook.errors import TfdError
from tfd_notebook.net import host as this_host
from tfd_notebook.net import shared_loopback

if TYPE_CHECKING:
    from tfd_notebook.launchers.remote import RemoteHost

_REQUEST_SECONDS = 15.0


def prove_identities(hosts: Sequence[RemoteHost]) -> None:
    """Set `identity` and `is_local` of hosts that have no identity yet.

    The identity in a handshake is only a claim. Equal claims count if one side reads a nonce at a
    loopback port of the other. Without a proof, a host gets an identity that no other host has.

    Parameters
    ----------
    hosts : sequence of RemoteHost
        Hosts with open sessions.
    """
    for position, host in enumerate(hosts):
        if host.identity:
            continue
        host.is_local = _claim(host) == this_host.identity() and _shares_this_loopback(host)
        host.identity = "this host" if host.is_local else f"host {position}"
        for earlier in hosts[: 0 if host.is_local else position]:
            claims_both = _claim(earlier) == _claim(host) and not earlier.is_local
            if claims_both and _share_loopback(earlier, host):
                host.identity = earlier.identity
                break


def _claim(host: RemoteHost) -> str:
    assert host.handshake is not None
    return host.handshake.identity


def _shares_this_loopback(host: RemoteHost) -> bool:
    nonce = shared_loopback.new_nonce()
    with shared_loopback.NonceServer(nonce) as server:
        return _reads(host, server.port, nonce)


def _share_loopback(one: RemoteHost, other: RemoteHost) -> bool:
    """Return True if two hosts share loopback.

    Each must read a nonce of the other. A tunnel could lead from one host to the other.
    """
    return _serves_to(one, other) and _serves_to(other, one)


def _serves_to(server: RemoteHost, reader: RemoteHost) -> bool:
    nonce = shared_loopback.new_nonce()
    try:
        port = server.session.client.request("serve_nonce", _REQUEST_SECONDS, nonce=nonce)
    except TfdError:
        return False
    return _reads(reader, port, nonce)


def _reads(reader: RemoteHost, port: int, nonce: str) -> bool:
    try:
        read = reader.session.client.request("read_nonce", _REQUEST_SECONDS, port=port)
    except TfdError:
        return False
    return bool(read == nonce)
