"""Fake of Kubernetes' API for pods, over TLS, and as strict as the real one.

Tests have no API server. This fake uses the models of the official client. It refuses unknown
paths, parameters, fields of pods, selectors and tokens with an error.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import select
import socket
import ssl
import sys
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from kubernetes import client

from tests.hosts._authority import Authority
from tests.hosts._network import Peer

Json = dict[str, Any]

_LIST = {
    "allowWatchBookmarks",
    "continue",
    "fieldSelector",
    "labelSelector",
    "limit",
    "pretty",
    "resourceVersion",
    "resourceVersionMatch",
    "sendInitialEvents",
    "timeoutSeconds",
    "watch",
}
_FIELDS = {
    "metadata.name",
    "metadata.namespace",
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    "status.phase",
    "status.podIP",
}
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "AlreadyExists",
    410: "Expired",
    422: "Invalid",
    500: "InternalError",
    503: "ServiceUnavailable",
}
#: Values that Go parses as true.
_TRUE = ("1", "t", "T", "true", "TRUE", "True")
_KEY = r"(?:[\w.-]+/)?[\w.-]+"


class Refusal(Exception):
    """An error of the API, with its HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": _REASONS[code],
            "code": code,
        }


class Kubernetes:
    """The server, as a context manager.

    Attributes
    ----------
    roles : dict of str to str
        The namespace that each token may read. ``"*"`` stands for all namespaces.
    most : int
        The maximum number of pods on a page, for any requested limit.
    requests : list
        Path and parameters of each authorized request.
    """

    #: Class of the handlers of connections.
    handler: type[BaseHTTPRequestHandler]

    def __init__(self, directory: Path) -> None:
        authority = Authority(directory / "authority")
        certificate, key = authority.issue(Peer("localhost", "127.0.0.1"))
        self.authority = authority.path
        self.roles: dict[str, str] = {"token": "mine"}
        self.most = 500
        self.requests: list[tuple[str, dict[str, str]]] = []
        self._pods: dict[tuple[str, str], Json] = {}
        #: Version and event of the changes since the last compaction.
        self._events: deque[tuple[int, Json]] = deque()
        self._version = 100
        self._compacted = 100
        self._news = threading.Condition()
        self._closed = False
        self._faults: deque[int | str] = deque()
        self._directory = directory
        self._watchers = 0
        self.connections: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", 0), self.handler)
        self._server.kubernetes = self
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )

    def __enter__(self) -> Kubernetes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._server.shutdown()
        self._thread.join()
        for connection in list(self.connections):  # clients keep their connections open
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    # Changes of the cluster

    def apply(self, **described: Any) -> Json:
        """Create or change a pod; `pod` has the arguments."""
        created = pod(**described)
        key = (created["metadata"]["namespace"], created["metadata"]["name"])
        with self._news:
            self._publish("MODIFIED" if key in self._pods else "ADDED", created)
            self._pods[key] = created
        return created

    def delete(self, name: str, namespace: str = "mine") -> None:
        with self._news:
            self._publish("DELETED", self._pods.pop((namespace, name)))

    def compact(self) -> None:
        """Discard all earlier events, so that running watches and pages expire."""
        with self._news:
            self._version += 1
            self._compacted = self._version
            self._events.clear()
            self._news.notify_all()

    def fail(self, *faults: int | str | Json) -> None:
        """Set the faults of the next requests.

        A fault is an HTTP status, ``"half"``, ``"silence"`` or the body of a reply.
        """
        self._faults.extend(faults)

    def kubeconfig(self, token: str = "token", namespace: str = "mine") -> Path:
        """Write a kubeconfig for a user with this token."""
        path = self._directory / f"kubeconfig-{token}"
        named = {
            "cluster": {
                "server": f"https://127.0.0.1:{self.port}",
                "certificate-authority": str(self.authority),
            },
            "user": {"token": token},
            "context": {"cluster": "it", "user": "it", "namespace": namespace},
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            **{f"{kind}s": [{"name": "it", kind: value}] for kind, value in named.items()},
        }
        path.write_text(yaml.safe_dump(config))
        return path

    @property
    def watchers(self) -> int:
        """The number of running watches."""
        return self._watchers

    # Replies

    def answer(self, path: str, query: dict[str, str], token: str | None) -> Json:
        """Return the requested list, or the selection for a watch."""
        self.check_token(token)
        match = re.fullmatch(r"/api/v1(?:/namespaces/([a-z0-9-]+))?/pods", path)
        if not match:
            raise Refusal(404, "the server could not find the requested resource")
        if self.roles[token] not in ("*", match[1]):
            where = f'in the namespace "{match[1]}"' if match[1] else "at the cluster scope"
            raise Refusal(403, f'pods is forbidden: User "it" cannot list resource "pods" {where}')
        if unknown := set(query) - _LIST:
            raise Refusal(400, f"unknown query parameters: {sorted(unknown)}")
        self.requests.append((path, query))
        selection = _Selection(match[1], query)
        if query.get("watch") in _TRUE:
            return {"watch": selection}
        return self._page(selection, query)

    def check_token(self, token: str | None) -> None:
        if token not in self.roles:
            raise Refusal(401, "Unauthorized")

    def fault(self) -> int | str | None:
        return self._faults.popleft() if self._faults else None

    def _page(self, selection: _Selection, query: dict[str, str]) -> Json:
        with self._news:
            limit = min(_whole(query, "limit", 0) or len(self._pods), self.most)
            if "limit" not in query:
                limit = len(self._pods)
            start, version = "", self._version
            if query.get("continue"):
                version, start = _decoded(query["continue"])
                if version < self._compacted:
                    raise Refusal(410, "The provided continue parameter is too old")
            matches = [
                item
                for (_, name), item in sorted(self._pods.items())
                if selection.has(item) and name > start
            ]
            metadata: Json = {"resourceVersion": str(version)}
            if len(matches) > limit:
                last = matches[limit - 1]["metadata"]["name"]
                token = json.dumps([version, last]).encode()
                metadata["continue"] = base64.b64encode(token).decode()
                metadata["remainingItemCount"] = len(matches) - limit
            return {
                "kind": "PodList",
                "apiVersion": "v1",
                "metadata": metadata,
                "items": matches[:limit],
            }

    def events(self, selection: _Selection) -> Any:
        """Yield the events of a watch until its timeout, and None at each poll."""
        end = time.monotonic() + selection.seconds
        version = selection.version
        self._watchers += 1
        try:
            while True:
                with self._news:
                    if version < self._compacted:
                        gone = Refusal(410, f"too old resource version: {version}")
                        yield {"type": "ERROR", "object": gone.body}
                        return
                    new = [(at, event) for at, event in self._events if at > version]
                    version = self._version
                    if not new:
                        left = end - time.monotonic()
                        if self._closed or left <= 0:
                            return
                        self._news.wait(min(left, 0.05))
                sent = not new
                yield None
                for _, event in new:
                    if selection.has(event["object"]):
                        sent = True
                        yield event
                if not sent and selection.bookmarks:
                    yield {
                        "type": "BOOKMARK",
                        "object": {
                            "kind": "Pod",
                            "apiVersion": "v1",
                            "metadata": {"resourceVersion": str(version)},
                        },
                    }
        finally:
            self._watchers -= 1

    def _publish(self, kind: str, item: Json) -> None:
        """Add an event; the caller holds the lock."""
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, {"type": kind, "object": json.loads(json.dumps(item))}))
        self._news.notify_all()


class _Selection:
    """The pods that a request selects, and the version from which it watches them."""

    def __init__(self, namespace: str | None, query: dict[str, str]) -> None:
        self._namespace = namespace
        self._labels = _selector(query.get("labelSelector", ""))
        self._fields = _fields(query.get("fieldSelector", ""))
        self.version = _whole(query, "resourceVersion", 0)
        self.seconds = _whole(query, "timeoutSeconds", 1800)
        self.bookmarks = query.get("allowWatchBookmarks") in _TRUE

    def has(self, item: Json) -> bool:
        labels = item["metadata"].get("labels", {})
        return (
            self._namespace in (None, item["metadata"]["namespace"])
            and all((labels.get(key) in values) == wanted for key, values, wanted in self._labels)
            and all((_at(item, path) == value) == wanted for path, value, wanted in self._fields)
        )


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    kubernetes: Kubernetes

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or refuse the certificate."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 30

    def setup(self) -> None:
        super().setup()
        self.server.kubernetes.connections.add(self.connection)

    def finish(self) -> None:
        self.server.kubernetes.connections.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        kubernetes = self.server.kubernetes
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        fault = kubernetes.fault()
        try:
            if isinstance(fault, int):
                raise Refusal(fault, f"injected fault {fault}")
            if fault == "silence":
                self.connection.recv(1)  # until the client hangs up
                self.close_connection = True
                return
            answer = kubernetes.answer(parts.path, query, self.token)
            if isinstance(fault, dict):
                self.reply(200, fault)
                return
        except Refusal as refusal:
            self.reply(refusal.code, refusal.body)
            return
        if "watch" in answer:
            self._stream(kubernetes.events(answer["watch"]))
        else:
            self.reply(200, answer, cut=fault == "half")

    @property
    def token(self) -> str | None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if scheme.lower() == "bearer" else None

    def reply(self, code: int, body: Json, cut: bool = False) -> None:
        data = json.dumps(body).encode()
        if cut:
            data = data[: len(data) // 2]
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, events: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in events:
                if event is None:
                    if select.select([self.connection], [], [], 0)[0]:
                        raise ConnectionResetError
                    continue
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:  # the client has disconnected
            self.close_connection = True
        finally:
            events.close()

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


Kubernetes.handler = Handler


def pod(
    name: str,
    labels: dict[str, str] | None = None,
    ip: str | None = "10.0.0.1",
    phase: str = "Running",
    ready: bool = True,
    ending: bool = False,
    owner: str = "",
    ports: dict[str, int] | None = None,
    namespace: str = "mine",
    age: int = 0,
    **more: Any,
) -> Json:
    """Return a pod in the format of the API, checked by the models of the official client.

    `owner` is the kind of its owner, `age` is in seconds, and `more` are fields of its metadata.
    """
    born = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1_700_000_000 - age))
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": f"{namespace}-{name}-{age}",
        "labels": labels or {},
        "creationTimestamp": born,
        **more,
    }
    if ending:
        metadata["deletionTimestamp"] = born
    if owner:
        owned = {"apiVersion": "batch/v1", "kind": owner, "name": "it", "uid": f"the-{owner}"}
        metadata["ownerReferences"] = [owned]
    status = {
        "phase": phase,
        "hostIP": "192.168.0.1",
        "conditions": [{"type": "Ready", "status": str(ready)}],
    }
    if ip:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    listed = [{"name": port, "containerPort": number} for port, number in (ports or {}).items()]
    result: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "nodeName": "node",
            "containers": [{"name": "it", "image": "it", "ports": listed}],
        },
        "status": status,
    }
    check_fields(result, "V1Pod")
    return result


def check_fields(item: Json, kind: str) -> None:
    """Fail on a field that the model `kind` does not have."""
    api = client.ApiClient()
    answer = SimpleNamespace(data=json.dumps(item))
    try:
        read = api.deserialize(answer, kind)
    except TypeError:
        read = api.deserialize(answer.data, kind, "application/json")
    back = json.loads(json.dumps(api.sanitize_for_serialization(read)))
    lost = set(_paths(item)) - set(_paths(back))
    assert not lost, f"a {kind[2:].lower()} has no {sorted(lost)}"


def _paths(value: Any, path: str = "") -> Any:
    if isinstance(value, dict):
        for key, inner in value.items():
            if inner not in ({}, []):
                yield f"{path}.{key}"
                yield from _paths(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner, f"{path}[]")


def _selector(text: str) -> list[tuple[str, set[str | None], bool]]:
    """Return key, values, and True if the label must have one of the values."""
    requirements: list[tuple[str, set[str | None], bool]] = []
    for part in filter(None, re.split(r",(?![^(]*\))", text)):
        part = part.strip()
        if match := re.fullmatch(rf"({_KEY})\s*(==?|!=)\s*([\w.-]*)", part):
            requirements.append((match[1], {match[3]}, match[2] != "!="))
        elif match := re.fullmatch(rf"({_KEY})\s+(in|notin)\s+\(([\w.,\s-]+)\)", part):
            values: set[str | None] = {value.strip() for value in match[3].split(",")}
            requirements.append((match[1], values, match[2] == "in"))
        elif match := re.fullmatch(rf"(!?)({_KEY})", part):
            requirements.append((match[2], {None}, bool(match[1])))
        else:
            raise Refusal(400, f"unable to parse requirement: {part!r}")
    return requirements


def _fields(text: str) -> list[tuple[str, str, bool]]:
    requirements = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([\w.]+)(==?|!=)(.*)", part)
        if not match:
            raise Refusal(400, f"invalid selector: {part!r}; can't understand it")
        if match[1] not in _FIELDS:
            raise Refusal(400, f"field label not supported: {match[1]}")
        requirements.append((match[1], match[3], match[2] != "!="))
    return requirements


def _at(value: Any, path: str) -> str:
    for name in path.split("."):
        value = value.get(name, {})
    return value if isinstance(value, str) else ""


def _whole(query: dict[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    if text and not text.isdecimal():
        raise Refusal(400, f"{name}: Invalid value: {text!r}")
    return int(text) if text else default


def _decoded(token: str) -> tuple[int, str]:
    try:
        version, last = json.loads(base64.b64decode(token, validate=True))
    except ValueError:
        raise Refusal(400, "continue key is not valid") from None
    return version, last
