"""Mutually authenticated message channels over TLS, or over Unix sockets of one user.

A message is a header of JSON values and a body of bytes. Received data is never unpickled or
executed. Over TCP, both ends hold one private key and accept only its certificate. On a Unix
socket, the kernel proves that both ends belong to this user. The client also sends a digest of the
secret. A client that has not authenticated itself after two seconds is disconnected silently.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import hmac
import json
import logging
import math
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from tfd_notebook.errors import InvalidMessage
from tfd_notebook.net import certificates, unix_socket
from tfd_notebook.net.tls_socket import (
    TlsSocket,
    await_data,
    break_if_vanished,
    has_data,
    pinned_context,
)

log = logging.getLogger("tfd_notebook")

#: Bytes, or an object with contiguous memory that supports the buffer protocol.
Buffer: TypeAlias = Any

#: Seconds that a client has to authenticate itself.
AUTHENTICATION_SECONDS = 2.0
#: Seconds after which a TCP connection to an unresponsive peer breaks.
VANISHED_SECONDS = 60
#: Seconds without progress in the middle of a message. Without a timeout, a message may take this
#: time, and more for its length.
STALL_SECONDS = 60.0
MIN_BYTES_PER_SECOND = 10_000
#: Limits of a header and of a body, in bytes.
MAX_HEADER = 1 << 20
MAX_BODY = 1 << 31
#: Bytes that are allocated before any have arrived. The buffer doubles whenever it is full.
FIRST_ALLOCATION = 1 << 22
#: Limits of concurrent unauthenticated connections, in all and per address. The oldest is closed.
_MAX_UNAUTHENTICATED, _MAX_UNAUTHENTICATED_PER_ADDRESS = 64, 16

_LENGTHS = struct.Struct("!IQ")
#: Answer to an authenticated client of a Unix socket.
_ACCEPTED = b"TFDSEAL2"


class Secret(bytes):
    """A secret whose value is never printed. It is bytes in all other respects.

    Over TCP it is a private key and its certificate, in PEM. Unix sockets accept any bytes.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret(...)"

    __str__ = __repr__

    @classmethod
    def new(cls) -> Secret:
        """Return a new key and its certificate.

        Raises
        ------
        Unsupported
            The package cryptography is missing.
        """
        return cls(certificates.CertificateAuthority().key_and_certificate())


class AuthenticatedChannel:
    """A connection to an authenticated peer. Any thread may send, one at a time may receive.

    Parameters
    ----------
    connected : TlsSocket or socket.socket
        The channel takes ownership of it.
    """

    def __init__(self, connected: TlsSocket | socket.socket) -> None:
        connected.settimeout(STALL_SECONDS)
        self._socket = connected
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor for `select`; -1 once the channel is closed."""
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        """True if this end is closed."""
        return self._closed

    @property
    def has_data(self) -> bool:
        """True if a message, or the end of the channel, has started to arrive."""
        return self._starts_within(0.0)

    @property
    def ends(self) -> tuple[str, str]:
        """The addresses of the peer and of this process in a TCP connection."""
        return self._socket.getpeername()[0], self._socket.getsockname()[0]

    def send(
        self, header: dict[str, Any], body: Buffer | list[Buffer] | tuple[Buffer, ...] = b""
    ) -> None:
        """Send a message.

        Parameters
        ----------
        header : dict
            JSON values, up to 1 MiB.
        body : bytes-like, or list or tuple of bytes-like
            Contiguous buffers of any kind, which are concatenated; up to 2 GiB in all.

        Raises
        ------
        ValueError
            The message is too large.
        OSError
            The other end is lost, or read nothing for a minute.
        """
        encoded_header = json.dumps(header, separators=(",", ":")).encode()
        buffers = body if isinstance(body, (list, tuple)) else [body]
        views: list[memoryview] = [memoryview(buffer) for buffer in buffers]
        parts = [view.cast("B") for view in views if view.nbytes]
        size = sum(map(len, parts))
        if len(encoded_header) > MAX_HEADER or size > MAX_BODY:
            raise ValueError(f"a message of {len(encoded_header)} and {size} bytes is too large")
        lengths = _LENGTHS.pack(len(encoded_header), size)
        with self._sending, self._closed_on_error():
            self._send_all([memoryview(lengths + encoded_header), *parts])

    def receive(
        self, timeout: float | None = None, allocate: Callable[[int], Any] = bytearray
    ) -> tuple[dict[str, Any], memoryview]:
        """Return the next message.

        Parameters
        ----------
        timeout : float, optional
            Seconds until the message is complete. Default: no timeout for its start.
        allocate : callable
            Takes a size and returns a writable buffer. Called again with a larger size if a large
            body has filled it. Default `bytearray`.

        Returns
        -------
        header : dict
        body : memoryview
            Writable, in memory that no other message uses.

        Raises
        ------
        TimeoutError
            No message is complete. The channel remains usable if none has started.
        EOFError
            The other end closed the channel.
        OSError
            The connection broke or the message is invalid. The channel is closed.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._receiving:
            self._wait_for_message(deadline)
            rate = math.inf
            if timeout is None:
                deadline, rate = time.monotonic() + STALL_SECONDS, MIN_BYTES_PER_SECOND
            with self._closed_on_error():
                return self._receive(allocate, deadline, rate)

    def close(self) -> None:
        """Close the channel; pending calls in other threads raise at once. Never raises."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # Keep the descriptor while another thread waits on it: its number could be reused.
        if self._receiving.acquire(blocking=False):
            self._socket.close()
            self._receiving.release()

    def __enter__(self) -> AuthenticatedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._socket.close()

    def _receive(
        self, allocate: Callable[[int], Any], deadline: float, rate: float
    ) -> tuple[dict[str, Any], memoryview]:
        receive = functools.partial(_receive_exactly, self._socket, deadline=deadline, rate=rate)
        head_size, size = _LENGTHS.unpack(receive(_LENGTHS.size))
        if head_size > MAX_HEADER or size > MAX_BODY:
            raise ConnectionAbortedError("invalid message: too long")
        try:
            encoded_header = receive(head_size)
            body = memoryview(receive(size, allocate))
        except EOFError:
            raise ConnectionResetError("the connection ended in the middle of a message") from None
        try:
            header = json.loads(bytes(encoded_header))
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise ConnectionAbortedError("invalid message: expected a JSON object")
        return header, body

    def _wait_for_message(self, deadline: float) -> None:
        while not self._closed:
            left = min(1.0, deadline - time.monotonic())
            if self._starts_within(max(0.0, left)):
                break
            if left <= 0:
                raise TimeoutError("no message arrived in time")
        else:
            self._socket.close()
            raise EOFError("the channel is closed")

    def _starts_within(self, seconds: float) -> bool:
        if isinstance(self._socket, TlsSocket) and self._socket.pending:
            return True
        try:
            return has_data(self._socket.fileno(), seconds)
        except (OSError, ValueError):  # closed in the meantime
            self._closed = True
            return False

    def _send_all(self, parts: list[memoryview]) -> None:
        while parts:
            # IOV_MAX limits the number of buffers per call.
            sent = self._socket.sendmsg(parts[:512])
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    @contextlib.contextmanager
    def _closed_on_error(self) -> Any:
        """Close the channel if a message stays incomplete, because of an error or Ctrl-C."""
        try:
            yield
        except BaseException:
            self._closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            raise


class Server:
    """Listens, and passes each authenticated channel to a function in a separate thread.

    Parameters
    ----------
    secret : bytes
    on_channel : callable
        Takes an `AuthenticatedChannel`, which is closed when it returns. May raise
        InvalidMessage.
    host : str
        Name or address to listen on. Default ``"127.0.0.1"``: this host only.
    port : int
        Default 0: a free port.
    path : Path, optional
        Listen on a Unix socket instead, which only this user can access.

    Attributes
    ----------
    address : str
        The argument of `connect`: ``"host:port"``, or ``"unix:"`` and a path.
    """

    def __init__(
        self,
        secret: bytes,
        on_channel: Callable[[AuthenticatedChannel], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        path: Path | None = None,
    ) -> None:
        self._digest = hashlib.sha256(secret).digest()
        self._context: ssl.SSLContext | None = None
        self._on_channel = on_channel
        self._path = path
        if path is not None:
            self._listener = unix_socket.listen(path, 64)
            self.address = f"unix:{path}"
        else:
            self._context = pinned_context(secret, ssl.PROTOCOL_TLS_SERVER)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=64)
            number = self._listener.getsockname()[1]
            self.address = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
        self._listener.settimeout(None)
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, socket.socket] = {}
        #: Addresses of the unauthenticated connections, the oldest first.
        self._unauthenticated: dict[socket.socket, str] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="tfd-secure-accept", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Stop listening and close all channels; threads get `timeout` seconds to end."""
        with self._lock:
            self._closed = True
            open_now = list(self._open.items())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + timeout
        self._join(self._thread, deadline)
        self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        for thread, connected in open_now:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
            self._join(thread, deadline)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _join(thread: threading.Thread, deadline: float) -> None:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                connected, peer = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # such as EMFILE: no descriptor is free
                continue
            with self._lock:
                if self._closed:
                    connected.close()
                    continue
                self._unauthenticated[connected] = str(peer[0]) if peer else ""
                self._close_excess(self._unauthenticated[connected])
                thread = threading.Thread(
                    target=self._serve, args=(connected,), name="tfd-secure-channel", daemon=True
                )
                self._open[thread] = connected
            try:
                thread.start()
            except RuntimeError:  # the limit of threads
                with self._lock:
                    self._unauthenticated.pop(connected, None)
                    del self._open[thread]
                connected.close()
                time.sleep(0.05)

    def _close_excess(self, address: str) -> None:
        """Close the oldest unauthenticated connection if `address`, or the server, has too many.

        If the newest were refused instead, idle connections could lock clients out.
        """
        counts = collections.Counter(self._unauthenticated.values())
        if address and counts[address] > _MAX_UNAUTHENTICATED_PER_ADDRESS:
            excess = address
        elif len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
            excess, _ = counts.most_common(1)[0]
        else:
            return
        oldest = next(c for c, origin in self._unauthenticated.items() if origin == excess)
        del self._unauthenticated[oldest]
        # The thread of the connection closes the socket.
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)

    def _serve(self, connected: socket.socket) -> None:
        try:
            try:
                channel = self._authenticate(connected)
            except BaseException:
                connected.close()
                raise
            finally:
                with self._lock:
                    self._unauthenticated.pop(connected, None)
            with channel:
                self._on_channel(channel)
        except (EOFError, OSError):
            pass  # the client is lost, or not authenticated
        except InvalidMessage as error:
            log.warning("a connection to %s was closed: %s", self.address, error)
        finally:
            with self._lock:
                self._open.pop(threading.current_thread(), None)

    def _authenticate(self, connected: socket.socket) -> AuthenticatedChannel:
        deadline = time.monotonic() + AUTHENTICATION_SECONDS
        if self._context is not None:
            return _over_tls(connected, self._context, deadline, is_server=True)
        connected.settimeout(AUTHENTICATION_SECONDS)
        if not unix_socket.is_this_user(connected):
            raise PermissionError("authentication failed: the client belongs to another user")
        digest = _receive_exactly(connected, len(self._digest), deadline=deadline)
        if not hmac.compare_digest(digest, self._digest):
            raise PermissionError("authentication failed: the client does not have the secret")
        connected.sendall(_ACCEPTED)
        return AuthenticatedChannel(connected)


#: Returns a listening `Server`.
serve = Server


def connect(address: str, secret: bytes, timeout: float = 10.0) -> AuthenticatedChannel:
    """Return a channel to a `Server`.

    Parameters
    ----------
    address : str
        ``"host:port"``, or ``"unix:"`` and a path.
    secret : bytes
    timeout : float
        Seconds to connect, and again to authenticate. Default 10.

    Raises
    ------
    OSError
        No server is reachable: ConnectionError, TimeoutError.
    PermissionError
        Another program listens, or the secret differs.
    """
    path = address.removeprefix("unix:")
    if path != address:
        connected = unix_socket.connect(Path(path), timeout)
    else:
        host, _, port = address.rpartition(":")
        context = pinned_context(secret, ssl.PROTOCOL_TLS_CLIENT)
        connected = socket.create_connection((host.strip("[]"), int(port)), timeout)
    deadline = time.monotonic() + timeout
    try:
        if path == address:
            return _over_tls(connected, context, deadline)
        if not unix_socket.is_this_user(connected):
            raise PermissionError(f"another user listens at {path}")
        connected.sendall(hashlib.sha256(secret).digest())
        if _receive_exactly(connected, len(_ACCEPTED), deadline=deadline) != _ACCEPTED:
            raise PermissionError(f"another program listens at {path}")
        return AuthenticatedChannel(connected)
    except EOFError:
        connected.close()
        raise PermissionError(
            f"{address} closed the connection: its secret differs, or it is shutting down"
        ) from None
    except BaseException:
        connected.close()
        raise


def _over_tls(
    connected: socket.socket,
    context: ssl.SSLContext,
    deadline: float,
    *,
    is_server: bool = False,
) -> AuthenticatedChannel:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    break_if_vanished(connected, VANISHED_SECONDS)
    return AuthenticatedChannel(TlsSocket(connected, context, deadline, is_server=is_server))


def _receive_exactly(
    connected: TlsSocket | socket.socket,
    size: int,
    allocate: Callable[[int], Any] = bytearray,
    *,
    deadline: float,
    rate: float = math.inf,
) -> Any:
    """Return exactly `size` bytes; raise EOFError if the stream ends earlier.

    Raise TimeoutError at `deadline`, which is one second later for each `rate` received bytes.
    """
    received = allocate(min(size, FIRST_ALLOCATION))
    view, count = memoryview(received), 0
    while count < size:
        if count == len(view):
            larger = allocate(min(size, 2 * count))
            memoryview(larger)[:count] = view
            received, view = larger, memoryview(larger)
        end = min(deadline + count / rate, time.monotonic() + STALL_SECONDS)
        if isinstance(connected, TlsSocket):
            arrived = connected.recv_into(view[count:], end)
        else:
            await_data(connected.fileno(), end)
            arrived = connected.recv_into(view[count:])
        if not arrived:
            raise EOFError("the other end closed the channel")
        count += arrived
    return received
