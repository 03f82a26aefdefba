"""The start of a sealed channel: mutual proof of a shared secret, and options of the socket."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

MAGIC = b"TFDSEAL1"
NONCE = 32
#: Bytes of a proof, and of the code of a message.
CODE = 32


def prove_to_client(connected: socket.socket, secret: bytes, timeout: float) -> tuple[bytes, bytes]:
    """Demand the client's proof, then send the server's; return keys to send and receive."""
    deadline = time.monotonic() + timeout
    mine = secrets.token_bytes(NONCE)
    connected.settimeout(timeout)
    connected.sendall(MAGIC + mine)
    said = receive_exactly(connected, len(MAGIC) + NONCE + CODE, deadline=deadline)
    client_nonce = bytes(said[len(MAGIC) : len(MAGIC) + NONCE])
    both = mine + client_nonce
    proof = bytes(said[len(MAGIC) + NONCE :])
    if said[: len(MAGIC)] != MAGIC or not hmac.compare_digest(proof, _key(secret, b"1", both)):
        raise PermissionError("authentication failed: the client does not have the secret")
    connected.sendall(_key(secret, b"2", both))
    return _key(secret, b"3", both), _key(secret, b"4", both)


def prove_to_server(connected: socket.socket, secret: bytes, timeout: float) -> tuple[bytes, bytes]:
    """Send the client's proof, then demand the server's; return keys to send and receive."""
    deadline = time.monotonic() + timeout
    connected.settimeout(timeout)
    said = receive_exactly(connected, len(MAGIC) + NONCE, deadline=deadline)
    if said[: len(MAGIC)] != MAGIC:
        raise PermissionError("another program listens there")
    mine = secrets.token_bytes(NONCE)
    both = bytes(said[len(MAGIC) :]) + mine
    connected.sendall(MAGIC + mine + _key(secret, b"1", both))
    proof = bytes(receive_exactly(connected, CODE, deadline=deadline))
    if not hmac.compare_digest(proof, _key(secret, b"2", both)):
        raise PermissionError("authentication failed: the server does not have the secret")
    return _key(secret, b"4", both), _key(secret, b"3", both)


def notice_vanished_peers(connected: socket.socket, seconds: int) -> None:
    """Make a connection break if its peer does not respond for `seconds`."""
    probes = 4
    interval = max(1, seconds // (2 * probes))
    options = {
        "TCP_KEEPIDLE": max(1, seconds - probes * interval),
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": probes,
        "TCP_USER_TIMEOUT": 1000 * seconds,
    }
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # macOS lacks some
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def receive_exactly(
    connected: socket.socket,
    size: int,
    *,
    first: bool = False,
    deadline: float | None = None,
    allocate: Callable[[int], Any] = bytearray,
) -> Any:
    """Return exactly `size` bytes; raise EOFError if the stream ends before the first of them."""
    taken = allocate(size)
    view = memoryview(taken)
    while view:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the other end did not prove itself in time")
            connected.settimeout(left)
        count = connected.recv_into(view)
        if not count:
            if deadline is not None or (first and len(view) == size):
                raise EOFError("the other end closed the channel")
            raise ConnectionResetError("the connection ended in the middle of a message")
        view = view[count:]
    return taken


def _key(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + purpose + nonces, "sha256")
