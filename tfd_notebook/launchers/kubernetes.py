"""``launcher="kubernetes"``: tasks in the pods of a Kubernetes job."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import (
    AgentLost,
    InvalidMessage,
    LaunchError,
    StartTimeout,
    TfdError,
    Unsupported,
    UsageError,
)
from tfd_notebook.launchers.base import OnEvent, TaskHost
from tfd_notebook.launchers.client import kubernetes_options
from tfd_notebook.launchers.client import pods as job_pods
from tfd_notebook.launchers.client.handshake import read_handshake
from tfd_notebook.launchers.client.kubernetes_api import (
    ExecConnection,
    KubernetesApi,
)
from tfd_notebook.launchers.client.pods import Pod
from tfd_notebook.launchers.client.session import Channel
from tfd_notebook.launchers.remote import RemoteHost, RemoteLauncher, join_agent
from tfd_notebook.model.events import Notice, TaskChanged
from tfd_notebook.model.spec import ClusterConfig, TaskState, check_count
from tfd_notebook.net import kubernetes_config, optional_packages
from tfd_notebook.net.host import address_towards

T = TypeVar("T")

_POLL_SECONDS = 1.0
#: Seconds without a node for the other pods before the minimum of pods is enough.
_SETTLE_SECONDS = 5.0
_HANDSHAKE_SECONDS = 60.0
#: Seconds to wait for the final state of a pod whose process has ended.
_END_SECONDS = 8.0
#: Seconds added to the start timeout, after which a job without a kernel ends.
_START_MARGIN = 60
#: Seconds before Kubernetes removes a job that has ended.
_TTL_SECONDS = 300
#: Seconds to wait for the deletion of a job, which then continues in its thread.
_CLOSE_SECONDS = 5.0
_LOG_LINES = 20
_LABEL = "tfd-notebook/job"
_SECRET = re.compile(r".*(TOKEN|SECRET|PASSWORD|KEY)", re.IGNORECASE)


class Kubernetes(RemoteLauncher):
    """Pods of a Kubernetes job, each with an agent that this process reaches through the API.

    The job ends with its agents: with the cluster, or after the grace time without a connection to
    this process. Kubernetes then removes it. If this process runs in a pod of the same namespace,
    that pod owns the job. Needs the extra ``kubernetes``.

    Parameters
    ----------
    image : str
        Container image with Python, tfd-notebook and TensorFlow.
    pods : int
        Number of pods. Default 1.
    minimum : int, optional
        Smallest number of pods. If the last pods have no node or quota for 5 s, the others run
        all tasks. Default: `pods`.
    namespace : str, optional
        Default: that of the service account, or of the kubeconfig's context.
    resources : mapping, optional
        Resources of each pod: ``cpus``, ``memory`` and ``gpus``, such as
        ``{"cpus": 4, "memory": "16Gi", "gpus": 1}``. They are requests and limits. Two mappings
        ``requests`` and ``limits`` set different values.
    node_selector : mapping of str to str, optional
        Labels of the nodes.
    tolerations : sequence of mapping, optional
        Tolerations as in a pod, such as ``{"key": "gpu", "operator": "Exists"}``.
    volumes : mapping of str to str or mapping, optional
        Volumes by their path in the pods. A string is the name of a PersistentVolumeClaim. A
        mapping is a volume source, such as ``{"secret": {"secretName": "key"}}``.
    service_account : str, optional
        Default: that of the namespace, without a token in the pods.
    environment : mapping of str to str, optional
        Variables of the containers. They appear in the job. Do not put secrets there.
    python : str
        Python in the image. Default ``"python3"``.
    labels : mapping of str to str, optional
        Further labels of the job, the service and the pods.
    kubeconfig : str, optional
        Path of the kubeconfig. Default: in a pod its service account, otherwise ``$KUBECONFIG``
        or ``~/.kube/config``.
    context : str, optional
        A context of the kubeconfig. Default: the current context.
    grace, place, secure, host, allow
        See `RemoteLauncher` and `Launcher`. The labels of the hosts are ``"pod-0"``, ``"pod-1"``.
    """

    name: ClassVar[str] = "kubernetes"
    summary: ClassVar[str] = "in pods of a Kubernetes job (extra: kubernetes)"
    ends_with: ClassVar[str] = "its kernel"

    def __init__(
        self,
        image: str = "",
        pods: int = 1,
        *,
        minimum: int | None = None,
        namespace: str = "",
        resources: Mapping[str, Any] | None = None,
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, Any]] = (),
        volumes: Mapping[str, str | Mapping[str, Any]] | None = None,
        service_account: str = "",
        environment: Mapping[str, str] | None = None,
        python: str = "python3",
        labels: Mapping[str, str] | None = None,
        kubeconfig: str | None = None,
        context: str | None = None,
        grace: float = 600.0,
        place: Mapping[str, str | Sequence[str]] | None = None,
        secure: bool = False,
        host: str | Mapping[str, str] = "",
        allow: Iterable[str] = (),
    ) -> None:
        super().__init__(grace=grace, place=place, secure=secure, host=host, allow=allow)
        if not image:
            raise UsageError(
                'launcher "kubernetes" needs an image',
                fix='tfd.launchers.Kubernetes("registry.example/with-tfd-notebook:1")',
            )
        for option, text in (("image", image), ("python", python)):
            if not isinstance(text, str) or not re.fullmatch(r"[\w./:@+-]+", text, re.ASCII):
                raise UsageError(f"invalid {option} {text!r}: expected a name without spaces")
        check_count("pods", pods, minimum=1)
        if minimum is not None:
            check_count("minimum", minimum, minimum=1, maximum=pods)
        kubernetes_options.check_name(
            "namespace", namespace or "default", kubernetes_options.DNS_LABEL
        )
        kubernetes_options.check_name(
            "service_account", service_account or "default", kubernetes_options.DNS_SUBDOMAIN
        )
        for option, selected in (("node_selector", node_selector), ("labels", labels)):
            for key, value in kubernetes_options.mapping(option, selected).items():
                kubernetes_options.check_name(option, key, kubernetes_options.LABEL_KEY)
                kubernetes_options.check_name(option, value, kubernetes_options.LABEL_VALUE)
        for key, value in kubernetes_options.mapping("environment", environment).items():
            kubernetes_options.check_name("environment", key, kubernetes_options.VARIABLE)
            if not isinstance(value, str) or "\0" in value:
                raise UsageError(f"invalid environment[{key!r}]: expected a string")
        self._resources = kubernetes_options.checked_resources(
            kubernetes_options.mapping("resources", resources)
        )
        self._tolerations = [
            kubernetes_options.mapping("tolerations", item) for item in tolerations
        ]
        for item in self._tolerations:
            if unknown := sorted(set(item) - set(kubernetes_options.TOLERATION)):
                raise UsageError(
                    f"invalid tolerations: unknown key {unknown[0]!r}",
                    fix=f"use {', '.join(kubernetes_options.TOLERATION)}",
                )
        self._volumes = kubernetes_options.checked_volumes(
            kubernetes_options.mapping("volumes", volumes)
        )
        self._image, self._pods, self._namespace, self._python = image, pods, namespace, python
        self._minimum = minimum
        self._node_selector, self._labels = dict(node_selector or {}), dict(labels or {})
        self._environment, self._service_account = dict(environment or {}), service_account
        self._kubeconfig, self._context = kubeconfig, context
        #: The jobs of clusters that are starting, by the name of the cluster.
        self._starting: dict[str, _Job] = {}

    @property
    def options(self) -> dict[str, Any]:
        return {
            **super().options,
            "image": self._image,
            "pods": self._pods,
            "minimum": self._minimum,
            "namespace": self._namespace,
            "resources": self._resources,
            "node_selector": self._node_selector,
            "tolerations": self._tolerations,
            "volumes": self._volumes,
            "service_account": self._service_account,
            "environment": self._environment,
            "python": self._python,
            "labels": self._labels,
            "kubeconfig": self._kubeconfig,
            "context": self._context,
        }

    def hosts(self) -> list[RemoteHost]:
        raise Unsupported("the pods of a Kubernetes job are known when it runs")

    def job_script(self, config: ClusterConfig) -> str:
        yaml = optional_packages.load("yaml", 'launcher "kubernetes"', "kubernetes")
        name = f"{_job_prefix(config.name)}-000000"
        job = self._job(config, name, None)
        for variable in job["spec"]["template"]["spec"]["containers"][0]["env"]:
            if _SECRET.match(variable["name"]):
                variable["value"] = "(hidden)"
        return str(yaml.safe_dump_all([job, self._service(name, "(uid of the job)")]))

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[TaskHost, ...]:
        try:
            return super().connect(config, on_event)
        except BaseException:
            # Ctrl-C does not wait for connections that are opening.
            self.abort(config.name)
            raise
        finally:
            self._starting.pop(config.name, None)

    def abort(self, cluster: str) -> None:
        if (job := self._starting.get(cluster)) is not None:
            job.close()

    def hosts_for(self, config: ClusterConfig, on_event: OnEvent) -> list[RemoteHost]:
        labels = [f"pod-{index}" for index in range(self._pods)]
        place = self._placement(labels)
        api = KubernetesApi(self._kubeconfig, self._context, self._namespace)
        job = _Job(api, f"{_job_prefix(config.name)}-{uuid.uuid4().hex[:6]}", self._python)
        job.hosts = [_PodHost(job, label, index) for index, label in enumerate(labels)]
        self._starting[config.name] = job
        owner = job.run_interruptible(lambda: self._owner(api))
        job.create(self._job(config, job.name, owner), self._service)

        def show(reasons: Mapping[int, str]) -> None:
            for role, index in config.tasks():
                if reason := reasons.get(place(role, index)):
                    on_event(TaskChanged(f"{role}:{index}", TaskState.PLANNED, reason))

        minimum = self._pods if self._minimum is None else self._minimum
        placed = {label for chosen in self.place_on(labels).values() for label in chosen}
        needed = {labels.index(label) + 1 for label in placed}
        if reason := job.await_pods(config, max(minimum, *needed, 0), show):
            what = f"job {job.name} has {len(job.hosts)} of {self._pods} pods: {reason}"
            on_event(Notice("warning", what))
        return list(job.hosts)

    def _owner(self, api: KubernetesApi) -> dict[str, Any] | None:
        """Return the reference to the pod of this process, or None."""
        if not kubernetes_config.in_pod(self._kubeconfig, self._context):
            return None
        name = socket.gethostname()
        if not kubernetes_options.DNS_LABEL.fullmatch(name):
            return None
        try:
            pod = api.request("GET", "pods", name)
        except (LaunchError, OSError):
            return None
        uid = pod.get("metadata", {}).get("uid") if isinstance(pod, dict) else None
        return _reference("v1", "Pod", name, uid) if isinstance(uid, str) else None

    def _job(
        self, config: ClusterConfig, name: str, owner: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the manifest of the job."""
        first_seconds = int(config.policy.start_timeout) + _START_MARGIN
        labels = self._all_labels(name)
        volumes = list(self._volumes.items())
        container = {
            "name": job_pods.CONTAINER,
            "image": self._image,
            "command": [self._python, "-u", "-c", stdio.bootstrap("pod", str(first_seconds))],
            "env": [{"name": key, "value": value} for key, value in self._environment.items()],
            "resources": {
                kind: {
                    kubernetes_options.RESOURCES[key]: str(value) for key, value in amounts.items()
                }
                for kind, amounts in self._resources.items()
            },
            "volumeMounts": [
                {"name": f"volume-{number}", "mountPath": path}
                for number, (path, _) in enumerate(volumes)
            ],
            "securityContext": {"allowPrivilegeEscalation": False},
        }
        pod = {
            "restartPolicy": "Never",
            "subdomain": name,
            "enableServiceLinks": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [
                {"name": f"volume-{number}", **source} for number, (_, source) in enumerate(volumes)
            ],
            "nodeSelector": self._node_selector,
            "tolerations": self._tolerations,
            **(
                {"serviceAccountName": self._service_account}
                if self._service_account
                else {"automountServiceAccountToken": False}
            ),
        }
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": name,
                "labels": labels,
                "ownerReferences": [dict(owner)] if owner else [],
            },
            "spec": {
                "completions": self._pods,
                "parallelism": self._pods,
                "completionMode": "Indexed",
                # A pod that fails neither ends the others nor starts again.
                "backoffLimitPerIndex": 0,
                # Removed when all pods run.
                "activeDeadlineSeconds": first_seconds,
                "ttlSecondsAfterFinished": _TTL_SECONDS,
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        }

    def _service(self, name: str, job_uid: str) -> dict[str, Any]:
        """Return the manifest of the service, which gives each pod a host name."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": name,
                "labels": self._all_labels(name),
                "ownerReferences": [_reference("batch/v1", "Job", name, job_uid)],
            },
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {_LABEL: name},
            },
        }

    def _all_labels(self, name: str) -> dict[str, str]:
        own = {"app.kubernetes.io/managed-by": "tfd-notebook", _LABEL: name}
        return {**self._labels, **own}


class _Job:
    """The job of one cluster.

    Parameters
    ----------
    api : KubernetesApi
    name : str
    python : str
    """

    def __init__(self, api: KubernetesApi, name: str, python: str) -> None:
        self.api, self.name, self.python = api, name, python
        self.hosts: list[_PodHost] = []
        self._uid = ""
        self._created = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # One thread, so that the job is deleted after a request that creates it.
        self._requests = concurrent.futures.ThreadPoolExecutor(1, "tfd-kubernetes")

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def run_interruptible(self, request: Callable[[], T]) -> T:
        """Return the result of a request, which Ctrl-C does not interrupt in the library.

        Raises
        ------
        LaunchError
            The API cannot be reached, it refuses the request, or the job is closed.
        """
        try:
            return self._run(request)
        except OSError as error:
            raise LaunchError(
                str(error),
                fix="check the address in the kubeconfig, and the network: kubectl cluster-info",
            ) from None

    def _run(self, request: Callable[[], T]) -> T:
        """Return the result of a request in the thread, or raise its error."""
        with self._lock:
            self.check_open()
            result = self._requests.submit(request)
        return result.result()

    def check_open(self) -> None:
        """Raise LaunchError if the cluster was stopped."""
        if self.closed:
            raise LaunchError(f"the job {self.name} was stopped while it started")

    def create(
        self, job: Mapping[str, Any], service: Callable[[str, str], Mapping[str, Any]]
    ) -> None:
        """Create the job and its service."""

        def create() -> None:
            self._created = True
            created = self.api.request("POST", "jobs", body=job)
            metadata = created.get("metadata") if isinstance(created, dict) else None
            uid = metadata.get("uid") if isinstance(metadata, dict) else None
            if not isinstance(uid, str) or not re.fullmatch(r"[\w.-]{1,128}", uid, re.ASCII):
                raise InvalidMessage("invalid uid of a job: expected a name")
            self._uid = uid
            self.api.request("POST", "services", body=service(self.name, uid))

        self.run_interruptible(create)

    def await_pods(
        self,
        config: ClusterConfig,
        minimum: int,
        show: Callable[[Mapping[int, str]], None],
    ) -> str:
        """Wait until all pods run; call `show` with the reasons, by the index of the pod.

        If the last pods have no node or quota, and at least `minimum` others run, reduce the job to
        these.

        Returns
        -------
        str
            Why the job was reduced. Empty if all pods run.

        Raises
        ------
        LaunchError
            A pod has ended or cannot start.
        StartTimeout
        """
        deadline = time.monotonic() + config.policy.start_timeout
        shown: dict[int, str] = {}
        indexes = {host.index for host in self.hosts}
        settled: float | None = None
        why_reduced = ""
        while True:
            problem = ""
            pods: dict[int, Pod] = {}
            try:
                pods = self._run(self._list)
            except OSError as error:
                problem = str(error)
            for pod in pods.values():
                if pod.ended or pod.needs_user:
                    show({pod.index: pod.ended or pod.pending})
                    raise self.run_interruptible(functools.partial(self.start_error, pod))
            running = {index for index, pod in pods.items() if pod.running}
            if indexes <= running:
                break
            reasons = {index: pod.pending for index, pod in pods.items() if pod.pending}
            fix = next((pod.fix for pod in pods.values() if pod.reason), "")
            for index in indexes - pods.keys():
                reasons[index] = problem or f"job {self.name} has not created pod {index}"
            if not fix and not problem:
                waiting = next((pod for pod in pods.values() if pod.pending), None)
                reason, message = self.run_interruptible(functools.partial(self._event, waiting))
                if reason:
                    fix = Pod("", 0, reason=reason).fix
                    reasons = {i: f"{text}: {message}" for i, text in reasons.items()}
            starting = {index for index, pod in pods.items() if not pod.lacks_node} - running
            if starting or not set(range(minimum)) <= running:
                settled = None
            elif settled is None:
                settled = time.monotonic() + _SETTLE_SECONDS
            elif time.monotonic() > min(settled, deadline):
                why_reduced = next(iter(reasons.values()))
                break
            if time.monotonic() > deadline:
                raise StartTimeout(
                    f"not all pods started within {config.policy.start_timeout:g} s: "
                    + next(iter(reasons.values())),
                    fix=fix or "allow more time with tfd.Policy(start_timeout=...)",
                )
            show({i: text for i, text in reasons.items() if shown.get(i) != text})
            shown = reasons
            self._closed.wait(_POLL_SECONDS)
        count = next((i for i in range(len(self.hosts)) if i not in running), len(self.hosts))
        del self.hosts[count:]
        for host in self.hosts:
            host.use(pods[host.index])
        changes: dict[str, int | None] = {"activeDeadlineSeconds": None}
        if why_reduced:  # Kubernetes deletes the pods with other indexes
            changes.update(completions=count, parallelism=count)
        self.run_interruptible(
            lambda: self.api.request("PATCH", "jobs", self.name, body={"spec": changes})
        )
        return why_reduced

    def _list(self) -> dict[int, Pod]:
        """Return the pods of the job by index."""
        reply = self.api.request("GET", "pods", query={"labelSelector": f"{_LABEL}={self.name}"})
        items = reply.get("items") if isinstance(reply, dict) else None
        if not isinstance(items, list):
            raise InvalidMessage("invalid list of pods: expected items")
        pods = [pod for item in items if (pod := job_pods.parse(item, self._uid)) is not None]
        # Without `backoffLimitPerIndex`, which is new, another pod may replace one that has ended.
        return {pod.index: pod for pod in sorted(pods, key=lambda pod: not pod.ended)}

    def _event(self, pod: Pod | None) -> tuple[str, str]:
        """Return reason and message of the last warning about a pod, or about the job."""
        selector = f"involvedObject.name={pod.name if pod else self.name},type=Warning"
        try:
            return job_pods.event_message(
                self.api.request("GET", "events", query={"fieldSelector": selector})
            )
        except (LaunchError, OSError):  # the account may have no permission for events
            return "", ""

    def pod(self, name: str, index: int) -> Pod:
        """Return the state of a pod."""
        reply = self.api.request("GET", "pods", name)
        pod = job_pods.parse(reply, self._uid) if reply is not None else None
        return pod or job_pods.missing(name, index)

    def await_end(self, pod: Pod, seconds: float = _END_SECONDS) -> Pod:
        """Return the state of a pod; wait for its end, `seconds` at most."""
        deadline = time.monotonic() + seconds
        while not (pod := self.pod(pod.name, pod.index)).ended and not self.closed:
            if time.monotonic() > deadline:
                break
            self._closed.wait(_POLL_SECONDS)
        return pod

    def start_error(self, pod: Pod) -> LaunchError:
        """Return the error for a pod that has ended, or that cannot start, with its log."""
        lines: list[bytes] = []
        if pod.ended:
            query = {"container": job_pods.CONTAINER, "tailLines": _LOG_LINES, "limitBytes": 8000}
            with contextlib.suppress(LaunchError, OSError):
                log = self.api.request("GET", "pods", pod.name, subresource="log", query=query)
                lines = (log or "").encode().splitlines()
        try:
            read_handshake(f"pod-{pod.index}", iter(lines))
        except (LaunchError, InvalidMessage) as error:
            if any(line.startswith(stdio.HANDSHAKE.encode()) for line in lines):
                return LaunchError(f"{pod.ended}: {error.what}", fix=error.fix)
        shown = "; ".join(line.decode(errors="replace") for line in lines[-3:] if line.strip())
        return LaunchError(
            (pod.ended or pod.pending) + (f"; its log ends with {shown!r}" if shown else ""),
            fix=pod.fix,
        )

    def release(self) -> None:
        """Close the job if none of its hosts needs it."""
        if all(host.closed for host in self.hosts):
            self.close()

    def close(self) -> None:
        """Close all connections that are opening, and delete the job; never raises."""
        with self._lock:
            if self.closed:
                return
            self._closed.set()
            # At the exit of Python, executors start nothing.
            is_running = threading.main_thread().is_alive()
            deleted = self._requests.submit(self._delete) if is_running else None
            self._requests.shutdown(wait=False)
        for host in self.hosts:
            host.interrupt()
        with contextlib.suppress(Exception):
            if deleted is None:
                self._delete()
            else:
                deleted.result(_CLOSE_SECONDS)

    def _delete(self) -> None:
        # The owner references make Kubernetes delete the pods and the service.
        if self._created:
            query = {"propagationPolicy": "Background"}
            self.api.request("DELETE", "jobs", self.name, query=query)


class _PodHost(RemoteHost):
    """A pod of the job."""

    def __init__(self, job: _Job, label: str, index: int) -> None:
        super().__init__(label)
        self._job, self.index = job, index
        self._pod: Pod
        self._opening: ExecConnection | None = None
        self.closed = False

    def use(self, pod: Pod) -> None:
        """Connect to this pod."""
        self._pod, self.peer_address = pod, pod.address

    def connect(self, agent: str, start: bool) -> Channel:
        pod = self._job.pod(self._pod.name, self.index)
        if pod.ended:
            raise self._lost(pod, start)
        try:
            return self._connect(agent, start)
        except AgentLost as error:
            pod = self._job.await_end(pod)
            raise (self._lost(pod, start) if pod.ended else error) from None
        except (LaunchError, OSError) as error:
            # A pod that has just ended refuses the connection, or the process ends with it.
            seconds = _END_SECONDS if isinstance(error, OSError) else _POLL_SECONDS
            if start and (pod := self._job.await_end(pod, seconds)).ended:
                raise self._lost(pod, start) from None
            raise

    def _connect(self, agent: str, start: bool) -> Channel:
        command = [self._job.python, *join_agent(agent, start)]
        channel = self._job.api.open_exec(self._pod.name, job_pods.CONTAINER, command)
        channel.has_ended = self._has_ended
        self._opening = channel
        # Close the channel of a pod that sends no handshake.
        watch = threading.Timer(_HANDSHAKE_SECONDS, channel.close)
        watch.start()
        try:
            self._check_open()
            channel.open()
            self.read_handshake(channel, reconnect=not start)
            self._check_open()
        except BaseException:
            channel.close()
            raise
        finally:
            watch.cancel()
            self._opening = None
        with contextlib.suppress(OSError):  # no route: the allow list has no address of this host
            self.own_address = address_towards(self.peer_address)
        return channel

    def _check_open(self) -> None:
        if self._job.closed:
            raise OSError("the cluster was stopped")

    def _has_ended(self) -> bool:
        try:
            return bool(self._job.pod(self._pod.name, self.index).ended)
        except (TfdError, OSError):
            return False

    def _lost(self, pod: Pod, start: bool) -> LaunchError:
        if start:
            return self._job.start_error(pod)
        # The session keeps the text of the error only.
        return AgentLost(f"{self.label}: {pod.ended}; {pod.fix}")

    def interrupt(self) -> None:
        """Close a connection that is opening."""
        if (opening := self._opening) is not None:
            opening.close()

    def close(self) -> None:
        self.closed = True
        self._job.release()


def _job_prefix(cluster: str) -> str:
    """Return the start of the names of a cluster's jobs: at most 40 characters of a DNS label."""
    return f"tfd-{re.sub('[^a-z0-9]+', '-', cluster.lower())[:36].strip('-')}".strip("-")


def _reference(version: str, kind: str, name: str, uid: str) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "name": name, "uid": uid}
