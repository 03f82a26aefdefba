"""Peers of this host that the filter of a port lets in, as docs/security.md states."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import tfd_notebook as tfd
from tfd_notebook.net import ports

pytestmark = pytest.mark.integration

#: Requests the workers of a dispatcher as the user with the id in the first argument.
PROBE = """
import os, socket, sys
from tfd_notebook.net.probe import probe

socket.getaddrinfo("localhost", None)  # imports a codec, which the user may not read
user = int(sys.argv[1])
if user != os.getuid():
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
found = probe(sys.argv[2])
print(os.getuid(), found.kind, found.alive)
"""


@pytest.fixture(params=["localhost", "this host"])
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the address of a dispatcher whose port has a filter."""
    dispatcher = tfd.Dispatcher()
    address = dispatcher.target.removeprefix("grpc://")
    port = int(address.rpartition(":")[2])
    if request.param == "localhost":
        assert ports.restrict_port(port, host="localhost") == "loopback"
    yield f"127.0.0.1:{port}"
    dispatcher.stop()


def probe_as(user: int, target: str) -> str:
    """Return the user, and the server that it reaches."""
    return subprocess.run(
        [sys.executable, "-c", PROBE, str(user), target],
        capture_output=True,
        check=True,
        text=True,
    ).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the user of a process")
def test_port_is_open_to_other_users_of_this_host(target: str) -> None:
    assert probe_as(65534, target) == "65534 dispatcher True\n"


def test_port_is_open_to_other_kernels_of_this_user(target: str) -> None:
    assert probe_as(os.getuid(), target) == f"{os.getuid()} dispatcher True\n"
