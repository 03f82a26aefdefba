"""Limits of bytes and time of HTTP replies, for clients that are based on `http.client`.

These are urllib3, httplib2, and the libraries on top of them. Their timeouts apply to each read. A
server that sends one byte at a time never reaches them, and no limit of bytes exists.
"""

from __future__ import annotations

import http.client
import io
import time
from typing import Any

from tfd_notebook.errors import InvalidMessage

#: Seconds for a reply if the client has no timeout.
_DEFAULT_SECONDS = 30.0


def limited(connection: Any, most: int) -> Any:
    """Return a subclass of a type of connection with limits of each reply.

    The timeout of the client applies to the reply as a whole, with its headers. A later read
    raises TimeoutError. A longer or compressed reply raises InvalidMessage.

    Parameters
    ----------
    connection : type
        A subclass of `http.client.HTTPConnection`.
    most : int
        Limit in bytes.
    """

    class LimitedResponse(_Response):
        max_bytes = most

    return type(connection.__name__, (connection,), {"response_class": LimitedResponse})


def limit_pools(manager: Any, most: int) -> None:
    """Limit the replies to the later connections of a pool manager of urllib3; see `limited`."""
    manager.pool_classes_by_scheme = {
        scheme: type(pool.__name__, (pool,), {"ConnectionCls": limited(pool.ConnectionCls, most)})
        for scheme, pool in manager.pool_classes_by_scheme.items()
    }


class _Response(http.client.HTTPResponse):
    """A reply that is read from a `_LimitedStream`."""

    max_bytes: int

    def __init__(self, sock: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        stream = _LimitedStream(self.fp.detach(), sock, self.max_bytes)
        self.fp: Any = _Reader(stream)

    def begin(self) -> None:
        super().begin()
        if self.getheader("Content-Encoding", "identity") != "identity":
            raise InvalidMessage("invalid reply: expected no compression")
        if self.length is not None:
            _check_length(self.length, self.max_bytes)


class _LimitedStream(io.RawIOBase):
    """The received data of one reply."""

    def __init__(self, raw: Any, sock: Any, most: int) -> None:
        self._raw = raw
        self._sock = sock
        self._timeout = sock.gettimeout() or _DEFAULT_SECONDS
        self._end = time.monotonic() + self._timeout
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
            raise TimeoutError(f"no complete reply within {self._timeout:g} s")
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
