"""What can be said of this host, without importing TensorFlow."""

from __future__ import annotations

import importlib.util
import os
import socket
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path


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


def address_towards(peer: str) -> str:
    """Return this host's address on the way to `peer`, to which nothing is sent."""
    family, _, _, _, where = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(where)
        found: str = way.getsockname()[0]
        return found
