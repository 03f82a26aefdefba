"""Client of remote Jupyter servers: start and end kernels, and communicate over their channels."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import ipaddress
import itertools
import json
import os
import re
import ssl
import struct
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tfd_notebook.errors import (
    InvalidMessage,
    LaunchError,
    TfdError,
    Unsupported,
    UsageError,
    without_user,
)
from tfd_notebook.net import messages, proxies, reconnect, validation

#: The environment variable with the token of servers for which none is configured.
TOKEN = "TFD_JUPYTER_TOKEN"
#: Seconds after which the server is asked if the kernel still exists. The server does not report
#: the end of a kernel.
_CHECK_SECONDS = 7.0
#: Seconds that a close waits for the server's.
_CLOSE_SECONDS = 1.0
#: Page parts of the addresses that Jupyter prints and a browser shows.
_PAGES = re.compile(r"/(lab(/(tree|workspaces)/.*)?|tree|(tree|notebooks)/.*\.ipynb)$")
_PROTOCOL = "5.3"
#: Maximum number of parts of a binary message: its JSON and its buffers.
_MAX_BUFFERS = 10_000

#: States of a kernel whose process died, even if its server restarts it.
ENDING = ("restarting", "dead")

Message = dict[str, Any]


class JupyterServer:
    """A Jupyter server or gateway.

    Parameters
    ----------
    url : str
        The address as Jupyter prints it, with or without ``?token=``.
    token : str, optional
        Empty for no token. Default: the token in `url`, else the value of ``TFD_JUPYTER_TOKEN``.
    ca : str, optional
        File with the certificates to trust instead of those of the system.

    Attributes
    ----------
    label : str
        Host and port, for messages to users.
    host : str
    """

    def __init__(self, url: str, token: str | None = None, ca: str | None = None) -> None:
        for package in ("requests", "websocket"):
            if importlib.util.find_spec(package) is None:
                raise Unsupported(
                    "remote kernels need the packages requests and websocket-client",
                    fix='pip install "tfd-notebook[jupyter]"',
                )
        self.url, in_url = split(url)
        parts = urllib.parse.urlsplit(self.url)
        self.host = parts.hostname or ""
        self.label = parts.netloc
        self.ca = None if ca is None else os.path.abspath(os.path.expanduser(ca))
        if self.ca is not None and not os.path.isfile(self.ca):
            raise UsageError(f"invalid ca {ca!r}: file not found")
        self.token = validation.header_value(
            (in_url or os.environ.get(TOKEN, "")) if token is None else token, "token"
        )

    @property
    def is_open(self) -> bool:
        """True if the connection to another host is unencrypted."""
        if self.url.startswith("https:"):
            return False
        with contextlib.suppress(ValueError):
            return not ipaddress.ip_address(self.host).is_loopback
        return self.host != "localhost"

    def start_kernel(self, name: str) -> str:
        """Start a kernel of that specification and return its id.

        Raises
        ------
        LaunchError
            The server refuses, is not a Jupyter server, or does not have this kernel.
        OSError
            The server cannot be reached now.
        """
        reply = self.request("GET", "/api/kernelspecs")
        specs = reply.get("kernelspecs") if isinstance(reply, dict) else None
        if not isinstance(specs, dict):
            raise self._not_jupyter("it returned no kernels")
        if name not in specs:
            raise LaunchError(
                f"{self.label} has no kernel {name!r}",
                fix=f"set kernel= to one of its kernels: {', '.join(sorted(specs)) or 'none'}",
            )
        return messages.kernel_id(self.request("POST", "/api/kernels", {"name": name}))

    def end_kernel(self, kernel: str) -> bool:
        """End a kernel; return True if the server confirmed it. Never raises."""
        with contextlib.suppress(OSError, TfdError):
            self.request("DELETE", f"/api/kernels/{kernel}")
            return True
        return False

    def interrupt(self, kernel: str) -> None:
        """Interrupt a kernel."""
        self.request("POST", f"/api/kernels/{kernel}/interrupt")

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the server's reply as JSON values, or None if it is empty."""
        import requests
        import urllib3

        from tfd_notebook.launchers.client import limited_transport

        self._check_proxy()
        try:
            content = limited_transport.request(
                method,
                self.url + path,
                body=body,
                auth=self._authorize,
                verify=self.ca or True,
                check=lambda status: self._check(status, path),
            )
        except requests.exceptions.SSLError as error:
            raise self._tls_error(error) from None
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            raise OSError(_reason(error)) from None
        validation.check_values(content)
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError):
            raise self._not_jupyter("it returned invalid JSON") from None

    def end_request(self, kernel: str) -> dict[str, Any]:
        """Return the request with which a kernel ends itself; see `agent.bridges.kernel`."""
        return {
            "url": f"{self.url}/api/kernels/{kernel}",
            "headers": self.headers,
            "ca": Path(self.ca).read_text() if self.ca else None,
        }

    def connect(self, kernel: str, session: str | None = None) -> Connection:
        """Return a connection to a kernel's channels; raises as `start_kernel` does.

        With the `session` of an earlier connection, the server sends the messages missed since.
        """
        import websocket

        from tfd_notebook.launchers.client import limited_transport

        self._check_proxy()
        session = session or uuid.uuid4().hex
        path = f"/api/kernels/{kernel}/channels"
        socket = limited_transport.LimitedWebSocket(sslopt={"ca_certs": self.ca} if self.ca else {})
        socket.settimeout(reconnect.SILENT_SECONDS)
        url = f"ws{self.url.removeprefix('http')}{path}?session_id={session}"
        try:
            # A redirect would take the token to another server.
            socket.connect(url, header=self.headers, redirect_limit=0)
        except ssl.SSLError as error:
            raise self._tls_error(error) from None
        except websocket.WebSocketBadStatusException as error:
            self._check(error.status_code or 0, path)
            raise self._not_jupyter(f"it returned status {error.status_code}") from None
        except (websocket.WebSocketException, OSError, ValueError, IndexError) as error:
            self._check(socket.getstatus() or 0, path)
            raise OSError(_reason(error)) from None
        return Connection(socket, session, lambda: self.has(kernel))

    def has(self, kernel: str) -> bool:
        """Return True if the server has that kernel, or does not answer."""
        with contextlib.suppress(OSError, TfdError):
            kernels = self.request("GET", "/api/kernels")
            return isinstance(kernels, list) and any(
                messages.kernel_id(info) == kernel for info in kernels
            )
        return True

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers with the token, which is never part of an address that logs show."""
        return {"Authorization": f"token {self.token}"} if self.token else {}

    def _authorize(self, request: Any) -> Any:
        request.headers.update(self.headers)
        return request

    def _check_proxy(self) -> None:
        if variable := proxies.invalid_variable(self.url):
            raise LaunchError(
                f"{self.label}: the variable {variable} is not a valid address", fix=proxies.FIX
            )

    def _check(self, status: int, path: str) -> None:
        if status in (301, 302, 303, 307, 308, 401, 403):
            raise LaunchError(
                f"{self.label} rejected the token"
                if self.token
                else f"{self.label} requires a token",
                fix=f"token=, the variable {TOKEN} for a single server, or a profile with this "
                "server and its token: `jupyter server list` on its host shows it",
            )
        if status == 404 and path.count("/") > 2:
            raise OSError("the kernel has ended")
        if status in (404, 405):
            raise self._not_jupyter(f"it returned status {status} for {path}")
        if status >= 500 or status in (408, 429):
            raise OSError(f"it returned status {status} for {path}")
        if status >= 400:
            raise LaunchError(f"{self.label} returned status {status} for {path}")

    def _not_jupyter(self, cause: str) -> LaunchError:
        return LaunchError(
            f"{self.label} is not a Jupyter server: {cause}",
            fix=f"check that {self.url} is the complete address",
        )

    def _tls_error(self, error: Exception) -> Exception:
        """Return the exception for a TLS error. Only an invalid certificate is permanent."""
        cause = _reason(error)
        if not isinstance(_innermost(error), ssl.SSLCertVerificationError):
            return OSError(cause)
        if "expired" in cause:
            fix = "ask the server's administrator to renew it"
        else:
            fix = "set ca= to a file with the certificate to trust"
        return LaunchError(f"the certificate of {self.label} is not trusted: {cause}", fix=fix)


class Connection:
    """The channels of a kernel. One thread reads; any thread may send.

    Parameters
    ----------
    socket : limited_transport.LimitedWebSocket
    session : str
    exists : callable
        Returns True if the kernel still exists.
    """

    def __init__(self, socket: Any, session: str, exists: Callable[[], bool]) -> None:
        self._socket = socket
        self.session = session
        self._exists = exists
        self._closed = threading.Event()

    def send(
        self,
        channel: str,
        kind: str,
        content: Mapping[str, Any],
        subshell: str | None = None,
        number: str | None = None,
    ) -> str:
        """Send a message and return its id, which is `number` if given, or raise OSError."""
        import websocket

        number = number or uuid.uuid4().hex
        header = {
            "msg_id": number,
            "msg_type": kind,
            "session": self.session,
            "username": "",
            "version": _PROTOCOL,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(),
        }
        if subshell is not None:
            header["subshell_id"] = subshell
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        try:
            self._socket.send(json.dumps({**message, "channel": channel, "buffers": []}))
        except (websocket.WebSocketException, OSError) as error:
            raise OSError(_reason(error)) from None
        return number

    def execute(self, code: str, number: str | None = None) -> str:
        """Execute `code` in the kernel, outside its history, and return the id of the request."""
        content = {
            "code": code,
            "silent": False,
            "store_history": False,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        return self.send("shell", "execute_request", content, number=number)

    def messages(self) -> Iterator[Message]:
        """Yield received messages until the connection ends or is silent for too long."""
        import websocket

        silent_since = time.monotonic()
        self._socket.settimeout(_CHECK_SECONDS)
        while not self._closed.is_set():
            try:
                received = self._socket.recv()
            except websocket.WebSocketTimeoutException:
                silent = time.monotonic() - silent_since
                if self._closed.is_set() or silent > reconnect.SILENT_SECONDS or not self._exists():
                    return
                continue
            except (websocket.WebSocketException, OSError, ValueError):
                return
            if not received:
                return
            yield _message(received)
            silent_since = time.monotonic()

    def close(self) -> None:
        """Close the connection; `messages` ends."""
        self._closed.set()
        with contextlib.suppress(Exception):
            self._socket.close(timeout=_CLOSE_SECONDS)
        self._socket.shutdown()  # `close` does nothing if the server has closed it


def split(url: str) -> tuple[str, str]:
    """Return the address of a server without the page, and the token in it.

    Raises
    ------
    UsageError
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except (ValueError, AttributeError, TypeError):
        port_is_valid = False
    if not port_is_valid or parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"invalid Jupyter server address {_quotable(url)!r}",
            fix="such as https://host:8888/?token=...",
        )
    path = _PAGES.sub("", parts.path.rstrip("/"))
    token = urllib.parse.parse_qs(parts.query).get("token", [""])[0]
    netloc = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, netloc, path, "", "")), token


def _quotable(url: Any) -> Any:
    """Return an invalid address without its user part and token."""
    if not isinstance(url, str):
        return url
    # A password with a question mark may contain the start of the query.
    scheme, separator, rest = url.partition("://")
    address, _, query = (rest if separator else url).partition("?")
    shown = "..." if "@" in query else address.rpartition("@")[2]
    return f"{scheme}://{shown}" if separator else shown


def _message(received: str | bytes) -> Message:
    """Return a Jupyter message, which is binary if it has buffers.

    Raises
    ------
    InvalidMessage
    """
    validation.check_size(len(received))
    parts: list[Any] = [received]
    try:
        if isinstance(received, bytes):
            (count,) = struct.unpack_from("!I", received)
            if count > _MAX_BUFFERS:
                raise ValueError
            offsets = [*struct.unpack_from(f"!{count}I", received, 4), len(received)]
            # Ranges that overlap would need more memory than the message.
            if offsets != sorted(offsets):
                raise ValueError
            parts = [received[a:b] for a, b in itertools.pairwise(offsets)]
        validation.check_values(parts[0])
        message = json.loads(parts[0])
    except (ValueError, IndexError, RecursionError, struct.error):
        raise InvalidMessage("invalid message: expected JSON and its buffers") from None
    return {**messages.kernel_message(message), "buffers": parts[1:]}


def _reason(error: BaseException) -> str:
    """Return the innermost cause of an error, without the addresses in the outer errors."""
    error = _innermost(error)
    text = getattr(error, "verify_message", "") or str(error) or type(error).__name__
    return without_user(text)


def _innermost(error: BaseException) -> BaseException:
    while True:
        inner = error.__cause__ or error.__context__ or getattr(error, "reason", None)
        inner = inner or next((a for a in error.args if isinstance(a, BaseException)), None)
        if not isinstance(inner, BaseException):
            return error
        error = inner
