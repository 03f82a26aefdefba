"""Addresses of a cluster's hosts, and the addresses that each of them lets in."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.errors import LaunchError
from tfd_notebook.net import ports

if TYPE_CHECKING:
    from tfd_notebook.launchers.remote import RemoteHost

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"),
    )
)


def find_addresses(hosts: Sequence[RemoteHost]) -> None:
    """Set `address` of hosts, whose identities are proven.

    It is the other end of this process's own connection. Through a proxy or a forwarded port, that
    is not the host. Then it is the address that the host states. It must be private, and neither an
    address of this host nor of another host of the cluster.

    Raises
    ------
    LaunchError
        Two hosts have one address, which at least one of them has only stated.
    """
    for host in hosts:
        host.address = _connected(host)
    known = [host.address for host in hosts]
    for host, connected in zip(hosts, known, strict=True):
        stated = "" if connected else _stated(host)
        for other, other_connected in zip(hosts, known, strict=True):
            is_same = stated in (other_connected, _stated(other))
            if stated and is_same and other.identity != host.identity:
                raise LaunchError(
                    f"{host.label} states the address {stated}, which belongs to {other.label}",
                    fix="connect to each host directly, without a proxy or a forwarded port",
                )
        host.address = connected or stated


def networks_to_allow(
    hosts: Sequence[RemoteHost], addresses: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return for each host the addresses that it lets in.

    They are those of the cluster's hosts, and of this process in its connections. A host also lets
    in the address at which it sees this process, which may be translated. No other host uses that.

    Parameters
    ----------
    hosts : sequence of RemoteHost
    addresses : sequence of str
        The addresses that the hosts advertise. Names are skipped: a packet filter takes none.

    Raises
    ------
    Refused
        The administrator's policy does not allow one of the addresses.
    """
    common = {*addresses, *(host.own_address for host in hosts)}
    networks = [_without_names({*common, *_connection(host)[:1]}) for host in hosts]
    limits().check_allow(sorted({network for of_host in networks for network in of_host}))
    return networks


def _connected(host: RemoteHost) -> str:
    """Return the other end of the connection to a host; empty if that is not the host."""
    address = parse_address(host.peer_address)
    if address is None or (address.is_loopback and not host.is_local):
        return ""
    return host.peer_address


def _stated(host: RemoteHost) -> str:
    """Return the address that a host states; empty if it cannot be an address of that host."""
    ends = [parse_address(end) for end in _connection(host)]
    if len(ends) < 2 or ends[0] is None or ends[1] is None or ends[0].version != ends[1].version:
        return ""
    stated = ends[1]
    is_possible = host.is_local or not ports.is_this_host(str(stated))
    is_possible = is_possible and is_private(stated)
    return str(stated) if is_possible else ""


def _connection(host: RemoteHost) -> list[str]:
    """Return the addresses of this process and of the host, as the host states them."""
    assert host.handshake is not None
    return host.handshake.connection.split()[::2]


def parse_address(text: str) -> Address | None:
    """Return an address without its scope, as IPv4 if it is mapped; None for a name."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(text.partition("%")[0])
        return getattr(address, "ipv4_mapped", None) or address
    return None


def is_private(address: Address) -> bool:
    """Return True if a host may state an address: it does not exist in the internet."""
    return any(address in network for network in _PRIVATE)


def _without_names(addresses: set[str]) -> tuple[str, ...]:
    return tuple(
        sorted({str(parsed) for a in addresses if (parsed := parse_address(a)) is not None})
    )
