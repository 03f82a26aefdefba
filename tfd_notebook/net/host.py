"""Facts about this host, determined without importing TensorFlow."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from tfd_notebook.model.spec import Endpoint
from tfd_notebook.net.probe import Probe, probe_many


def identity() -> str:
    """Return an identifier that two processes share only if they share their ports.

    Two containers, or two network namespaces, of one machine have different identifiers.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def tensorflow_version() -> str | None:
    """Return the version of the TensorFlow that would be imported, or None without TensorFlow."""
    for name in ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    if importlib.util.find_spec("tensorflow") is None:
        return None
    for name in packages_distributions().get("tensorflow", ()):
        return version(name)
    return "unknown"


def check_reachability(
    addresses: Mapping[str, str], timeout: float = 5.0
) -> dict[str, tuple[str, str]]:
    """Probe tasks, and return which of them this host can reach.

    Parameters
    ----------
    addresses : mapping of str to str
        Addresses of the tasks, by name.
    timeout : float
        Seconds for all probes together. Default 5.

    Returns
    -------
    dict of str to (str, str)
        For each task the reason if it cannot be reached, else an empty string. Then the source
        address of this host in connections to the task.
    """
    results = probe_many(list(addresses.values()), timeout=timeout)
    return {
        name: ("" if result.alive else result.reason or result.state, _source(address))
        for (name, address), result in zip(addresses.items(), results, strict=True)
    }


def why_unreached(address: str, result: Probe, open_to: str = "") -> tuple[str, str]:
    """Return why this host cannot reach a task, and the fix, as two texts.

    Parameters
    ----------
    address : str
    result : Probe
        Result of a probe of the address from this host.
    open_to : str
        Peers that can connect to the task, if known.
    """
    if result.state != "unreachable":
        why = result.reason or (f"a {result.kind} answers" if result.alive else result.state)
        return f"{address}: {result.state}, {why}", "check the log of the task, then restart it"
    source = _source(address)
    here = f"this host ({source})" if source else "this host"
    if open_to in ("", "everyone") or open_to.startswith("unknown"):
        cause = f"the packet filter of the task, a firewall or the network blocks {here}"
    else:
        cause = f"its packet filter allows {open_to}, but not {here}"
    return (
        f"{address} is unreachable from here: {result.reason or 'no connection'}; {cause}",
        (f"open the task to this host with allow={source!r} when it is started, " if source else "")
        + "or read on a host of its network",
    )


def _source(address: str) -> str:
    try:
        return address_towards(Endpoint.parse(address).host)
    except OSError:
        return ""


def addresses_of(name: str) -> set[str]:
    """Return the addresses of a host by its name or address; empty if it does not resolve."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(entry[4][0]) for entry in entries}


def address_towards(peer: str) -> str:
    """Return this host's source address for connections to `peer`. Nothing is sent."""
    family, _, _, _, destination = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as unconnected:
        unconnected.connect(destination)
        address: str = unconnected.getsockname()[0]
        return address
