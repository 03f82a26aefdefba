"""Kernels of Jupyter servers elsewhere: started, spoken to over their channels, ended."""

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

from tfd_notebook.errors import InvalidMessage, LaunchError, TfdError, Unsupported, UsageError
from tfd_notebook.net import messages, validation

#: The environment variable that holds the token of servers for which none is given.
TOKEN = "TFD_JUPYTER_TOKEN"
#: Seconds to connect, and to be answered.
_REQUEST_SECONDS = (10.0, 30.0)
#: Seconds without any message, four pings, after which a connection counts as lost; and after
#: which the server is asked whether the kernel is still there, since it does not tell its end.
_SILENT_SECONDS, _ASK_SECONDS = 20.0, 7.0
#: Ends of the addresses that Jupyter prints, and that a browser shows.
_PAGES = re.compile(r"/(lab(/(tree|workspaces)/.*)?|tree|(tree|notebooks)/.*\.ipynb)$")
_PROTOCOL = "5.3"

#: States of a kernel whose process died, whatever its server starts in its place.
ENDING = ("restarting", "dead")

Message = dict[str, Any]


class JupyterServer:
    """A Jupyter server or gateway.

    Parameters
    ----------
    url : str
        As Jupyter prints it, with or without ``?token=``.
    token : str, optional
        Empty for none. Default: the one in `url`, else the value of ``TFD_JUPYTER_TOKEN``.
    ca : str, optional
        File with the certificates to trust instead of the system's.

    Attributes
    ----------
    label : str
        Host and port, by which a person knows it.
    host : str
    """

    def __init__(self, url: str, token: str | None = None, ca: str | None = None) -> None:
        for package in ("requests", "websocket"):
            if importlib.util.find_spec(package) is None:
                raise Unsupported(
                    "kernels elsewhere need the packages requests and websocket-client",
                    fix='pip install "tfd-notebook[jupyter]"',
                )
        self.url, in_url = split(url)
        parts = urllib.parse.urlsplit(self.url)
        self.host = parts.hostname or ""
        self.label = parts.netloc
        self.ca = None if ca is None else os.path.abspath(os.path.expanduser(ca))
        if self.ca is not None and not os.path.isfile(self.ca):
            raise UsageError(f"ca={ca!r} is no file")
        self.token = (in_url or os.environ.get(TOKEN, "")) if token is None else token

    @property
    def is_open(self) -> bool:
        """Whether what is said to it goes unencrypted to another host."""
        if self.url.startswith("https:"):
            return False
        with contextlib.suppress(ValueError):
            return not ipaddress.ip_address(self.host).is_loopback
        return self.host != "localhost"

    def start_kernel(self, name: str) -> str:
        """Start a kernel of that kind and return its id.

        Raises
        ------
        LaunchError
            The server refuses, is none, or has no such kernel.
        OSError
            It cannot be reached now.
        """
        specs = self.ask("GET", "/api/kernelspecs")
        known = specs.get("kernelspecs", {}) if isinstance(specs, dict) else {}
        if name not in known:
            raise LaunchError(
                f"{self.label} has no kernel {name!r}",
                fix=f"its kernels are {', '.join(sorted(known)) or 'none'}: kernel= names one",
            )
        return messages.kernel_id(self.ask("POST", "/api/kernels", {"name": name}))

    def end_kernel(self, kernel: str) -> bool:
        """End a kernel; return whether the server said so. Never raises."""
        with contextlib.suppress(OSError, TfdError):
            self.ask("DELETE", f"/api/kernels/{kernel}")
            return True
        return False

    def interrupt(self, kernel: str) -> None:
        """Have a kernel stop what it does."""
        self.ask("POST", f"/api/kernels/{kernel}/interrupt")

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return what the server answers, as JSON values; None where it says nothing."""
        import requests

        try:
            reply = requests.request(
                method,
                self.url + path,
                json=body,
                # Unlike a header, this is not replaced by an entry of ~/.netrc.
                auth=self._authorize,
                verify=self.ca or True,
                timeout=_REQUEST_SECONDS,
                allow_redirects=False,
            )
        except requests.exceptions.SSLError as error:
            raise self._broken(error) from None
        except requests.exceptions.RequestException as error:
            raise OSError(_reason(error)) from None
        self._check(reply.status_code, path)
        try:
            return reply.json() if reply.content else None
        except ValueError:
            raise self._no_jupyter("it answers something else than JSON") from None

    def farewell(self, kernel: str) -> dict[str, Any]:
        """Return what a kernel needs to end itself; see `kernelend`."""
        return {
            "url": f"{self.url}/api/kernels/{kernel}",
            "headers": self.headers,
            "ca": Path(self.ca).read_text() if self.ca else None,
        }

    def connect(self, kernel: str, session: str | None = None) -> Connection:
        """Return a connection to a kernel's channels; raises as `start_kernel` does.

        In the `session` of an earlier connection what it missed is handed over.
        """
        import websocket

        session = session or uuid.uuid4().hex
        path = f"/api/kernels/{kernel}/channels"
        way = websocket.WebSocket(
            sslopt={"ca_certs": self.ca} if self.ca else {}, enable_multithread=True
        )
        way.settimeout(_SILENT_SECONDS)
        url = f"ws{self.url.removeprefix('http')}{path}?session_id={session}"
        try:
            # A redirect would take the token to another server.
            way.connect(url, header=self.headers, redirect_limit=0)
        except ssl.SSLError as error:
            raise self._broken(error) from None
        except websocket.WebSocketBadStatusException as error:
            self._check(error.status_code, path)
            raise self._no_jupyter(f"it answers {error.status_code}") from None
        except (websocket.WebSocketException, OSError) as error:
            self._check(way.getstatus() or 0, path)
            raise OSError(_reason(error)) from None
        return Connection(way, session, lambda: self.has(kernel))

    def has(self, kernel: str) -> bool:
        """Whether the server has that kernel; true where it does not answer."""
        with contextlib.suppress(OSError, TfdError):
            there = self.ask("GET", "/api/kernels")
            return any(messages.kernel_id(one) == kernel for one in there or ())
        return True

    @property
    def headers(self) -> dict[str, str]:
        """What tells the server who asks: never a part of an address, which ends up in logs."""
        return {"Authorization": f"token {self.token}"} if self.token else {}

    def _authorize(self, request: Any) -> Any:
        request.headers.update(self.headers)
        return request

    def _check(self, status: int, path: str) -> None:
        if status in (301, 302, 303, 307, 308, 401, 403):
            raise LaunchError(
                f"{self.label} refuses the token" if self.token else f"{self.label} wants a token",
                fix=f"token=, the variable {TOKEN} for a single server, or a profile with this "
                "server and its token: `jupyter server list` there shows it",
            )
        if status == 404 and path.count("/") > 2:
            raise OSError("the kernel has ended")
        if status in (404, 405):
            raise self._no_jupyter(f"it answers {status} to {path}")
        if status >= 500 or status in (408, 429):
            raise OSError(f"it answers {status} to {path}")
        if status >= 400:
            raise LaunchError(f"{self.label} answers {status} to {path}")

    def _no_jupyter(self, why: str) -> LaunchError:
        return LaunchError(
            f"{self.label} is no Jupyter server: {why}", fix=f"is {self.url} the whole address?"
        )

    def _broken(self, error: Exception) -> Exception:
        """Return what to raise for an error of TLS: only a certificate stays as bad as it is."""
        why = _reason(error)
        if not isinstance(_innermost(error), ssl.SSLCertVerificationError):
            return OSError(why)
        if "expired" in why:
            fix = "whoever runs it has to renew it"
        else:
            fix = "ca= names a file with the certificate to trust"
        return LaunchError(f"the certificate of {self.label} is not trusted: {why}", fix=fix)


class Connection:
    """The channels of a kernel. Whoever reads is one thread; any may send.

    Parameters
    ----------
    way : websocket.WebSocket
    session : str
    is_there : callable
        Returns whether the kernel still exists.
    """

    def __init__(self, way: Any, session: str, is_there: Callable[[], bool]) -> None:
        self._way = way
        self.session = session
        self._is_there = is_there
        self._closed = threading.Event()

    def send(
        self,
        channel: str,
        kind: str,
        content: Mapping[str, Any],
        subshell: str | None = None,
        number: str | None = None,
    ) -> str:
        """Send a message and return its id, which may be given, or raise OSError."""
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
            self._way.send(json.dumps({**message, "channel": channel, "buffers": []}))
        except (websocket.WebSocketException, OSError) as error:
            raise OSError(_reason(error)) from None
        return number

    def execute(self, code: str, number: str | None = None) -> str:
        """Have the kernel run `code`, which its history does not keep; return the request's id."""
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
        """Yield what arrives, until the connection ends or is silent for too long."""
        import websocket

        silent_since = time.monotonic()
        self._way.settimeout(_ASK_SECONDS)
        while not self._closed.is_set():
            try:
                received = self._way.recv()
            except websocket.WebSocketTimeoutException:
                if time.monotonic() - silent_since > _SILENT_SECONDS or not self._is_there():
                    return
                continue
            except (websocket.WebSocketException, OSError, ValueError):
                return
            if not received:
                return
            yield _message(received)
            silent_since = time.monotonic()

    def close(self) -> None:
        """End it; whoever reads gets no more."""
        self._closed.set()
        with contextlib.suppress(Exception):
            self._way.close(timeout=1)


def split(url: str) -> tuple[str, str]:
    """Return the address of a server without its page, and the token in it.

    Raises
    ------
    UsageError
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port_is_one = parts.port is None or parts.port > 0
    except (ValueError, AttributeError, TypeError):
        port_is_one = False
    if not port_is_one or parts.scheme not in ("http", "https") or not parts.hostname:
        shown = url.partition("?")[0] if isinstance(url, str) else url
        raise UsageError(
            f"{shown!r} is no address of a Jupyter server",
            fix="such as https://host:8888/?token=...",
        )
    path = _PAGES.sub("", parts.path.rstrip("/"))
    token = urllib.parse.parse_qs(parts.query).get("token", [""])[0]
    netloc = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, netloc, path, "", "")), token


def _message(received: str | bytes) -> Message:
    """Return a message of Jupyter's, of which one with buffers is binary.

    Raises
    ------
    InvalidMessage
    """
    validation.check_size(len(received))
    parts: list[Any] = [received]
    try:
        if isinstance(received, bytes):
            (count,) = struct.unpack_from("!I", received)
            offsets = [*struct.unpack_from(f"!{count}I", received, 4), len(received)]
            parts = [received[a:b] for a, b in itertools.pairwise(offsets)]
        message = json.loads(parts[0])
    except (ValueError, IndexError, RecursionError, struct.error):
        raise InvalidMessage("invalid message: expected JSON and its buffers") from None
    return {**messages.kernel_message(message), "buffers": parts[1:]}


def _reason(error: BaseException) -> str:
    """Return the innermost reason of what went wrong, without the addresses around it."""
    error = _innermost(error)
    return getattr(error, "verify_message", "") or str(error) or type(error).__name__


def _innermost(error: BaseException) -> BaseException:
    while True:
        inner = error.__cause__ or error.__context__ or getattr(error, "reason", None)
        inner = inner or next((one for one in error.args if isinstance(one, BaseException)), None)
        if not isinstance(inner, BaseException):
            return error
        error = inner
