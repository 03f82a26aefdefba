"""Attacks by a host that states addresses in its handshake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tfd_notebook import errors
from tfd_notebook.agent.admin_policy import Limits, limits
from tfd_notebook.launchers.client.handshake import HostHandshake
from tfd_notebook.launchers.client.host_addresses import find_addresses, networks_to_allow
from tfd_notebook.launchers.remote import RemoteHost
from tfd_notebook.net.host import address_towards

KERNEL = "10.253.9.1"


class Host(RemoteHost):
    def __init__(self, number: int, peer: str, connection: str = "", own: str = KERNEL) -> None:
        super().__init__(f"host-{number}")
        self.identity = self.label
        self.peer_address, self.own_address = peer, own if peer else ""
        self.handshake = HostHandshake("0", "3", "python", None, "boot:1", connection)

    def connect(self, agent: str, start: bool) -> Any:
        raise NotImplementedError


def let_in(*hosts: Host) -> list[set[str]]:
    find_addresses(hosts)
    return [set(each) for each in networks_to_allow(hosts, [host.address for host in hosts])]


def test_stated_addresses_are_not_let_in() -> None:
    liar = Host(1, "10.253.9.2", "198.51.100.7 1 203.0.113.9 2")
    honest = Host(2, "10.253.9.3", f"{KERNEL} 1 10.253.9.3 2")
    own, other = let_in(liar, honest)
    assert other == {KERNEL, "10.253.9.2", "10.253.9.3"}
    assert liar.address == "10.253.9.2"
    # The port of the liar itself: it could open that in any case.
    assert own == other | {"198.51.100.7"}


def test_host_cannot_state_the_address_of_another() -> None:
    """Peers would connect to the other host, and it would let in the liar's peers."""
    liar, honest = Host(1, "10.253.9.2", f"{KERNEL} 1 10.253.9.3 2"), Host(2, "10.253.9.3")
    let_in(liar, honest)
    assert (liar.address, honest.address) == ("10.253.9.2", "10.253.9.3")


@pytest.mark.parametrize("known", ["10.253.9.3", ""])
def test_host_behind_a_proxy_cannot_state_the_address_of_another(known: str) -> None:
    liar = Host(1, "", f"{KERNEL} 1 10.253.9.3 2")
    honest = Host(2, known, f"{KERNEL} 1 10.253.9.3 2")
    for hosts in ([liar, honest], [honest, liar]):
        with pytest.raises(errors.LaunchError, match=r"10\.253\.9\.3, which belongs to host-"):
            find_addresses(hosts)


def test_host_behind_a_proxy_states_one_private_address() -> None:
    host = Host(1, "", "10.253.8.1 1 10.253.9.2 2")
    assert let_in(host, Host(2, "10.253.9.3")) == [
        {KERNEL, "10.253.9.2", "10.253.9.3", "10.253.8.1"},
        {KERNEL, "10.253.9.2", "10.253.9.3"},
    ]
    assert host.address == "10.253.9.2"


@pytest.mark.parametrize(
    "stated",
    [
        *("203.0.113.9", "8.8.8.8", "127.0.0.1", "169.254.1.1", "224.0.0.1", "0.0.0.0", "::1"),
        *("fe80::1%eth0", "2001:db8::1", "fd00::1", "::ffff:127.0.0.1", "::ffff:203.0.113.9"),
    ],
)
@pytest.mark.parametrize("peer", ["", "127.0.0.1", "::1"])
def test_host_behind_a_proxy_cannot_state_other_addresses(stated: str, peer: str) -> None:
    """`fd00::1` has another family than the address of the kernel that the host states."""
    liar = Host(1, peer, f"{KERNEL} 1 {stated} 2", own=peer)
    assert let_in(liar, Host(2, "10.253.9.3"))[1] == {KERNEL, "10.253.9.3"} | {peer} - {""}
    assert liar.address == ""


def test_host_behind_a_proxy_cannot_state_an_address_of_this_host() -> None:
    own = address_towards("10.253.9.2")
    liar = Host(1, "", f"{own} 1 {own} 2")
    find_addresses([liar])
    assert liar.address == ""


def test_host_that_shares_this_loopback_has_its_address() -> None:
    host = Host(1, "127.0.0.1", "127.0.0.1 1 127.0.0.1 2", own="127.0.0.1")
    host.is_local = True
    find_addresses([host])
    assert host.address == "127.0.0.1"


def test_entries_of_one_host_state_one_address() -> None:
    one, two = (Host(number, "", f"{KERNEL} 1 10.253.9.2 2") for number in (1, 2))
    two.identity = one.identity
    find_addresses([one, two])
    assert one.address == two.address == "10.253.9.2"


def test_policy_is_checked_for_the_hosts_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('allow = ["10.0.0.0/24"]\n')
    monkeypatch.setattr(
        "tfd_notebook.launchers.client.host_addresses.limits",
        lambda: Limits(allow=("10.0.0.0/24",), path=file),
    )
    assert let_in(Host(1, "10.0.0.5", own="10.0.0.1")) == [{"10.0.0.1", "10.0.0.5"}]
    with pytest.raises(errors.Refused, match=r"192\.0\.2\.5"):
        let_in(Host(1, "192.0.2.5", own="10.0.0.1"))
    assert limits(tmp_path / "none") == Limits()
