"""HTTP requests and websockets with limits on what a server sends, and on the time that it takes.

The timeouts of requests and websocket-client apply to each read. A server that sends one byte at a
time never reaches them. The limits here apply to a request or a handshake as a whole.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import math
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import requests
import requests.adapters
import urllib3
import websocket

from tfd_notebook._compat import websocket_client
from tfd_notebook.errors import InvalidMessage
from tfd_notebook.net import limited_http, validation

#: Seconds to connect, and for a complete request.
CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 30.0
#: Limits in bytes of the reply to a request, and to the handshake of a websocket.
MAX_REPLY_BYTES = 10_000_000
MAX_HANDSHAKE_BYTES = 1_000_000
#: Limit of its lines. websocket-client receives them in single bytes, which takes seconds per MB.
MAX_HEADER_BYTES = 1 << 16
#: A message of a websocket may take this time, and more for its length.
MESSAGE_SECONDS = 30.0
MIN_BYTES_PER_SECOND = 10_000

# Requests


def request(
    method: str,
    url: str,
    *,
    body: Mapping[str, Any] | None,
    auth: Callable[[Any], Any],
    verify: str | bool,
    check: Callable[[int], None],
) -> bytes:
    """Send a request and return the content of the reply.

    Parameters
    ----------
    method, url : str
    body : mapping, optional
        JSON values to send.
    auth : callable
        Adds the credentials. Unlike a header, they are not replaced by an entry of ``~/.netrc``.
    verify : str or bool
        File with the certificates to trust, or True for those of the system.
    check : callable
        Takes the status. It may raise before the content is received.

    Raises
    ------
    InvalidMessage
        The reply is longer than `MAX_REPLY_BYTES`, or compressed.
    TimeoutError
        The reply is not complete `REQUEST_SECONDS` after the call.
    requests.exceptions.RequestException, urllib3.exceptions.HTTPError
        The connection failed.
    """
    end = time.monotonic() + REQUEST_SECONDS
    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, _Adapter(end))
        try:
            reply = session.request(
                method,
                url,
                json=body,
                auth=auth,
                verify=verify,
                timeout=(CONNECT_SECONDS, REQUEST_SECONDS),
                allow_redirects=False,
                stream=True,
                headers={"Accept-Encoding": "identity"},
            )
            with reply:
                check(reply.status_code)
                content: bytes = reply.raw.read(decode_content=False)
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError):
            if time.monotonic() < end:
                raise
            raise TimeoutError(f"no complete reply within {REQUEST_SECONDS:g} s") from None
    return content


class _Adapter(requests.adapters.HTTPAdapter):
    """Opens connections with limits of their replies, until a time."""

    def __init__(self, end: float) -> None:
        self._end = end
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        limited_http.limit_pools(self.poolmanager, MAX_REPLY_BYTES, self._end)

    def proxy_manager_for(self, *arguments: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*arguments, **options)
        limited_http.limit_pools(manager, MAX_REPLY_BYTES, self._end)
        return manager


# Websockets


def shut_down(connected: Any) -> None:
    """Shut down a socket that another thread may be reading. Never raises."""
    with contextlib.suppress(OSError):
        # Not the method of SSLSocket, which a read in another thread does not support. The
        # connection through a TLS proxy has its socket as an attribute.
        socket.socket.shutdown(getattr(connected, "socket", connected), socket.SHUT_RDWR)


class LimitedWebSocket(websocket.WebSocket):
    """A websocket with limits of its handshake, of each message, and of the time to close it.

    `recv` raises InvalidMessage before it receives a message above `validation.MAX_MESSAGE_BYTES`.
    It raises WebSocketProtocolException for a message that arrives too slowly.
    Text is decoded, but not checked before that: the check of websocket-client is in Python.

    Parameters
    ----------
    clock : callable
        Returns the time in seconds. Default `time.monotonic`.
    **options
        See `websocket.WebSocket`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, **options: Any) -> None:
        self._connected: Any = None
        self._deadline = math.inf
        super().__init__(enable_multithread=True, skip_utf8_validation=True, **options)
        receive = self._before_deadline(self.frame_buffer.recv)
        self.cont_frame: Any = _Fragments(False, True)
        self.frame_buffer: Any = _Frames(receive, self.cont_frame, clock)

    @property
    def sock(self) -> Any:
        """The connected socket, or None. During the handshake it receives limited data."""
        return self._connected

    @sock.setter
    def sock(self, connected: Any) -> None:
        self._connected = None if connected is None else _HandshakeSocket(connected, self._deadline)

    def connect(self, url: str, **options: Any) -> None:
        """Connect within the timeout of the websocket, which then applies to each read."""
        timeout = self.gettimeout()
        self._deadline = time.monotonic() + timeout
        super().connect(url, socket=self._opened(url, options), **options)
        self._deadline = math.inf
        self._connected = self._connected.connected
        self._connected.settimeout(timeout)

    def _opened(self, url: str, options: Mapping[str, Any]) -> Any:
        """Return a socket connected to the server, through a proxy if there is one."""
        route = websocket_client.route(url, **options)
        limited = limited_http.limited(
            http.client.HTTPConnection, MAX_HANDSHAKE_BYTES, self._deadline
        )
        connection = limited(*(route.proxy or route[:2]), timeout=self.gettimeout())
        if route.proxy is not None:
            headers = {"Host": f"{route.host}:{route.port}"}
            if route.proxy_user:
                user = base64.b64encode(":".join(route.proxy_user).encode()).decode()
                headers["Proxy-Authorization"] = f"Basic {user}"
            connection.set_tunnel(route.host, route.port, headers)
        try:
            connection.connect()
            for option in (*websocket.DEFAULT_SOCKET_OPTION, *self.sock_opt.sockopt):
                connection.sock.setsockopt(*option)
            connection.sock.settimeout(max(0.001, self._deadline - time.monotonic()))
            if route.is_secure:
                return websocket_client.over_tls(connection.sock, self.sock_opt, route.host)
        except (http.client.HTTPException, InvalidMessage) as error:
            connection.close()
            raise websocket.WebSocketProxyException(str(error)) from None
        except BaseException:
            connection.close()
            raise
        return connection.sock

    def close(self, *arguments: Any, timeout: float, **options: Any) -> None:
        """Close the websocket, and wait up to `timeout` seconds for the server to do so."""
        self._deadline = time.monotonic() + timeout
        super().close(*arguments, timeout=timeout, **options)

    def shut_down(self) -> None:
        """End the reads of other threads, also during `connect`. Never raises."""
        if (connected := self._connected) is not None:
            shut_down(getattr(connected, "connected", connected))

    def _before_deadline(self, receive: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def receive_in_time(size: int) -> bytes:
            if time.monotonic() > self._deadline:
                raise websocket.WebSocketTimeoutException("the websocket is closed")
            return receive(size)

        return receive_in_time


class _HandshakeSocket:
    """A connected socket from which limited data is received before a deadline."""

    def __init__(self, connected: Any, deadline: float) -> None:
        self.connected = connected
        self._deadline = deadline
        self._left = MAX_HANDSHAKE_BYTES
        self._header_left = MAX_HEADER_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connected, name)

    def recv(self, size: int) -> bytes:
        """Receive at most `size` bytes, which a header of the server may claim."""
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("no complete reply in time")
        if size == 1:  # `recv_line` of websocket-client
            self._header_left -= 1
        if not self._left or self._header_left < 0:
            raise websocket.WebSocketProtocolException("its reply is too long")
        self.connected.settimeout(seconds)
        data: bytes = self.connected.recv(min(size, self._left))
        self._left -= len(data)
        return data


class _Fragments(websocket.continuous_frame):
    """The received frames of a message."""

    def add(self, frame: Any) -> None:
        super().add(frame)
        if not frame.fin and isinstance(self.cont_data[1], bytes):
            # Later frames are appended to it without a copy.
            self.cont_data[1] = bytearray(self.cont_data[1])

    def extract(self, frame: Any) -> Any:
        self.cont_data[1] = bytes(self.cont_data[1])
        return super().extract(frame)


class _Frames(websocket.frame_buffer):
    """The reader of frames, which checks the length of each before it receives the data.

    It also checks the rate at which a message arrives.
    """

    def __init__(
        self, receive: Callable[[int], bytes], fragments: _Fragments, clock: Callable[[], float]
    ) -> None:
        super().__init__(self._receive, True)
        self._receive_any = receive
        self._fragments = fragments
        self._clock = clock
        #: The time of the first data of an incomplete message, and the bytes since then.
        self._began: float | None = None
        self._received = 0

    def _receive(self, size: int) -> bytes:
        data = self._receive_any(size)
        now = self._clock()
        self._began = now if self._began is None else self._began
        self._received += len(data)
        if now - self._began > MESSAGE_SECONDS + self._received / MIN_BYTES_PER_SECOND:
            raise websocket.WebSocketProtocolException("its message arrives too slowly")
        return data

    def recv_frame(self) -> Any:
        frame = super().recv_frame()
        is_last = frame.opcode == websocket.ABNF.OPCODE_CONT or not self._fragments.cont_data
        if frame.fin and is_last:
            self._began, self._received = None, 0
        return frame

    def recv_strict(self, size: int) -> bytes:
        earlier = self._fragments.cont_data
        validation.check_size(size + (len(earlier[1]) if earlier else 0))
        data: bytes = super().recv_strict(size)
        return data
