"""Limits of bytes and time of HTTP replies, for clients that are based on `http.client`.

These are urllib3, httplib2, and the libraries on top of them. Their timeouts apply to each read. A
server that sends one byte at a time never reaches them, and no limit of bytes exists.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import io
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tfd_notebook.errors import InvalidMessage

_Result = TypeVar("_Result")
#: Seconds to connect, or for a reply, if the client has no timeout.
_DEFAULT_SECONDS = 30.0
#: Limit in bytes of the headers of a reply, also of a proxy.
_MAX_HEADER_BYTES = 1 << 16


def limited(connection: Any, most: int, end: float = math.inf) -> Any:
    """Return a subclass of a type of connection with limits of each reply.

    The timeout of the client applies to the connection as a whole: its name, all addresses, a
    proxy and TLS. It also applies to a reply as a whole, with its headers. A later read raises
    TimeoutError. A longer or compressed reply raises InvalidMessage.

    Parameters
    ----------
    connection : type
        A subclass of `http.client.HTTPConnection`.
    most : int
        Limit in bytes.
    end : float
        Time (`time.monotonic`) after which connecting and replies fail. Default: never.
    """

    class Limited(connection):
        def response_class(self, sock: Any, *arguments: Any, **options: Any) -> _Response:
            return _Response(sock, *arguments, most=most, end=end, **options)

        def connect(self) -> None:
            left = end - time.monotonic()
            within(min(_seconds(self.timeout), left), super().connect, self.close)

    Limited.__name__ = connection.__name__
    return Limited


def limit_pools(manager: Any, most: int, end: float = math.inf) -> None:
    """Limit the replies to the later connections of a pool manager of urllib3; see `limited`."""
    manager.pool_classes_by_scheme = {
        scheme: type(
            pool.__name__, (pool,), {"ConnectionCls": limited(pool.ConnectionCls, most, end)}
        )
        for scheme, pool in manager.pool_classes_by_scheme.items()
    }


def _seconds(timeout: Any) -> float:
    return timeout if isinstance(timeout, (int, float)) and timeout else _DEFAULT_SECONDS


def within(
    seconds: float, connect: Callable[[], _Result], close: Callable[[], object] = lambda: None
) -> _Result:
    """Return the result of a function in another thread, or raise TimeoutError.

    Nothing else limits the time to resolve a name, or to try all of its addresses.

    Parameters
    ----------
    seconds : float
    connect : callable
        Connects, or resolves a name.
    close : callable
        Is called when `connect` returns too late.
    """
    connected: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            try:
                result = connect()
            except BaseException as error:
                connected.set_exception(error)
            else:
                connected.set_result(result)
        except concurrent.futures.InvalidStateError:  # too late
            close()

    if seconds > 0:
        try:
            threading.Thread(target=run, name="tfd-connect", daemon=True).start()
        except RuntimeError:  # at the exit of Python, or the limit of threads
            run()
    try:
        concurrent.futures.wait([connected], max(0.0, seconds))
    finally:
        is_late = connected.cancel()
    if is_late:
        raise TimeoutError(f"no connection within {max(0.0, seconds):.3g} s")
    return connected.result()


class _Response(http.client.HTTPResponse):
    """A reply that is read from a `_LimitedStream`."""

    def __init__(self, sock: Any, *arguments: Any, most: int, end: float, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self._most = most
        self._stream = _LimitedStream(self.fp.detach(), sock, min(most, _MAX_HEADER_BYTES), end)
        self.fp: Any = _Reader(self._stream)

    def begin(self) -> None:
        super().begin()
        self._stream.max_bytes = self._most
        if self.getheader("Content-Encoding", "identity") != "identity":
            raise InvalidMessage("invalid reply: expected no compression")
        if self.length is not None:
            _check_length(self.length, self._most)


class _LimitedStream(io.RawIOBase):
    """The received data of one reply."""

    def __init__(self, raw: Any, sock: Any, most: int, end: float) -> None:
        self._raw = raw
        self._sock = sock
        self._timeout = _seconds(sock.gettimeout())
        self._seconds = min(self._timeout, end - time.monotonic())
        self._end = time.monotonic() + self._seconds
        self.max_bytes = most
        self._received = 0

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        number: int = self._raw.fileno()
        return number

    def readinto(self, buffer: Any) -> int | None:
        try:
            return self._receive(buffer)
        except BaseException:
            self._raw.close()  # the error refers to the reply, which would stay open
            raise

    def _receive(self, buffer: Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no complete reply within {max(0.0, self._seconds):.3g} s")
        self._sock.settimeout(left)
        count: int | None = self._raw.readinto(buffer)
        self._sock.settimeout(self._timeout)  # for the next reply of this connection
        self._received += count or 0
        _check_length(self._received, self.max_bytes)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Reader(io.BufferedReader):
    """A buffered reader that allocates no memory for a length that is above the limit."""

    def read(self, size: int | None = -1, /) -> bytes:
        raw: Any = self.raw
        _check_length(size or 0, raw.max_bytes)
        return super().read(size)


def _check_length(length: int, most: int) -> None:
    if length > most:
        raise InvalidMessage(f"invalid reply: longer than {most} bytes")
