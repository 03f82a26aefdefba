"""Servers of tests that wait, or send a reply slowly."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest


def wait_for_end(channel: socket.socket) -> None:
    """Receive until the client closes the connection."""
    while channel.recv(65_536):
        pass


def trickle(channel: socket.socket, start: bytes) -> None:
    """Send bytes one at a time until the client closes the connection."""
    channel.sendall(start)
    channel.settimeout(0.01)
    for _ in range(3000):
        with contextlib.suppress(TimeoutError):
            if not channel.recv(1):
                return
        channel.sendall(b" ")
    raise AssertionError("the client received all bytes")


@contextlib.contextmanager
def slow_names() -> Iterator[None]:
    """Resolve no name before the end of the context, or one minute."""
    ended = threading.Event()
    resolve = socket.getaddrinfo

    def wait(*arguments: Any, **options: Any) -> Any:
        ended.wait(60)
        return resolve(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", wait)
        yield
        ended.set()
