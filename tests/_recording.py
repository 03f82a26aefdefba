"""A relay between two ends of a TCP connection that records what passes."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Forwards connections from a port of this host to another port of it.

    Parameters
    ----------
    port : int
        Where connections are forwarded to.

    Attributes
    ----------
    port : int
        Where it listens, on loopback.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._recorded = bytearray()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def recorded(self) -> bytes:
        with self._lock:
            return bytes(self._recorded)

    def close(self) -> None:
        for held in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
            held.close()
        for thread in self._threads:
            thread.join()

    def _start(self, work: object, *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._listener.accept()
                other = socket.create_connection(("127.0.0.1", self._to))
                self._open += [one, other]
                self._start(self._forward, one, other)
                self._start(self._forward, other, one)

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65_536):
                with self._lock:
                    self._recorded += data
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)
