"""What can be said of this host, without importing TensorFlow."""

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
    """Return a word that is the same for two processes only if they share ports.

    Two containers, or two network namespaces, of one machine do not.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def tensorflow_version() -> str | None:
    """Return the version of the TensorFlow that would be imported, None where there is none."""
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


def reach(addresses: Mapping[str, str], timeout: float = 5.0) -> dict[str, tuple[str, str]]:
    """Ask which of these tasks answer here.

    Parameters
    ----------
    addresses : mapping of str to str
        By name.
    timeout : float
        Seconds for all of them. Default 5.

    Returns
    -------
    dict of str to (str, str)
        Why it does not answer, empty where it does, and this host's address on the way to it.
    """
    found = probe_many(list(addresses.values()), timeout=timeout)
    return {
        name: ("" if seen.alive else seen.reason or seen.state, _source(address))
        for (name, address), seen in zip(addresses.items(), found, strict=True)
    }


def why_unreached(address: str, found: Probe, open_to: str = "") -> tuple[str, str]:
    """Return why this host gets no answer from a task, and the fix, as two texts.

    Parameters
    ----------
    address : str
    found : Probe
        Result of a probe of the address from this host.
    open_to : str
        Peers that can connect to the task, if known.
    """
    if found.state != "unreachable":
        why = found.reason or (f"a {found.kind} answers" if found.alive else found.state)
        return f"{address}: {found.state}, {why}", "see its log, then start it again"
    source = _source(address)
    here = f"this host ({source})" if source else "this host"
    if open_to in ("", "everyone") or open_to.startswith("unknown"):
        cause = f"the packet filter of the task, a firewall or another network keeps {here} out"
    else:
        cause = f"its packet filter lets in {open_to}, and not {here}"
    return (
        f"{address} is unreachable from here: {found.reason or 'no connection'}; {cause}",
        (f"open the task to this host where it was started, allow={source!r}, " if source else "")
        + "or read on a host of its network",
    )


def _source(address: str) -> str:
    try:
        return address_towards(Endpoint.parse(address).host)
    except OSError:
        return ""


def address_towards(peer: str) -> str:
    """Return this host's address on the way to `peer`, to which nothing is sent."""
    family, _, _, _, where = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(where)
        found: str = way.getsockname()[0]
        return found
