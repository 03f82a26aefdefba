"""A gate at which functions of data workers wait, so that tests need no pauses."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

#: Seconds for each event that a test waits for.
WAIT = 90.0


def pass_gate(port: int) -> None:
    """Wait until the gate of this port is open. Return at once if it is."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as peer:
        peer.recv(1)


def hold(dataset: Any, port: int) -> Any:
    """Return `dataset`, a dataset of integers, with elements that wait at the gate of this port."""
    import tensorflow as tf

    def wait(x: Any) -> Any:
        pass_gate(port)
        return x

    return dataset.map(lambda x: tf.ensure_shape(tf.numpy_function(wait, [x], tf.int64), []))


class Gate:
    """A gate that is closed at first, as a context manager that opens it at the end."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(WAIT)
        self._waiting: list[socket.socket] = []
        self.port: int = self._server.getsockname()[1]

    def reached(self, count: int = 1) -> None:
        """Wait until `count` more functions wait at the gate."""
        for _ in range(count):
            self._waiting.append(self._server.accept()[0])

    def open(self) -> None:
        """Open the gate for functions that wait, and for all later ones."""
        self._server.close()
        for peer in self._waiting:
            peer.close()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
