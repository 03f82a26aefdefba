"""Receivers of answers of Slurm, Google, Kubernetes, and other processes of this user."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httplib2
import kubernetes
import yaml
from googleapiclient.discovery import build
from hypothesis import strategies as st

from tests._fuzzing import (
    ERROR,
    RAW,
    UPGRADED,
    Receiver,
    answered,
    as_json,
    direct,
    like,
    near,
    web_server,
    websocket_frame,
)
from tfd_notebook import errors, views
from tfd_notebook.cluster import attach
from tfd_notebook.launchers.client import pods
from tfd_notebook.launchers.client.kubernetes_api import KubernetesApi
from tfd_notebook.net import control_calls, runtime_dir, slurm_queue, unix_socket
from tfd_notebook.resolvers import GCEResolver, KubernetesResolver, SlurmResolver, detection
from tfd_notebook.resolvers.sibling_process import SiblingProcessResolver

# Slurm's commands


def receive_from_slurm(output: bytes) -> None:
    """Pass the output of a command to each reader of Slurm's commands."""

    def run(command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        # The conversion of `subprocess.run`, without a process.
        file = io.TextIOWrapper(io.BytesIO(output), options.get("encoding"), options.get("errors"))
        return subprocess.CompletedProcess(command, 0, file.read(), "")

    with mock.patch("subprocess.run", run), mock.patch("shutil.which", lambda name: name):
        for partition in slurm_queue.partitions():
            assert partition.minutes is None or partition.minutes >= 0
        slurm_queue.why_pending("7")
        slurm_queue.seconds(output.decode(errors="replace"))
        with contextlib.suppress(errors.ResolveError, errors.UsageError):
            SlurmResolver(job=7).tasks()
        detection.RULES["slurm_controller"]({})


# Google


class ComputeEngine:
    """The API of Compute Engine, which answers `group`, and `instance` for each instance of it."""

    def __init__(self) -> None:
        self.group = self.instance = b""
        # Reads a description of several megabytes.
        self.service = build("compute", "v1", http=self, static_discovery=True)

    def request(self, uri: str, method: str = "GET", **options: Any) -> tuple[Any, bytes]:
        answer = self.group if "/instanceGroups/" in uri else self.instance
        return httplib2.Response({"status": "200"}), answer


compute_engine = functools.cache(ComputeEngine)


def receive_from_google(answers: tuple[bytes, bytes]) -> None:
    engine = compute_engine()
    engine.group, engine.instance = answers
    GCEResolver("p", "z", "g", service=engine.service).tasks()


GROUP = {"items": [{"instance": "https://c.example/instances/w-1"}], "nextPageToken": ""}
INSTANCE = {"networkInterfaces": [{"networkIP": "10.0.0.1", "ipv6Address": "::1"}]}

# Kubernetes

POD = {
    "metadata": {
        **{"name": "it-0-abcde", "uid": "u", "labels": {"apps.kubernetes.io/pod-index": "0"}},
        **{"creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "1"},
        "annotations": {"batch.kubernetes.io/job-completion-index": "0"},
        "ownerReferences": [{"uid": "job", "kind": "Job", "name": "it", "apiVersion": "v1"}],
    },
    "spec": {"containers": [{"name": "a", "ports": [{"name": "p", "containerPort": 80}]}]},
    "status": {
        **{"phase": "Running", "podIP": "10.0.0.1", "reason": "A", "message": "b"},
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [
            {
                **{"name": "agent", "ready": True, "restartCount": 0, "image": "i", "imageID": ""},
                "state": {"waiting": {"reason": "ImagePullBackOff"}},
            }
        ],
    },
}
PODS = {"kind": "PodList", "metadata": {"resourceVersion": "1", "continue": ""}, "items": [POD]}
WARNINGS = {"items": [{"type": "Warning", "reason": "A", "message": "b", "lastTimestamp": "c"}]}


@contextlib.contextmanager
def kubernetes_resolver(directory: Path) -> Iterator[Any]:
    with web_server(directory) as (address, answer):
        configuration = kubernetes.client.Configuration(host=f"http://{address}")
        configuration.retries = False

        def receive(data: bytes) -> None:
            answer[0] = data
            with kubernetes.client.ApiClient(configuration) as api:
                core = kubernetes.client.CoreV1Api(api)
                for port in (1, "p"):
                    with contextlib.suppress(errors.ResolveError):
                        KubernetesResolver({"worker": "a=b"}, port=port, client=core).tasks()

        yield receive


@contextlib.contextmanager
def kubernetes_api(directory: Path) -> Iterator[tuple[KubernetesApi, list[bytes]]]:
    with web_server(directory) as (address, answer):
        named = {"cluster": {"server": f"http://{address}"}, "user": {"token": "t"}}
        config = {
            "current-context": "it",
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            **{f"{kind}s": [{"name": "it", kind: value}] for kind, value in named.items()},
        }
        path = directory / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        yield KubernetesApi(str(path), None, "n"), answer


@contextlib.contextmanager
def kubernetes_requests(directory: Path) -> Iterator[Any]:
    with kubernetes_api(directory) as (api, answer):

        def receive(data: bytes) -> None:
            answer[0] = data
            reply = api.request("GET", "pods", "it-0-abcde")
            pods.parse(reply, "job")
            pods.event_message(reply)

        yield receive


@contextlib.contextmanager
def kubernetes_exec(directory: Path) -> Iterator[Any]:
    with kubernetes_api(directory) as (api, answer):

        def receive(data: bytes) -> None:
            answer[0] = data
            connection = api.open_exec("it-0-abcde", "agent", ["a"])
            connection.has_ended = lambda: True
            connection.open()
            try:
                for _ in connection.lines():
                    pass
            finally:
                connection.close()

        yield receive


#: The subprotocol is a header that follows the last one of `UPGRADED`.
EXEC = UPGRADED[:-2] + b"Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n\r\n"
STATUS = b'\x03{"status": "Failure", "message": "a"}'

# Other processes of this user


@contextlib.contextmanager
def sibling_process(directory: Path) -> Iterator[Any]:
    """Answer each request to a process of this user with the same bytes."""
    answer = [b""]
    path = runtime_dir.control_socket(os.getppid())
    listener = unix_socket.listen(path, 8)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with contextlib.suppress(OSError), peer:
                    peer.settimeout(60)
                    if peer.recv(1):  # the first byte of a request
                        peer.sendall(answer[0])

    thread = threading.Thread(target=serve)
    thread.start()

    def receive(data: bytes) -> None:
        answer[0] = data
        unanswered: list[errors.TfdError] = []
        records = attach.all_clusters(unanswered)
        table = views.clusters_table(records)
        for show in (table.text, table.html, lambda: json.dumps(records)):
            assert show()
        detection.sibling_process_clusters()
        with contextlib.suppress(errors.TfdError):
            SiblingProcessResolver("c", os.getppid()).tasks()
        control_calls.call(os.getppid(), {"command": "list"})

    try:
        yield receive
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
        path.unlink(missing_ok=True)


BRIEF = {
    **{"name": "c", "state": "ready", "launcher": "local", "planned": 3, "observed": 2},
    **{"reading": 1, "lease": 1e9},
}
ROW = {"role": "worker", "index": 0, "address": "127.0.0.1:4000", "state": "ready"}
ANSWERS = (
    {"value": [BRIEF, {**BRIEF, "lease": None}]},
    {"value": {"snapshot": {"tasks": [ROW]}}},
    {"error": ERROR},
)

SYSTEMS = {
    "Slurm's commands": Receiver(
        near(
            b"debug|debug*|up|1:00:00|2|0/8/0/8\nlong|long|up|infinite|9|1/2/3/6\n",
            b"Resources|debug\n",
            b"RUNNING 4 0 n[1-2]\n",
            b"RUNNING|None|N/A|1-02:03:04|2\n",
        ),
        direct(receive_from_slurm),
        found=(
            b"a|a*|up|" + b"9" * 400 + b":00|2|0/8/0/8\n",
            b"a|a*|up|1:00|" + b"9" * 5000 + b"|0/8/0/8\n",
            b"RUNNING " + b"9" * 5000 + b" N/A n1\n",
            b"9" * 5000 + b":00",
            b"\xff\xfe",
        ),
    ),
    "Compute Engine": Receiver(
        st.tuples(
            as_json(like(GROUP)) | near(json.dumps(GROUP).encode()),
            as_json(like(INSTANCE)) | near(json.dumps(INSTANCE).encode()),
        ),
        direct(receive_from_google),
        (errors.ResolveError, errors.UsageError),
        found=(
            (b"[" * 100_000, b""),
            (json.dumps({**GROUP, "nextPageToken": "a"}).encode(), b"{}"),
            (json.dumps({"items": [{"instance": "w" + "9" * 5000}] * 2}).encode(), b"{}"),
            (json.dumps({"items": [{"instance": "W-1"}]}).encode(), b"{}"),
        ),
        gate=10,
    ),
    "Kubernetes' list of pods": Receiver(
        as_json(like(PODS)).map(answered)
        | near(answered(json.dumps(PODS).encode()))
        | RAW.map(answered),
        kubernetes_resolver,
        found=(
            answered(b"[" * 100_000),
            *(
                answered(json.dumps(change).encode())
                for change in (
                    {**PODS, "items": [{"metadata": None, "status": None}]},
                    {**PODS, "metadata": {"continue": "a"}},
                    {**PODS, "items": [{**POD, "metadata": {"name": "w" + "9" * 5000}}]},
                )
            ),
        ),
        gate=10,
    ),
    "Kubernetes' objects": Receiver(
        as_json(like(POD, PODS, WARNINGS)).map(answered)
        | near(answered(json.dumps(PODS).encode())),
        kubernetes_requests,
        (errors.LaunchError, errors.InvalidMessage, OSError),
    ),
    "Kubernetes' exec": Receiver(
        near(
            *(EXEC + websocket_frame(data, 2) for data in (b"\x01TFD1 1 2 {}\n", STATUS, b"\x02a"))
        ),
        kubernetes_exec,
        (errors.LaunchError, errors.InvalidMessage, OSError),
        gate=10,
    ),
    "process of this user": Receiver(
        (as_json(like(*ANSWERS)) | near(*(json.dumps(answer).encode() for answer in ANSWERS))).map(
            lambda line: line + b"\n"
        ),
        sibling_process,
        (errors.TfdError,),
        found=(
            *(b"[" * 100_000, b"7\n", b'{"value": [7]}\n', b'{"error": 7}\n', b"{}\n"),
            b'{"value": [{"name": "c", "state": "", "launcher": "", "planned": 0, "observed": 0, '
            b'"reading": 0}]}\n',
        ),
    ),
}
