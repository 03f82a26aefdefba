"""TLS over a connected TCP socket; both ends hold and pin one certificate."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator

#: Bytes per system call.
_CHUNK_BYTES = 1 << 18


def pinned_context(secret: bytes, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    """Return a context that presents and accepts only the certificate in `secret`.

    Parameters
    ----------
    secret : bytes
        A private key and its certificate, in PEM.
    protocol : ssl.PROTOCOL_TLS_CLIENT or ssl.PROTOCOL_TLS_SERVER
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # X509_V_FLAG_NO_CHECK_TIME: the certificate is pinned, and clocks of hosts may be wrong.
    context.verify_flags |= 0x200000
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a ticket would look like the start of a message
    context.load_verify_locations(cadata=secret[secret.find(b"-----BEGIN CERT") :].decode("ascii"))
    # The ssl module reads keys only from files; a pipe leaves none on the disk.
    with _readable(secret) as certificate, _readable(secret) as key:
        context.load_cert_chain(certificate, key)
    return context


class TlsSocket:
    """The methods of a connected socket, over TLS. One thread may send while another receives.

    OpenSSL does not support that, so a lock protects its state, which is only in memory.

    Parameters
    ----------
    connected : socket.socket
        The instance takes ownership of it.
    context : ssl.SSLContext
    deadline : float
        Time (`time.monotonic`) at which the handshake fails.
    is_server : bool

    Raises
    ------
    PermissionError
        The certificate of the other end differs, or it does not use TLS.
    EOFError
        The other end closed the connection.
    OSError
        The connection broke, or the handshake did not end before `deadline`.
    """

    def __init__(
        self,
        connected: socket.socket,
        context: ssl.SSLContext,
        deadline: float,
        *,
        is_server: bool = False,
    ) -> None:
        self._raw = connected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._lock = threading.Lock()
        self.fileno, self.settimeout = connected.fileno, connected.settimeout
        self.shutdown, self.close = connected.shutdown, connected.close
        self.getpeername, self.getsockname = connected.getpeername, connected.getsockname
        while not self._shake_hands():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the TLS handshake timed out")
            connected.settimeout(left)
            self._fill()

    @property
    def pending(self) -> bool:
        """True if received data waits in memory, so that `fileno` may not become readable."""
        with self._lock:
            return bool(self._tls.pending() or self._incoming.pending)

    def recv_into(self, view: memoryview, deadline: float = math.inf) -> int:
        """Receive at most ``len(view)`` bytes; return their number, or 0 at the end.

        Raise TimeoutError if none is complete at `deadline`. The peer may divide a TLS record.
        """
        while True:
            with self._lock, contextlib.suppress(ssl.SSLWantReadError):
                try:
                    return self._tls.read(len(view), view)  # type: ignore[return-value]
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return 0
            await_data(self.fileno(), deadline)
            self._fill()

    def sendmsg(self, parts: list[memoryview]) -> int:
        """Send some bytes of the parts; return their number. One thread may call it."""
        sent = 0
        with self._lock:
            for part in parts:
                written = self._tls.write(part[:_CHUNK_BYTES])
                sent += written
                if written < len(part) or sent >= _CHUNK_BYTES:
                    break
            encrypted = self._outgoing.read()
        self._raw.sendall(encrypted)
        return sent

    def _shake_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLEOFError:
            raise EOFError("the other end closed the connection") from None
        except ssl.SSLCertVerificationError:
            raise PermissionError("authentication failed: the secrets differ") from None
        except ssl.SSLError as error:
            raise PermissionError(f"authentication failed: {error.reason}") from None
        finally:
            if encrypted := self._outgoing.read():  # includes alerts
                self._raw.sendall(encrypted)
        return True

    def _fill(self) -> None:
        data = self._raw.recv(_CHUNK_BYTES)
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()


def has_data(descriptor: int, seconds: float = 0.0) -> bool:
    """Return True if data, or the end of the stream, arrives within `seconds`."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def await_data(descriptor: int, deadline: float) -> None:
    """Wait for data, or the end of the stream; raise TimeoutError at `deadline`.

    The timeout of the socket would also apply to another thread, which sends.
    """
    left = deadline - time.monotonic()
    if left <= 0 or not has_data(descriptor, left):
        raise TimeoutError("no complete message arrived in time")


def break_if_vanished(connected: socket.socket, seconds: int) -> None:
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


@contextlib.contextmanager
def _readable(data: bytes) -> Iterator[str]:
    """Yield the name of a pipe that holds `data`."""
    reading, writing = os.pipe()
    try:
        with open(writing, "wb") as file:
            file.write(data)
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)
