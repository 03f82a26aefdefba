"""Fake of Kubernetes that also runs jobs: each pod is a real process of this host.

Its API is as strict as the real one for jobs, services, logs and exec. The controllers do what the
launcher relies on: they start pods, end jobs at their deadline, and collect garbage.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, parse_qsl, urlsplit

import psutil

from tests.integration._kubernetes import Handler, Json, Kubernetes, Refusal, check_fields

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_PATH = re.compile(
    r"/(?:api/v1|apis/batch/v1)/namespaces/([a-z0-9-]+)"
    r"/(pods|jobs|services|events)(?:/([a-z0-9.-]+))?(?:/(log|exec))?"
)
_MODELS = {"jobs": "V1Job", "services": "V1Service"}
_INDEX = "batch.kubernetes.io/job-completion-index"
_POD = "TFD_TEST_POD"
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_PERIOD = 0.05


class KubernetesJobs(Kubernetes):
    """The server with its controllers, as a context manager.

    Attributes
    ----------
    images : set of str
        The images that exist.
    capacity : int, optional
        Maximum number of running pods. Default: no limit.
    quota : int, optional
        The maximum number of pods.
    forbidden : set of (str, str)
        Verbs and resources that the role does not include.
    objects : dict
        Jobs and services by resource and name.
    holds_exec : threading.Event
        Set while exec requests wait for an answer.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.images = {"tfd:1"}
        self.capacity: int | None = None
        self.quota: int | None = None
        self.forbidden: set[tuple[str, str]] = set()
        self.objects: dict[tuple[str, str], Json] = {}
        self.warnings: list[Json] = []
        self.holds_exec = threading.Event()
        self.held_execs: set[socket.socket] = set()
        self.exec_connections: set[socket.socket] = set()
        #: Directories by the name of a pod that has started.
        self.roots: dict[str, Path] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._offset = 0.0
        self._stopped = threading.Event()
        self._controllers = threading.Thread(target=self._control, name="controllers")

    def __enter__(self) -> KubernetesJobs:
        super().__enter__()
        self._controllers.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._controllers.join()
        for _, name in list(self._pods):
            self._remove(name)
        self.holds_exec.clear()
        super().__exit__()

    # Changes of the cluster

    def pass_time(self, seconds: float) -> None:
        """Move the clock of the controllers forward."""
        self._offset += seconds

    def pod_names(self) -> list[str]:
        with self._news:
            return sorted(name for _, name in self._pods)

    def is_empty(self) -> bool:
        return not self._pods and not self.objects

    def running_pods(self) -> list[str]:
        with self._news:
            return [name for (_, name), pod in self._pods.items() if "running" in _state(pod)]

    def has_finished_jobs(self) -> bool:
        return all(
            "finished" in job["status"]
            for job in list(self.objects.values())
            if job["kind"] == "Job"
        )

    def delete_pod(self, name: str, disruption: str = "") -> None:
        """Delete a pod; `disruption` is the reason if a controller evicts it."""
        with self._news:
            pod = self._pods[("mine", name)]
            pod["metadata"]["deletionTimestamp"] = _now()
            if disruption:
                condition = {
                    "type": "DisruptionTarget",
                    "status": "True",
                    "reason": disruption,
                    "message": "the node is drained",
                }
                pod["status"]["conditions"].append(condition)
            self._publish("MODIFIED", pod)
        if (process := self._processes.get(name)) is not None:
            process.terminate()

    def kill_for_memory(self, name: str) -> None:
        """End a pod as the kernel does at its memory limit."""
        with self._news:
            self._pods[("mine", name)]["status"]["killed"] = True
        self._kill(name)

    def end_pod(self, name: str) -> None:
        """End the first process of a pod, and wait until its state shows that."""
        self._processes[name].terminate()
        self._processes[name].wait()

    def log_of(self, name: str) -> str:
        """Return the output of the first process of a pod."""
        with self._news:
            return (self.roots[name] / "log").read_text()

    def break_execs(self) -> None:
        """Break all exec connections."""
        _break(self.exec_connections)

    def hang_up(self) -> None:
        """Break all connections, also those that wait for an answer."""
        _break(self.connections)

    # Controllers

    def _control(self) -> None:
        while not self._stopped.wait(_PERIOD):
            with self._news:
                jobs = [job for (kind, _), job in self.objects.items() if kind == "jobs"]
            for job in jobs:
                self._reconcile(job)
            self._observe_pods()
            self._collect_garbage()

    def _time(self) -> float:
        return time.monotonic() + self._offset

    def _reconcile(self, job: Json) -> None:
        name, spec, status = job["metadata"]["name"], job["spec"], job["status"]
        if "finished" in status:
            if self._time() > status["finished"] + spec["ttlSecondsAfterFinished"]:
                self.objects.pop(("jobs", name), None)
            return
        limit = spec.get("activeDeadlineSeconds")
        if limit is not None and self._time() > status["started"] + limit:
            for pod in self._pods_of(name):
                self.delete_pod(pod["metadata"]["name"])
            status["finished"] = self._time()
            return
        for index in range(spec["completions"]):
            if index not in status["created"]:
                self._create_pod(job, index)
        for pod in self._pods_of(name):
            index = int(pod["metadata"]["annotations"][_INDEX])
            if index >= spec["completions"]:  # the job was reduced
                self._remove(pod["metadata"]["name"])
                status["created"].remove(index)
        if len(status["created"]) == spec["completions"] == len(status["ended"]):
            status["finished"] = self._time()

    def _pods_of(self, job: str) -> list[Json]:
        with self._news:
            pods = list(self._pods.values())
        return [pod for pod in pods if pod["metadata"].get("labels", {}).get("job-name") == job]

    def _has_capacity(self) -> bool:
        running = sum(process.poll() is None for process in self._processes.values())
        return self.capacity is None or running < self.capacity

    def _create_pod(self, job: Json, index: int) -> None:
        with self._news:
            if self.quota is not None and len(self._pods) >= self.quota:
                self._warn(
                    job["metadata"]["name"],
                    "FailedCreate",
                    "Error creating: pods is forbidden: exceeded quota: pods, limited: pods",
                )
                return
            job["status"]["created"].append(index)
            name = f"{job['metadata']['name']}-{index}-{uuid.uuid4().hex[:5]}"
            template = job["spec"]["template"]
            owner = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "name": job["metadata"]["name"],
                "uid": job["metadata"]["uid"],
            }
            pod: Json = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": "mine",
                    "uid": str(uuid.uuid4()),
                    "creationTimestamp": _now(),
                    "labels": {
                        **template["metadata"].get("labels", {}),
                        "job-name": job["metadata"]["name"],
                        _INDEX: str(index),
                    },
                    "annotations": {_INDEX: str(index)},
                    "ownerReferences": [owner],
                },
                "spec": template["spec"],
                "status": {"phase": "Pending", "conditions": []},
            }
            check_fields(pod, "V1Pod")
            self._pods[("mine", name)] = pod
            self._publish("ADDED", pod)

    def _observe_pods(self) -> None:
        """Play the scheduler and the kubelet."""
        for (_, name), pod in list(self._pods.items()):
            if not pod["metadata"].get("ownerReferences"):
                continue  # a pod of a test
            process, status = self._processes.get(name), pod["status"]
            if process is not None:
                if process.poll() is not None and "terminated" not in _state(pod):
                    self._ended(pod, process.returncode)
            elif "deletionTimestamp" in pod["metadata"]:
                self._ended(pod, None)
            elif status["phase"] == "Pending" and not self._has_capacity():
                condition = {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/3 nodes are available: 3 Insufficient cpu.",
                }
                self._update(pod, {"phase": "Pending", "conditions": [condition]})
            elif (image := pod["spec"]["containers"][0]["image"]) not in self.images:
                self._waits(pod, "ImagePullBackOff", f'Back-off pulling image "{image}": not found')
            elif status["phase"] == "Pending":
                self._start(pod)

    def _start(self, pod: Json) -> None:
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        root = Path(tempfile.mkdtemp(prefix="p", dir=self._directory))
        self.roots[name] = root
        (root / "log").touch()
        try:
            with (root / "log").open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    container["command"],
                    env=_environment(pod, root),
                    cwd=root,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            terminated = {
                "reason": "StartError",
                "message": f"exec: {container['command'][0]!r}: {error.strerror}",
                "exitCode": 128,
            }
            self._update(pod, {**_status("Failed"), **_container({"terminated": terminated})})
            return
        address = {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}], "hostIP": "127.0.0.1"}
        running = _container({"running": {"startedAt": _now()}}, ready=True)
        self._update(pod, {**_status("Running"), **address, **running})

    def _ended(self, pod: Json, code: int | None) -> None:
        """Record the end of a pod's process, and remove a deleted pod."""
        name = pod["metadata"]["name"]
        self._kill(name)
        owner = self.objects.get(("jobs", pod["metadata"]["labels"]["job-name"]))
        if (
            owner is not None
            and int(pod["metadata"]["annotations"][_INDEX]) not in owner["status"]["ended"]
        ):
            owner["status"]["ended"].append(int(pod["metadata"]["annotations"][_INDEX]))
        if "deletionTimestamp" in pod["metadata"]:
            self._remove(name)
            return
        killed = pod["status"].pop("killed", False)
        reason = "OOMKilled" if killed else "Completed" if code == 0 else "Error"
        terminated = {"reason": reason, "exitCode": 137 if killed else abs(code or 0)}
        status = _status("Succeeded" if code == 0 and not killed else "Failed")
        self._update(pod, {**pod["status"], **status, **_container({"terminated": terminated})})

    def _collect_garbage(self) -> None:
        with self._news:
            existing = [*self.objects.values(), *self._pods.values()]
        uids = {item["metadata"]["uid"] for item in existing}
        for key, item in list(self.objects.items()):
            owners = item["metadata"].get("ownerReferences", [])
            if owners and all(owner["uid"] not in uids for owner in owners):
                self.objects.pop(key, None)
        for (_, name), pod in list(self._pods.items()):
            owners = pod["metadata"].get("ownerReferences", [])
            if owners and all(owner["uid"] not in uids for owner in owners):
                self._remove(name)

    def _remove(self, name: str) -> None:
        self._kill(name)
        with self._news:
            pod = self._pods.pop(("mine", name), None)
            if pod is None:
                return
            root = self.roots.pop(name, None)
            self._publish("DELETED", pod)
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)

    def _kill(self, name: str) -> None:
        """Kill all processes of a pod, as the end of its first process does."""
        pod = self._pods.get(("mine", name))
        if pod is None:
            return
        marker = pod["metadata"]["uid"]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_POD) == marker:
                    process.kill()
        if (own := self._processes.get(name)) is not None:
            own.kill()
            own.wait()

    def _waits(self, pod: Json, reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, "message": message}}
        self._update(pod, {**_status("Pending"), **_container(state)})

    def _update(self, pod: Json, status: Json) -> None:
        with self._news:
            if pod["status"] != status and ("mine", pod["metadata"]["name"]) in self._pods:
                pod["status"] = status
                check_fields(_public(pod), "V1Pod")
                self._publish("MODIFIED", pod)

    def _warn(self, name: str, reason: str, message: str) -> None:
        if not any(item["involvedObject"]["name"] == name for item in self.warnings):
            self.warnings.append(
                {
                    "metadata": {"name": f"{name}.1", "namespace": "mine"},
                    "involvedObject": {"name": name},
                    "type": "Warning",
                    "reason": reason,
                    "message": message,
                    "lastTimestamp": _now(),
                }
            )

    # Replies

    def handle(
        self, method: str, path: str, query: dict[str, str], token: str | None, body: bytes
    ) -> Json | str:
        """Return the reply to a request for one object, or for events."""
        self.check_token(token)
        namespace, resource, name, sub = self._split(path)
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(method)
        verb = verb or ("get" if name else "list")
        self.check_role(verb, resource, sub, namespace, token)
        if method == "POST" and name is None:
            return self._create(namespace, resource, body)
        if resource == "events":
            return {"kind": "EventList", "items": self._events_of(query)}
        item = self._pods.get((namespace, name or "")) if resource == "pods" else None
        item = item or self.objects.get((resource, name or ""))
        if item is None:
            raise Refusal(404, f'{resource} "{name}" not found')
        if method == "GET" and sub == "log":
            return self._log(item["metadata"]["name"], query)
        if method == "GET" and sub is None:
            return _public(item)
        if resource == "jobs" and method == "PATCH":
            self._patch(item, json.loads(body))
            return _public(item)
        if resource == "jobs" and method == "DELETE":
            if query.get("propagationPolicy") not in ("Background", "Foreground"):
                raise Refusal(400, "the fake deletes with a propagation policy only")
            self.objects.pop((resource, name or ""), None)
            return {"kind": "Status", "status": "Success"}
        raise Refusal(404, "the server could not find the requested resource")

    def check_role(
        self, verb: str, resource: str, sub: str | None, namespace: str, token: str | None
    ) -> None:
        path = f"{resource}/{sub}" if sub else resource
        if (verb, path) in self.forbidden or self.roles[token or ""] not in ("*", namespace):
            group = "batch" if resource == "jobs" else ""
            raise Refusal(
                403,
                f'{resource} is forbidden: User "it" cannot {verb} resource "{path}" in API group '
                f'"{group}" in the namespace "{namespace}"',
            )

    def exec_target(self, path: str, query: list[tuple[str, str]], token: str | None) -> Json:
        """Return the pod of an exec request."""
        self.check_token(token)
        namespace, resource, name, sub = self._split(path)
        self.check_role("get", resource, sub, namespace, token)
        pod = self._pods.get((namespace, name or ""))
        if pod is None:
            raise Refusal(404, f'pods "{name}" not found')
        options = dict(query)
        if unknown := set(options) - {"command", "container", "stdin", "stdout", "stderr", "tty"}:
            raise Refusal(400, f"unknown query parameters: {sorted(unknown)}")
        if options.get("container") != pod["spec"]["containers"][0]["name"]:
            raise Refusal(400, f"container {options.get('container')} is not valid for pod {name}")
        process = self._processes.get(name or "")
        if "running" not in _state(pod) or (process is not None and process.poll() is not None):
            raise Refusal(500, 'container not found ("agent")')
        return pod

    def answer(self, path: str, query: dict[str, str], token: str | None) -> Json:
        if re.fullmatch(r"/api/v1/namespaces/[a-z0-9-]+/pods", path):
            self.check_token(token)
            self.check_role("list", "pods", None, path.split("/")[4], token)
            answer = super().answer(path, query, token)
            if "items" in answer:
                with self._news:
                    answer["items"] = [_public(item) for item in answer["items"]]
            return answer
        return cast(Json, self.handle("GET", path, query, token, b""))

    @staticmethod
    def _split(path: str) -> tuple[str, str, str | None, str | None]:
        match = _PATH.fullmatch(path)
        if not match or (path.startswith("/apis/")) != (match[2] == "jobs"):
            raise Refusal(404, "the server could not find the requested resource")
        return match[1], match[2], match[3], match[4]

    def _create(self, namespace: str, resource: str, body: bytes) -> Json:
        if namespace != "mine":
            raise Refusal(404, f'namespaces "{namespace}" not found')
        try:
            item = json.loads(body)
            check_fields(item, _MODELS[resource])
        except (ValueError, KeyError, AssertionError) as error:
            raise Refusal(400, f"{resource} cannot be handled: {error}") from None
        _validate(item)
        key = (resource, item["metadata"]["name"])
        with self._news:
            if key in self.objects:
                raise Refusal(409, f'{resource} "{key[1]}" already exists')
            item["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now()}
            if resource == "jobs":
                item["status"] = {"started": self._time(), "created": [], "ended": []}
            self.objects[key] = item
        return _public(item)

    @staticmethod
    def _patch(job: Json, patch: Json) -> None:
        mutable = {"activeDeadlineSeconds", "parallelism", "suspend", "ttlSecondsAfterFinished"}
        spec = {**job["spec"], **patch.get("spec", {})}
        # An Indexed job is elastic, if both numbers change together.
        if spec["completions"] == spec["parallelism"]:
            mutable.add("completions")
        if set(patch) != {"spec"} or not set(patch["spec"]) <= mutable:
            raise Refusal(422, "spec: Invalid value: field is immutable")
        for key, value in patch["spec"].items():
            if value is None:
                job["spec"].pop(key, None)
            else:
                job["spec"][key] = value

    def _events_of(self, query: dict[str, str]) -> list[Json]:
        wanted = dict(part.split("=") for part in query.get("fieldSelector", "").split(",") if part)
        if unknown := set(wanted) - {"involvedObject.name", "type"}:
            raise Refusal(400, f"field label not supported: {sorted(unknown)}")
        name = wanted.get("involvedObject.name")
        return [item for item in self.warnings if item["involvedObject"]["name"] == name]

    def _log(self, name: str, query: dict[str, str]) -> str:
        if unknown := set(query) - {"container", "tailLines", "limitBytes"}:
            raise Refusal(400, f"unknown query parameters: {sorted(unknown)}")
        if name not in self.roots:
            raise Refusal(400, 'container "agent" in pod is waiting to start')
        lines = (self.roots[name] / "log").read_text(errors="replace").splitlines(keepends=True)
        return "".join(lines[-int(query["tailLines"]) :])[: int(query["limitBytes"])]


class _JobsHandler(Handler):
    """One connection of a client."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path.endswith("/exec"):
            self._exec(parts.path, parse_qsl(parts.query))
        elif parts.path.endswith("/log"):
            self._handle("GET")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self._handle("POST")

    def do_PATCH(self) -> None:
        self._handle("PATCH")

    def do_DELETE(self) -> None:
        self._handle("DELETE")

    def _handle(self, method: str) -> None:
        kubernetes = cast(KubernetesJobs, self.server.kubernetes)
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = kubernetes.fault()
        if fault == "silence":
            self.connection.recv(1)  # until the client hangs up
            self.close_connection = True
            return
        kind = self.headers.get("Content-Type", "")
        expected = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            if isinstance(fault, int):
                raise Refusal(fault, f"injected fault {fault}")
            if body and kind != expected:
                raise Refusal(400, f"unsupported media type {kind}")
            answer = kubernetes.handle(method, parts.path, query, self.token, body)
        except Refusal as refusal:
            self.reply(refusal.code, refusal.body)
            return
        if isinstance(answer, str):
            data = answer.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        else:
            self.reply(201 if method == "POST" else 200, answer)

    def _exec(self, path: str, query: list[tuple[str, str]]) -> None:
        kubernetes = cast(KubernetesJobs, self.server.kubernetes)
        self.close_connection = True
        kubernetes.held_execs.add(self.connection)
        try:
            while kubernetes.holds_exec.is_set():
                if select.select([self.connection], [], [], 0.02)[0]:
                    return  # the client has disconnected
        finally:
            kubernetes.held_execs.discard(self.connection)
        try:
            pod = kubernetes.exec_target(path, query, self.token)
            offered = re.split(r",\s*", self.headers.get("Sec-WebSocket-Protocol", ""))
            protocol = next((known for known in _PROTOCOLS if known in offered), None)
            if self.headers.get("Upgrade", "").lower() != "websocket" or protocol is None:
                raise Refusal(400, "Upgrade request required")
        except Refusal as refusal:
            self.reply(refusal.code, refusal.body)
            return
        key = self.headers["Sec-WebSocket-Key"] + _GUID
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101)
        for name, value in (
            ("Upgrade", "websocket"),
            ("Connection", "Upgrade"),
            ("Sec-WebSocket-Accept", accept),
            ("Sec-WebSocket-Protocol", protocol),
        ):
            self.send_header(name, value)
        self.end_headers()
        kubernetes.exec_connections.add(self.connection)
        try:
            _Exec(self.connection, self.rfile).run(
                [value for name, value in query if name == "command"],
                pod,
                kubernetes.roots[pod["metadata"]["name"]],
            )
        finally:
            kubernetes.exec_connections.discard(self.connection)


KubernetesJobs.handler = _JobsHandler


class _Exec:
    """An exec connection, and its process in the pod."""

    def __init__(self, connection: socket.socket, reader: Any) -> None:
        self._connection, self._reader = connection, reader
        self._buffer = b""

    def run(self, command: list[str], pod: Json, root: Path) -> None:
        """Copy data until the connection or the process ends."""
        try:
            process = subprocess.Popen(
                command,
                env=_environment(pod, root),
                cwd=root,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._end({"status": "Failure", "message": f"exec {command[0]!r}: {error.strerror}"})
            return
        assert process.stdin
        assert process.stdout
        assert process.stderr
        with process.stdin, process.stdout, process.stderr:
            with contextlib.suppress(OSError, ValueError):  # the connection broke
                self._copy(process)
            # The runtime closes the input of a process whose connection has ended.
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait()

    def _copy(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        outputs = {process.stdout.fileno(): 1, process.stderr.fileno(): 2}
        self._connection.settimeout(60)
        while outputs:
            pending = getattr(self._connection, "pending", lambda: 0)()
            timeout = 0.0 if pending else None
            ready = select.select([self._connection, *outputs], [], [], timeout)[0]
            if pending or self._connection in ready:
                data = self._connection.recv(1 << 16)
                if not data:
                    return
                self._buffer += data
                while (frame := self._frame()) is not None:
                    opcode, payload = frame
                    if opcode == 8:
                        return
                    if opcode == 2 and payload[:1] == b"\0":
                        process.stdin.write(payload[1:])
                        process.stdin.flush()
                    elif opcode == 2 and payload[:1] != b"\xff":
                        raise ValueError("unknown channel")
            for descriptor in [fd for fd in outputs if fd in ready]:
                output = os.read(descriptor, 1 << 15)
                if output:
                    self._send(bytes([outputs[descriptor]]) + output)
                else:
                    del outputs[descriptor]
        code = process.wait()
        if code == 0:
            self._end({"status": "Success"})
        else:
            message = f"command terminated with non-zero exit code: exit code {code}"
            self._end({"status": "Failure", "message": message, "reason": "NonZeroExitCode"})

    def _frame(self) -> tuple[int, bytes] | None:
        """Return opcode and payload of the next complete frame, which must be masked."""
        if len(self._buffer) < 2:
            return None
        first, second = self._buffer[:2]
        if not second & 0x80:
            raise ValueError("the client sent a frame without a mask")
        size, start = second & 0x7F, 2
        if size >= 126:
            form = "!H" if size == 126 else "!Q"
            end = start + struct.calcsize(form)
            if len(self._buffer) < end:
                return None
            (size,), start = struct.unpack(form, self._buffer[start:end]), end
        end = start + 4 + size
        if len(self._buffer) < end:
            return None
        mask, masked = self._buffer[start : start + 4], self._buffer[start + 4 : end]
        self._buffer = self._buffer[end:]
        repeated = (mask * (size // 4 + 1))[:size]
        value = int.from_bytes(masked, "big") ^ int.from_bytes(repeated, "big")
        return first & 0x0F, value.to_bytes(size, "big")

    def _send(self, payload: bytes, opcode: int = 2) -> None:
        size = len(payload)
        head = bytes([0x80 | opcode])
        if size < 126:
            head += bytes([size])
        else:
            head += b"\x7e" + struct.pack("!H", size) if size < 1 << 16 else b""
        self._connection.sendall(head + payload)

    def _end(self, status: Json) -> None:
        with contextlib.suppress(OSError):
            self._send(b"\x03" + json.dumps({"kind": "Status", **status}).encode())
            self._send(struct.pack("!H", 1000), opcode=8)


def _break(connections: set[socket.socket]) -> None:
    for connection in list(connections):
        with contextlib.suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _environment(pod: Json, root: Path) -> dict[str, str]:
    """Return the environment of a container, which has its own temporary directory."""
    container = pod["spec"]["containers"][0]
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(root),
        "TMPDIR": str(root),
        "HOSTNAME": pod["metadata"]["name"],
        "TFD_TEST_RUN": os.environ["TFD_TEST_RUN"],
        _POD: pod["metadata"]["uid"],
        **{item["name"]: item["value"] for item in container["env"]},
    }


def _public(item: Json) -> Json:
    """Return a copy with the fields of the API only."""
    copy = json.loads(json.dumps(item))
    if copy["kind"] == "Job":
        copy["status"] = {}
    copy.get("status", {}).pop("killed", None)
    return cast(Json, copy)


def _state(pod: Json) -> Json:
    (container,) = pod["status"].get("containerStatuses") or [{"state": {}}]
    return cast(Json, container["state"])


def _status(phase: str) -> Json:
    return {"phase": phase, "conditions": [{"type": "PodScheduled", "status": "True"}]}


def _container(state: Json, ready: bool = False) -> Json:
    status = {"name": "agent", "image": "tfd:1", "imageID": "", "restartCount": 0}
    return {"containerStatuses": [{**status, "ready": ready, "state": state}]}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _validate(item: Json) -> None:
    """Refuse an object with invalid values, as the validation of the API does."""
    metadata, spec = item["metadata"], item["spec"]
    problems = []
    if not _LABEL.fullmatch(metadata.get("name", "")):
        problems.append(f"metadata.name: Invalid value: {metadata.get('name')!r}")
    for key, value in metadata.get("labels", {}).items():
        if not _LABEL_VALUE.fullmatch(value):
            problems.append(f"metadata.labels[{key}]: Invalid value: {value!r}")
    for owner in metadata.get("ownerReferences", []):
        if set(owner) < {"apiVersion", "kind", "name", "uid"} or not all(owner.values()):
            problems.append("metadata.ownerReferences: Required value")
    if item["kind"] == "Job":
        problems += _problems_of_job(spec)
    elif spec.get("clusterIP") != "None" and not spec.get("ports"):
        problems.append("spec.ports: Required value")
    if problems:
        raise Refusal(422, f'{item["kind"]} "{metadata.get("name")}" is invalid: {problems}')


def _problems_of_job(spec: Json) -> list[str]:
    pod = spec["template"]["spec"]
    problems = []
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        problems.append("spec.template.spec.restartPolicy: Unsupported value")
    if spec.get("completionMode") == "Indexed" and not spec.get("completions"):
        problems.append("spec.completions: Required value: when completion mode is Indexed")
    if "backoffLimitPerIndex" in spec and (
        spec.get("completionMode") != "Indexed" or pod.get("restartPolicy") != "Never"
    ):
        problems.append("spec.backoffLimitPerIndex: Invalid value")
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        if not container.get("name") or not container.get("image"):
            problems.append("spec.template.spec.containers: Required value: name and image")
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                problems.append(f"volumeMounts: Not found: {mount['name']!r}")
        resources = container.get("resources", {})
        for kind, amounts in resources.items():
            for name, amount in amounts.items():
                if not isinstance(amount, str) or not _QUANTITY.fullmatch(amount):
                    problems.append(f"resources.{kind}[{name}]: Invalid value: {amount!r}")
        for name, amount in resources.get("requests", {}).items():
            if "/" in name and resources.get("limits", {}).get(name) != amount:
                problems.append(f"resources.requests[{name}]: must be equal to the limit")
    return problems
