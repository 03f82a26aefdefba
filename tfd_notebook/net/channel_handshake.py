"""Handshake of an authenticated channel: mutual proof of a shared secret, and socket options."""

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
    """Require the client's proof, then send the server's; return keys to send and receive."""
    deadline = time.monotonic() + timeout
    nonce = secrets.token_bytes(NONCE)
    connected.settimeout(timeout)
    connected.sendall(MAGIC + nonce)
    received = receive_exactly(connected, len(MAGIC) + NONCE + CODE, deadline=deadline)
    client_nonce = bytes(received[len(MAGIC) : len(MAGIC) + NONCE])
    nonces = nonce + client_nonce
    proof = bytes(received[len(MAGIC) + NONCE :])
    if received[: len(MAGIC)] != MAGIC or not hmac.compare_digest(
        proof, _key(secret, b"1", nonces)
    ):
        raise PermissionError("authentication failed: the client does not have the secret")
    connected.sendall(_key(secret, b"2", nonces))
    return _key(secret, b"3", nonces), _key(secret, b"4", nonces)


def prove_to_server(connected: socket.socket, secret: bytes, timeout: float) -> tuple[bytes, bytes]:
    """Send the client's proof, then require the server's; return keys to send and receive."""
    deadline = time.monotonic() + timeout
    connected.settimeout(timeout)
    received = receive_exactly(connected, len(MAGIC) + NONCE, deadline=deadline)
    if received[: len(MAGIC)] != MAGIC:
        raise PermissionError("invalid handshake: another program listens")
    nonce = secrets.token_bytes(NONCE)
    nonces = bytes(received[len(MAGIC) :]) + nonce
    connected.sendall(MAGIC + nonce + _key(secret, b"1", nonces))
    proof = bytes(receive_exactly(connected, CODE, deadline=deadline))
    if not hmac.compare_digest(proof, _key(secret, b"2", nonces)):
        raise PermissionError("authentication failed: the server does not have the secret")
    return _key(secret, b"4", nonces), _key(secret, b"3", nonces)


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
    received = allocate(size)
    view = memoryview(received)
    while view:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the other end did not send its proof in time")
            connected.settimeout(left)
        count = connected.recv_into(view)
        if not count:
            if deadline is not None or (first and len(view) == size):
                raise EOFError("the other end closed the channel")
            raise ConnectionResetError("the connection ended in the middle of a message")
        view = view[count:]
    return received


def _key(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + purpose + nonces, "sha256")
