"""Ports for servers that cannot choose their own."""

from __future__ import annotations

import random
import socket

#: Ports below those that Linux gives to outgoing connections.
_PORTS = range(10_001, 32_768)
#: TensorFlow's tests seed the generator of the module `random`.
_random = random.SystemRandom()


def free_port() -> int:
    """Return a free port. No outgoing connection takes it before the server starts."""
    while True:
        port = _random.choice(_PORTS)
        try:
            with socket.create_server(("0.0.0.0", port)):
                return port
        except OSError:
            continue
