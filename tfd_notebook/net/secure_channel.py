"""Mutually authenticated message channels, with a shared secret, over TCP or Unix sockets.

A message is a header of JSON values and a body of bytes. Received data is never unpickled or
executed. A client has two seconds to prove that it has the secret, in a message of fixed length.
Without a proof it is disconnected silently. The secret itself is never sent. Over TCP each message
has an authentication code. Messages are not encrypted.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import json
import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tfd_notebook.errors import InvalidMessage
from tfd_notebook.net import channel_handshake, unix_socket

log = logging.getLogger("tfd_notebook")

#: Bytes, or an object with contiguous memory that supports the buffer protocol.
Buffer: TypeAlias = Any

#: Seconds that a server waits for a client's proof.
PROOF_SECONDS = 2.0
#: Seconds after which a TCP connection to an unresponsive peer breaks.
VANISHED_SECONDS = 60
#: Seconds without progress in the middle of a message.
STALL_SECONDS = 60.0
#: Limits of a header and of a body, in bytes.
MAX_HEADER = 1 << 20
MAX_BODY = 1 << 31
#: Limits of concurrent connections without a proof, in all and per address. The oldest is closed.
_MAX_UNPROVEN, _MAX_UNPROVEN_PER_ADDRESS = 64, 16

_LENGTHS = struct.Struct("!IQ")
_SEQUENCE = struct.Struct("!Q")


class Secret(bytes):
    """A secret whose value is never printed. It is bytes in all other respects."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret(...)"

    __str__ = __repr__

    @classmethod
    def new(cls) -> Secret:
        """Return a random secret of 32 bytes."""
        return cls(secrets.token_bytes(32))


class AuthenticatedChannel:
    """A connection to an authenticated peer. Any thread may send, one at a time may receive.

    Parameters
    ----------
    connected : socket.socket
        The channel takes ownership of it.
    keys : tuple of bytes
        Keys of the codes of sent and received messages. A Unix socket does not use them.

    Attributes
    ----------
    peer : str
        Address of the other end; empty for a socket in the file system.
    """

    def __init__(self, connected: socket.socket, keys: tuple[bytes, bytes]) -> None:
        connected.settimeout(STALL_SECONDS)
        over_tcp = connected.family != socket.AF_UNIX
        self.peer = ""
        if over_tcp:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel_handshake.notice_vanished_peers(connected, VANISHED_SECONDS)
            self.peer = str(connected.getpeername()[0])
        self._socket = connected
        self._keys = keys if over_tcp else None
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._sent = self._received = 0
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor for `select`; -1 once the channel is closed."""
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        """True if this end is closed."""
        return self._closed

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
        with self._sending:
            code = b""
            if self._keys:
                code = _code(self._keys[0], self._sent, lengths, encoded_header, parts)
                self._sent += 1
            with self._closed_on_error():
                self._send_all([memoryview(lengths + code + encoded_header), *parts])

    def receive(
        self, timeout: float | None = None, allocate: Callable[[int], Any] = bytearray
    ) -> tuple[dict[str, Any], memoryview]:
        """Return the next message.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the start of a message. Default: no timeout.
        allocate : callable
            Takes a size and returns a writable buffer for the body. Default `bytearray`.

        Returns
        -------
        header : dict
        body : memoryview
            Writable, in memory that no other message uses.

        Raises
        ------
        TimeoutError
            No message started. The channel remains usable.
        EOFError
            The other end closed the channel.
        OSError
            The connection broke or the message is invalid. The channel is closed.
        """
        with self._receiving:
            self._wait_for_message(timeout)
            with self._closed_on_error():
                return self._receive(allocate)

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

    def _receive(self, allocate: Callable[[int], Any]) -> tuple[dict[str, Any], memoryview]:
        first = channel_handshake.receive_exactly(self._socket, _LENGTHS.size, first=True)
        head_size, size = _LENGTHS.unpack(first)
        if head_size > MAX_HEADER or size > MAX_BODY:
            raise ConnectionAbortedError("invalid message: too long")
        code = (
            channel_handshake.receive_exactly(self._socket, channel_handshake.CODE)
            if self._keys
            else b""
        )
        encoded_header = channel_handshake.receive_exactly(self._socket, head_size)
        body = memoryview(channel_handshake.receive_exactly(self._socket, size, allocate=allocate))
        if self._keys:
            expected = _code(self._keys[1], self._received, bytes(first), encoded_header, [body])
            self._received += 1
            if not hmac.compare_digest(code, expected):
                raise ConnectionAbortedError("invalid message: authentication failed")
        try:
            header = json.loads(bytes(encoded_header))
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise ConnectionAbortedError("invalid message: expected a JSON object")
        return header, body

    def _wait_for_message(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._closed:
            left = 1.0 if deadline is None else min(1.0, max(0.0, deadline - time.monotonic()))
            try:
                ready = _wait(self._socket, left)
            except (OSError, ValueError):  # closed in the meantime
                break
            if ready:
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"nothing arrived within {timeout:g} s")
        self._socket.close()
        raise EOFError("the channel is closed")

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
        self._secret = bytes(secret)
        self._on_channel = on_channel
        self._path = path
        if path is not None:
            self._listener = unix_socket.listen(path, 64)
            self.address = f"unix:{path}"
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=64)
            number = self._listener.getsockname()[1]
            self.address = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
        self._listener.settimeout(None)
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, AuthenticatedChannel | socket.socket] = {}
        #: Addresses of the connections without a proof, the oldest first.
        self._unproven: dict[socket.socket, str] = {}
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
        for thread, channel in open_now:
            if isinstance(channel, AuthenticatedChannel):
                channel.close()
            else:
                with contextlib.suppress(OSError):
                    channel.shutdown(socket.SHUT_RDWR)
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
                self._unproven[connected] = str(peer[0]) if peer else ""
                self._close_excess(self._unproven[connected])
                thread = threading.Thread(
                    target=self._serve, args=(connected,), name="tfd-secure-channel", daemon=True
                )
                self._open[thread] = connected
            try:
                thread.start()
            except RuntimeError:  # the limit of threads
                with self._lock:
                    self._unproven.pop(connected, None)
                    del self._open[thread]
                connected.close()
                time.sleep(0.05)

    def _close_excess(self, address: str) -> None:
        """Close the oldest connection without a proof if `address`, or the server, has too many.

        If the newest were refused instead, idle connections could lock clients out.
        """
        counts = collections.Counter(self._unproven.values())
        if address and counts[address] > _MAX_UNPROVEN_PER_ADDRESS:
            excess = address
        elif len(self._unproven) > _MAX_UNPROVEN:
            excess, _ = counts.most_common(1)[0]
        else:
            return
        oldest = next(c for c, origin in self._unproven.items() if origin == excess)
        del self._unproven[oldest]
        # The thread of the connection closes the socket.
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)

    def _serve(self, connected: socket.socket) -> None:
        thread = threading.current_thread()
        try:
            try:
                keys = channel_handshake.prove_to_client(connected, self._secret, PROOF_SECONDS)
                channel = AuthenticatedChannel(connected, keys)
            except (OSError, EOFError):
                connected.close()
                return
            finally:
                with self._lock:
                    self._unproven.pop(connected, None)
            with self._lock:
                self._open[thread] = channel
                closed = self._closed
            with channel:
                if not closed:
                    self._on_channel(channel)
        except (EOFError, OSError):
            pass  # the connection to the client is lost
        except InvalidMessage as error:
            log.warning("a connection to %s was closed: %s", self.address, error)
        finally:
            with self._lock:
                self._open.pop(thread, None)


def serve(
    secret: bytes,
    on_channel: Callable[[AuthenticatedChannel], None],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    path: Path | None = None,
) -> Server:
    """Return a listening `Server` with these arguments."""
    return Server(secret, on_channel, host=host, port=port, path=path)


def connect(address: str, secret: bytes, timeout: float = 10.0) -> AuthenticatedChannel:
    """Return a channel to a `Server`.

    Parameters
    ----------
    address : str
        ``"host:port"``, or ``"unix:"`` and a path.
    secret : bytes
    timeout : float
        Seconds to connect, and the same again for the proofs. Default 10.

    Raises
    ------
    OSError
        No server is reachable: ConnectionError, TimeoutError.
    PermissionError
        Another program listens, or the secret differs.
    """
    if address.startswith("unix:"):
        connected = unix_socket.connect(Path(address.removeprefix("unix:")), timeout)
    else:
        host, _, port = address.rpartition(":")
        connected = socket.create_connection((host.strip("[]"), int(port)), timeout)
    try:
        return AuthenticatedChannel(
            connected, channel_handshake.prove_to_server(connected, bytes(secret), timeout)
        )
    except EOFError:
        connected.close()
        raise PermissionError(
            f"{address} closed the connection: its secret differs, or it is shutting down"
        ) from None
    except BaseException:
        connected.close()
        raise


def _code(
    key: bytes, sequence: int, lengths: bytes, encoded_header: Buffer, parts: Sequence[Buffer]
) -> bytes:
    code = hmac.new(key, _SEQUENCE.pack(sequence), "sha256")
    code.update(lengths)
    code.update(encoded_header)
    for part in parts:
        code.update(part)
    return code.digest()


def _wait(connected: socket.socket, seconds: float) -> bool:
    """Return True if data, or the end of the stream, arrives within `seconds`."""
    if not hasattr(select, "poll"):
        return bool(select.select([connected], [], [], seconds)[0])
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
