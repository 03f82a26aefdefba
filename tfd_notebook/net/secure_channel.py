"""Channels that only who knows a secret can open: proofs on both sides, then framed messages.

A message is a header of JSON values and a body of bytes; nothing that arrives is ever unpickled or
run. A client has two seconds to prove that it has the secret, in a message of fixed length; without
that it is disconnected silently. The secret itself is never sent. Over TCP each
message carries a code that nobody without the secret can make; what is sent can be read on the way.
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

#: Bytes, or whatever shows its contiguous memory as such: arrays, Arrow's buffers.
Buffer: TypeAlias = Any

#: Seconds that a server waits for a client's proof.
PROOF_SECONDS = 2.0
#: Seconds after which a TCP connection breaks whose peer does not respond.
VANISHED_SECONDS = 60
#: Seconds without any progress in the middle of a message.
STALL_SECONDS = 60.0
#: Bytes of a header, and of a body.
MOST_HEADER = 1 << 20
MOST_BODY = 1 << 31
#: Connections without a proof at a time, in all and of one address. The oldest makes room.
_MOST_UNPROVEN, _MOST_OF_ADDRESS = 64, 16

_LENGTHS = struct.Struct("!IQ")
_SEQUENCE = struct.Struct("!Q")


class Secret(bytes):
    """A secret that does not show itself where it is printed; it is bytes for everything else."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret(...)"

    __str__ = __repr__

    @classmethod
    def new(cls) -> Secret:
        """Return one that nobody can guess, of 32 bytes."""
        return cls(secrets.token_bytes(32))


class AuthenticatedChannel:
    """A connection whose other end is proven. Any thread may send, one at a time may receive.

    Parameters
    ----------
    connected : socket.socket
        It becomes the channel's.
    keys : tuple of bytes
        Those that make the codes of what is sent and received; none where the system carries it.

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
        """Return the descriptor, for `select`; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._closed

    def send(
        self, header: dict[str, Any], body: Buffer | list[Buffer] | tuple[Buffer, ...] = b""
    ) -> None:
        """Send a message.

        Parameters
        ----------
        header : dict
            JSON values, up to 1 MiB of them.
        body : bytes-like, or list or tuple of bytes-like
            Contiguous buffers of any kind, one after the other; up to 2 GiB in all.

        Raises
        ------
        ValueError
            It is too large.
        OSError
            The other end is gone, or took nothing for a minute.
        """
        head = json.dumps(header, separators=(",", ":")).encode()
        buffers = body if isinstance(body, (list, tuple)) else [body]
        views: list[memoryview] = [memoryview(buffer) for buffer in buffers]
        parts = [view.cast("B") for view in views if view.nbytes]
        size = sum(map(len, parts))
        if len(head) > MOST_HEADER or size > MOST_BODY:
            raise ValueError(f"a message of {len(head)} and {size} bytes is too large")
        lengths = _LENGTHS.pack(len(head), size)
        with self._sending:
            code = b""
            if self._keys:
                code = _code(self._keys[0], self._sent, lengths, head, parts)
                self._sent += 1
            with self._broken_by_any_error():
                self._send_all([memoryview(lengths + code + head), *parts])

    def receive(
        self, timeout: float | None = None, allocate: Callable[[int], Any] = bytearray
    ) -> tuple[dict[str, Any], memoryview]:
        """Return the next message.

        Parameters
        ----------
        timeout : float, optional
            Seconds until it has to begin. Default: no limit.
        allocate : callable
            Returns a writable buffer of that many bytes for the body. Default `bytearray`.

        Returns
        -------
        header : dict
        body : memoryview
            Writable, of its own memory.

        Raises
        ------
        TimeoutError
            None began; the channel can be used further.
        EOFError
            The other end closed the channel.
        OSError
            The connection broke, or what arrived is no message; the channel is closed.
        """
        with self._receiving:
            self._await(timeout)
            with self._broken_by_any_error():
                return self._receive(allocate)

    def close(self) -> None:
        """Close it; whoever sends or receives gets an error at once. Never raises."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # Nobody may be waiting in the descriptor whose number is given away.
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
        if head_size > MOST_HEADER or size > MOST_BODY:
            raise ConnectionAbortedError("what arrived is no message")
        code = (
            channel_handshake.receive_exactly(self._socket, channel_handshake.CODE)
            if self._keys
            else b""
        )
        head = channel_handshake.receive_exactly(self._socket, head_size)
        body = memoryview(channel_handshake.receive_exactly(self._socket, size, allocate=allocate))
        if self._keys:
            expected = _code(self._keys[1], self._received, bytes(first), head, [body])
            self._received += 1
            if not hmac.compare_digest(code, expected):
                raise ConnectionAbortedError("a message is not from who opened the channel")
        try:
            header = json.loads(bytes(head))
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise ConnectionAbortedError("what arrived is no message")
        return header, body

    def _await(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._closed:
            left = 1.0 if deadline is None else min(1.0, max(0.0, deadline - time.monotonic()))
            try:
                ready = _wait(self._socket, left)
            except (OSError, ValueError):  # closed meanwhile
                break
            if ready:
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"nothing arrived within {timeout:g} s")
        self._socket.close()
        raise EOFError("the channel is closed")

    def _send_all(self, parts: list[memoryview]) -> None:
        while parts:
            # A kernel takes so many buffers at a time.
            sent = self._socket.sendmsg(parts[:512])
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    @contextlib.contextmanager
    def _broken_by_any_error(self) -> Any:
        """Close the channel where a message ends in the middle: by an error, or by Ctrl-C."""
        try:
            yield
        except BaseException:
            self._closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            raise


class Server:
    """Listens, and gives each channel that is opened to a function, in a thread of its own.

    Parameters
    ----------
    secret : bytes
    on_channel : callable
        Takes an `AuthenticatedChannel`, which is closed when it returns. May raise
        InvalidMessage.
    host : str
        Name or address to listen at. Default ``"127.0.0.1"``: this host only.
    port : int
        Default 0: any free one.
    path : Path, optional
        A socket in the file system instead, which only this user can reach.

    Attributes
    ----------
    address : str
        What `connect` takes: ``"host:port"``, or ``"unix:"`` and a path.
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
        self._thread = threading.Thread(target=self._accept, name="tfd-sealed", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Listen no more, and close all channels; threads get `timeout` seconds to end."""
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
                time.sleep(0.05)  # out of descriptors, perhaps
                continue
            with self._lock:
                if self._closed:
                    connected.close()
                    continue
                self._unproven[connected] = str(peer[0]) if peer else ""
                self._close_excess(self._unproven[connected])
                thread = threading.Thread(
                    target=self._serve, args=(connected,), name="tfd-sealed-channel", daemon=True
                )
                self._open[thread] = connected
            try:
                thread.start()
            except RuntimeError:  # the limit of threads is reached
                with self._lock:
                    self._unproven.pop(connected, None)
                    del self._open[thread]
                connected.close()
                time.sleep(0.05)

    def _close_excess(self, address: str) -> None:
        """Close the oldest connection without a proof if `address`, or all, have too many.

        Refusing the newest one instead would let idle connections lock out clients.
        """
        counts = collections.Counter(self._unproven.values())
        if address and counts[address] > _MOST_OF_ADDRESS:
            excess = address
        elif len(self._unproven) > _MOST_UNPROVEN:
            excess, _ = counts.most_common(1)[0]
        else:
            return
        oldest = next(one for one, of in self._unproven.items() if of == excess)
        del self._unproven[oldest]
        # Its thread closes it.
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
            pass  # the other end is gone
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
    """Return a `Server` that listens; the arguments are its own."""
    return Server(secret, on_channel, host=host, port=port, path=path)


def connect(address: str, secret: bytes, timeout: float = 10.0) -> AuthenticatedChannel:
    """Return a channel to a `Server`.

    Parameters
    ----------
    address : str
        ``"host:port"``, or ``"unix:"`` and a path.
    secret : bytes
    timeout : float
        Seconds for the connection; as many again for the proofs. Default 10.

    Raises
    ------
    OSError
        Nobody is there: ConnectionError, TimeoutError.
    PermissionError
        Somebody else is there, or has another secret.
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
            f"{address} closed the connection: it has another secret, or is ending"
        ) from None
    except BaseException:
        connected.close()
        raise


def _code(
    key: bytes, sequence: int, lengths: bytes, head: Buffer, parts: Sequence[Buffer]
) -> bytes:
    made = hmac.new(key, _SEQUENCE.pack(sequence), "sha256")
    made.update(lengths)
    made.update(head)
    for part in parts:
        made.update(part)
    return made.digest()


def _wait(connected: socket.socket, seconds: float) -> bool:
    """Whether something has arrived, or the end, within that time."""
    if not hasattr(select, "poll"):
        return bool(select.select([connected], [], [], seconds)[0])
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
