"""Proof that two processes share the ports of loopback: one reads a nonce that the other serves."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import threading
import time

from tfd_notebook.net import validation

#: Seconds after which a server closes itself.
SERVE_SECONDS = 30.0
_NONCE_BYTES = 16
_READ_SECONDS = 5.0
_NONCE = re.compile(f"[0-9a-f]{{{2 * _NONCE_BYTES}}}")
#: Check of a nonce.
nonce = validation.matching(_NONCE, "a nonce")


def new_nonce() -> str:
    """Return a nonce that no other process can guess."""
    return secrets.token_hex(_NONCE_BYTES)


class NonceServer:
    """Server of a nonce on loopback, which closes itself after `SERVE_SECONDS`.

    Parameters
    ----------
    text : str
        The nonce.

    Attributes
    ----------
    port : int
    """

    def __init__(self, text: str) -> None:
        self._text = nonce(text, "nonce")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="tfd-nonce", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the listener and wait for the thread."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_READ_SECONDS)

    def __enter__(self) -> NonceServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        deadline = time.monotonic() + SERVE_SECONDS
        with self._listener, contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                self._listener.settimeout(left)
                peer, _ = self._listener.accept()
                with peer, contextlib.suppress(OSError):
                    peer.settimeout(_READ_SECONDS)
                    peer.sendall(self._text.encode())


def read_nonce(port: int) -> str:
    """Return the nonce that is served at a loopback port of this host; empty if there is none.

    Other data is never returned: the port may belong to any process.
    """
    received = b""
    deadline = time.monotonic() + _READ_SECONDS
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), _READ_SECONDS) as connected,
    ):
        while len(received) <= 2 * _NONCE_BYTES and time.monotonic() < deadline:
            if not (data := connected.recv(2 * _NONCE_BYTES + 1)):
                break
            received += data
    text = received.decode(errors="replace")
    return text if _NONCE.fullmatch(text) else ""
