"""Client of the API of Kubernetes: requests, and channels to processes in pods."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import InvalidMessage, LaunchError, without_user
from tfd_notebook.launchers.client.lines import LineBuffer
from tfd_notebook.net import (
    kubernetes_config,
    limited_http,
    optional_packages,
    reconnect,
    validation,
)

#: Timeout of a request, and of the start of an exec connection, in seconds.
REQUEST_SECONDS = 10.0
#: Seconds after which the credentials are read again.
_CREDENTIAL_SECONDS = 60.0
#: Limit of a reply, in bytes.
MAX_REPLY_BYTES = 16_000_000
#: Seconds without received data before the pod is inspected.
_SILENT_SECONDS = 10.0
_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
#: Channels of these protocols: the first byte of each message.
_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
#: Bytes of a message that the API server receives. Larger ones may be refused.
_CHUNK_BYTES = 1 << 15
_MAX_TEXT = 600


class KubernetesApi:
    """The API, with the credentials of a kubeconfig or of a pod.

    Parameters
    ----------
    kubeconfig, context : str or None
        See `kubernetes_config.configure`.
    namespace : str
        Empty for the default of the credentials.

    Attributes
    ----------
    namespace : str
    """

    def __init__(self, kubeconfig: str | None, context: str | None, namespace: str) -> None:
        optional_packages.load("kubernetes", 'launcher "kubernetes"', "kubernetes")
        self._arguments = (kubeconfig, context)
        self._lock = threading.Lock()
        self._read_at = time.monotonic()
        self._configuration, default = kubernetes_config.configure(*self._arguments)
        self.namespace = namespace or default

    @property
    def place(self) -> str:
        return f"Kubernetes at {self._configuration.host}, namespace {self.namespace!r}"

    def request(
        self,
        method: str,
        resource: str,
        name: str = "",
        *,
        subresource: str = "",
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the reply as JSON values; None if the object `name` does not exist.

        The reply of the subresource ``log`` is text.

        Parameters
        ----------
        method : {"GET", "POST", "PATCH", "DELETE"}
        resource : str
            ``"pods"``, ``"services"``, ``"events"`` or ``"jobs"``.
        name : str
            The object. Default: the whole list.
        subresource : str
        body, query : mapping, optional

        Raises
        ------
        OSError
            The API cannot be reached now.
        LaunchError
            The API refuses the request.
        """
        import urllib3
        from kubernetes.client import ApiException
        from kubernetes.client.rest import RESTClientObject

        configuration = self._current()
        url = self._url(resource, name, subresource)
        if query:
            url += "?" + urllib.parse.urlencode(query)
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {**_headers(configuration), "Content-Type": content_type}
        client = RESTClientObject(configuration)
        end = time.monotonic() + REQUEST_SECONDS  # also of repeated attempts
        limited_http.limit_pools(client.pool_manager, MAX_REPLY_BYTES, end)
        try:
            reply = client.request(
                method, url, headers=headers, body=body, _request_timeout=REQUEST_SECONDS
            ).response
            with contextlib.closing(reply):
                content = reply.read(decode_content=False)
        except InvalidMessage as error:
            raise InvalidMessage(f"{self.place}: {error.what}") from None
        except urllib3.exceptions.HTTPError as error:
            raise OSError(f"{self.place} does not answer: {_short(str(error))}") from None
        except ApiException as error:  # of TLS
            raise OSError(f"{self.place} does not answer: {_short(str(error.reason))}") from None
        finally:
            client.close()
        if reply.status == 404 and name:
            return None
        self._check(reply.status, content, method, resource, name, subresource)
        if subresource == "log":
            return content.decode(errors="replace")
        validation.check_values(content)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise InvalidMessage(f"invalid reply of {self.place}: expected JSON") from None

    def open_exec(self, pod: str, container: str, command: Sequence[str]) -> ExecConnection:
        """Start the connection to a new process in a pod; `ExecConnection.open` completes it."""
        configuration = self._current()
        query = [("container", container), ("stdin", "true"), ("stdout", "true")]
        query += [("stderr", "true"), *(("command", word) for word in command)]
        url = f"{self._url('pods', pod, 'exec')}?{urllib.parse.urlencode(query)}"
        return ExecConnection(
            configuration,
            "ws" + url.removeprefix("http"),
            lambda status, content: self._check(status, content, "GET", "pods", pod, "exec"),
        )

    def _current(self) -> Any:
        """Return the configuration; read the credentials again if they may be old."""
        with self._lock:
            if time.monotonic() - self._read_at > _CREDENTIAL_SECONDS:
                self._configuration, _ = kubernetes_config.configure(*self._arguments)
                self._read_at = time.monotonic()
            return self._configuration

    def _url(self, resource: str, name: str, subresource: str) -> str:
        group = "apis/batch/v1" if resource == "jobs" else "api/v1"
        parts = [group, "namespaces", self.namespace, resource, name, subresource]
        return "/".join([self._configuration.host.rstrip("/"), *filter(None, parts)])

    def _check(
        self, status: int, content: bytes, method: str, resource: str, name: str, subresource: str
    ) -> None:
        if 200 <= status < 300:
            return
        message = _short(kubernetes_config.message(content))
        what = f"{self.place}: {message} (HTTP {status})"
        if status == 401:
            raise LaunchError(
                f"{self.place}: the credentials are missing, invalid or expired: {message}",
                fix="renew the credentials of the kubeconfig or service account; "
                "see kubectl auth whoami",
            )
        if status == 403 and "exceeded quota" in message:
            raise LaunchError(what, fix=QUOTA_FIX)
        if status == 403:
            verb = _VERBS.get((method, bool(name)), "get")
            path = f"{resource}/{subresource}" if subresource else resource
            path = f"{path}.batch" if resource == "jobs" else path
            raise LaunchError(
                f"{self.place}: this account may not {verb} {path}: {message}",
                fix=f"ask for a Role with that permission, and check it with kubectl auth can-i "
                f"{verb} {path} --namespace {self.namespace}",
            )
        if status == 404 and message.startswith("namespaces "):
            raise LaunchError(what, fix="create the namespace, or pass another namespace=")
        if status in (400, 409, 422):
            raise LaunchError(what, fix="correct the options of tfd.launchers.Kubernetes")
        raise OSError(what)


#: Verbs of the API by HTTP method, and by whether the request names an object.
_VERBS = {
    ("GET", False): "list",
    ("GET", True): "get",
    ("POST", False): "create",
    ("PATCH", True): "patch",
    ("DELETE", True): "delete",
}
QUOTA_FIX = "request less with pods= or resources=, or pass another namespace="


class ExecConnection:
    """The connection to a process in a pod, which is a channel to an agent once it is open.

    Parameters
    ----------
    configuration : kubernetes.client.Configuration
    url : str
    check : callable
        Raises the error for the status and the body of a refusal.
    """

    def __init__(self, configuration: Any, url: str, check: Callable[[int, bytes], None]) -> None:
        from tfd_notebook.launchers.client import limited_transport

        options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            timeout = int(1000 * reconnect.SILENT_SECONDS)
            options.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout))
        self._socket = limited_transport.LimitedWebSocket(
            sslopt=_ssl_options(configuration), sockopt=options
        )
        self._configuration = configuration
        self._url = url
        self._check = check
        self._reading = threading.Lock()
        self._sending = threading.Lock()
        self._opened = self._closed = False
        #: Returns True if the process cannot run any more. Called when no data arrives.
        self.has_ended: Callable[[], bool] = lambda: False

    def open(self) -> None:
        """Wait until the process has started.

        Raises
        ------
        OSError
            The API cannot be reached now, or the connection was closed.
        LaunchError
            The API refuses the request.
        """
        import websocket

        self._socket.settimeout(REQUEST_SECONDS)
        headers = [f"{name}: {value}" for name, value in _headers(self._configuration).items()]
        try:
            # A redirect would take the token to another server.
            self._socket.connect(
                self._url,
                header=headers,
                subprotocols=list(_PROTOCOLS),
                suppress_origin=True,
                redirect_limit=0,
                **_proxy(self._configuration),
            )
        except websocket.WebSocketBadStatusException as error:
            # The status is None if the reply has no status line.
            self._check(error.status_code or 0, error.resp_body or b"")
            raise OSError(f"the API returned status {error.status_code} for exec") from None
        except (websocket.WebSocketException, OSError, ValueError) as error:
            raise OSError(f"opening an exec connection failed: {_short(str(error))}") from None
        self._opened = True
        self._socket.settimeout(_SILENT_SECONDS)
        if self._socket.getsubprotocol() not in _PROTOCOLS or self._closed:
            self.close()
            raise OSError("the exec connection was closed, or has an unknown protocol")

    def send(self, data: bytes) -> None:
        import websocket

        try:
            with self._sending:  # no other message may arrive between the parts
                for start in range(0, len(data), _CHUNK_BYTES):
                    self._socket.send_binary(bytes([_STDIN]) + data[start : start + _CHUNK_BYTES])
        except (websocket.WebSocketException, OSError, AttributeError) as error:
            raise OSError(f"the exec connection broke: {error}") from None

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the process's output; until its handshake, also those of errors."""
        rest = {_STDOUT: LineBuffer(), _STDERR: LineBuffer()}
        started = False
        for message in self._messages():
            channel, data = message[0], message[1:]
            if channel == _STATUS and not started and b'"Success"' not in data:
                yield kubernetes_config.message(data).encode()
            if channel not in rest:
                continue
            for line in rest[channel].feed(data):
                if channel == _STDOUT or not started:
                    started = started or line.startswith(stdio.HANDSHAKE.encode())
                    yield line

    def _messages(self) -> Iterator[bytes]:
        import websocket

        while not self._closed:
            with self._reading:
                try:
                    message = self._socket.recv()
                except websocket.WebSocketTimeoutException:
                    message = None
                except (websocket.WebSocketException, OSError, ValueError, AttributeError):
                    return
            if message is None:
                if self.has_ended():
                    return
                continue
            if not message or self._closed:
                return
            validation.check_size(len(message))
            yield message.encode() if isinstance(message, str) else message

    def close(self) -> None:
        """Close the connection, also one that `open` waits for; the process ends."""
        self._closed = True
        self._socket.shut_down()
        with self._reading:
            if self._opened:  # otherwise `open` closes it
                self._socket.shutdown()


def _headers(configuration: Any) -> dict[str, str]:
    """Return the headers with the credentials."""
    settings = configuration.auth_settings().values()
    return {setting["key"]: setting["value"] for setting in settings if setting["value"]}


def _ssl_options(configuration: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "cert_reqs": ssl.CERT_REQUIRED if configuration.verify_ssl else ssl.CERT_NONE,
        "ca_certs": configuration.ssl_ca_cert,
        "certfile": configuration.cert_file,
        "keyfile": configuration.key_file,
        "server_hostname": configuration.tls_server_name,
    }
    if configuration.assert_hostname is not None or not configuration.verify_ssl:
        options["check_hostname"] = bool(configuration.assert_hostname)
    return {name: value for name, value in options.items() if value is not None}


def _proxy(configuration: Any) -> dict[str, Any]:
    """Return the options for the proxy of the configuration."""
    if not configuration.proxy:
        return {}
    proxy = urllib.parse.urlsplit(configuration.proxy)
    return {
        "http_proxy_host": proxy.hostname,
        "http_proxy_port": proxy.port or 80,
        "http_no_proxy": [host for host in (configuration.no_proxy or "").split(",") if host],
    }


def _short(text: str) -> str:
    return validation.text(without_user(" ".join(text.split()))[:_MAX_TEXT], "message")
