"""``launcher="kubernetes"``: tasks in the pods of a Kubernetes job."""

from __future__ import annotations

import math
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from tfd_notebook.errors import InvalidMessage, LaunchError
from tfd_notebook.launchers.base import OnEvent
from tfd_notebook.launchers.client import kubernetes_jobs
from tfd_notebook.launchers.client import pods as job_pods
from tfd_notebook.launchers.client.kubernetes_api import KubernetesApi
from tfd_notebook.launchers.client.pods import Pod, PodHost
from tfd_notebook.launchers.engine import Engine, EngineLauncher, HostState
from tfd_notebook.model.spec import ClusterConfig
from tfd_notebook.net import kubernetes_config, optional_packages

_LOG_LINES = 20
#: Seconds after the grace time until the deadline of a job with pods that do not run yet. The
#: kernel extends it twice in this time. It ends the job of a killed kernel.
_DEADLINE_SECONDS = 60.0


class Kubernetes(EngineLauncher):
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
        Smallest number of pods. If others have no node or quota for 5 s, the cluster starts
        without them. A pod that runs later joins it, and runs its share of the data workers. With
        `secure`, a `place` of data workers, or no data workers, these pods are dropped instead.
        Default: `pods`.
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
        own = {
            "image": image,
            "pods": pods,
            "minimum": minimum,
            "namespace": namespace,
            "resources": resources,
            "node_selector": node_selector,
            "tolerations": tolerations,
            "volumes": volumes,
            "service_account": service_account,
            "environment": environment,
            "python": python,
            "labels": labels,
            "kubeconfig": kubeconfig,
            "context": context,
        }
        own = kubernetes_jobs.checked(own)
        super().__init__(own, grace=grace, place=place, secure=secure, host=host, allow=allow)

    def job_script(self, config: ClusterConfig) -> str:
        yaml = optional_packages.load("yaml", 'launcher "kubernetes"', "kubernetes")
        name = kubernetes_jobs.name_of(config.name, "000000")
        job = kubernetes_jobs.job(kubernetes_jobs.without_secrets(self._own), config, name, None)
        service = kubernetes_jobs.service(self._own, name, "(uid of the job)")
        return str(yaml.safe_dump_all([job, service]))

    def new_start(self, config: ClusterConfig, on_event: OnEvent) -> _Kubernetes:
        labels = [f"pod-{index}" for index in range(self._own["pods"])]
        place = self._placement(labels)
        # Pods in `place=` must run.
        placed = {label for chosen in self.place_on(labels).values() for label in chosen}
        needed = [labels.index(label) + 1 for label in placed]
        minimum = max(self._own["minimum"] or len(labels), *needed, 0)
        return _Kubernetes(config, on_event, minimum, self._own, labels, place, self._grace)


class _Kubernetes(Engine[PodHost]):
    """The job of one cluster, and its service."""

    kind = "pods"
    unreached_fix = "check the address in the kubeconfig, and the network: kubectl cluster-info"
    settle_seconds = 5.0

    def __init__(
        self,
        config: ClusterConfig,
        on_event: OnEvent,
        minimum: int,
        options: Mapping[str, Any],
        labels: Sequence[str],
        place: Callable[[str, int], int],
        grace: float,
    ) -> None:
        super().__init__(config, on_event, minimum)
        self._api = KubernetesApi(options["kubeconfig"], options["context"], options["namespace"])
        self._options, self._place = options, place
        self._name = kubernetes_jobs.name_of(config.name, uuid.uuid4().hex[:6])
        self._uid, self._created = "", False
        self._grace = grace
        #: The times (monotonic) of the submission, and of the next change of the deadline.
        self._submitted_at, self._renew_at = 0.0, float("inf")
        python = options["python"]
        self.groups = [[PodHost(self, self._api, python, *item) for item in enumerate(labels)]]

    def submit(self) -> None:
        job = kubernetes_jobs.job(self._options, self.config, self._name, self._owner())
        self._created, self._submitted_at = True, time.monotonic()
        self._uid = kubernetes_jobs.uid_of(self._api.request("POST", "jobs", body=job))
        service = kubernetes_jobs.service(self._options, self._name, self._uid)
        self._api.request("POST", "services", body=service)

    def state(self, host: PodHost) -> HostState:
        reply = self._api.request("GET", "pods", host.pod.name)
        pod = job_pods.parse(reply, self._uid) if reply is not None else None
        return pod or HostState("ended", f"pod {host.pod.name} was deleted", job_pods.SHOW_FIX)

    def cancel(self) -> None:
        # The owner references make Kubernetes delete the pods and the service.
        if self._created:
            query = {"propagationPolicy": "Background"}
            self._api.request("DELETE", "jobs", self._name, query=query)

    def log(self, host: PodHost) -> bytes:
        query = {
            "container": kubernetes_jobs.CONTAINER,
            "tailLines": _LOG_LINES,
            "limitBytes": 8000,
        }
        try:
            log = self._api.request("GET", "pods", host.pod.name, subresource="log", query=query)
        except (LaunchError, OSError):
            return b""
        return (log or "").encode()

    def states(self, hosts: Sequence[PodHost]) -> Mapping[PodHost, HostState]:
        try:
            if time.monotonic() > self._renew_at:
                self.complete()
            found = self._list()
        except OSError as error:
            return dict.fromkeys(hosts, HostState("starting", str(error)))
        for host in hosts:
            missing = Pod("queued", f"job {self._name} has not created pod {host.index}")
            host.use(found.get(host.index, missing))
        pods = {host: host.pod for host in hosts}
        waiting = {host: pod for host, pod in pods.items() if pod.phase != "running"}
        if waiting and not any(pod.fix for pod in waiting.values()):
            names = [pod.name for pod in waiting.values() if pod.name]
            message, fix = self._warning(names[0] if names else self._name)
            for host, pod in waiting.items() if fix else ():
                pods[host] = replace(pod, reason=f"{pod.reason}: {message}", fix=fix)
        return pods

    def runs(self, host: PodHost, role: str, index: int) -> bool:
        return host.index == self._place(role, index)

    def later(self, missing: list[PodHost]) -> list[PodHost]:
        return missing

    def has_open_request(self) -> bool:
        # Only pods with the highest indexes can be removed from the job.
        return bool(self.late or (self.joined and len(self.hosts) < self._options["pods"]))

    def complete(self) -> None:
        spec: dict[str, Any] = {"activeDeadlineSeconds": None}
        if self.has_open_request():
            # A pod that never runs has no process that would end the job of a killed kernel.
            now = time.monotonic()
            seconds = now - self._submitted_at + self._grace + _DEADLINE_SECONDS
            spec = {"activeDeadlineSeconds": math.ceil(seconds)}
            self._renew_at = now + _DEADLINE_SECONDS / 2
        elif not self.joined:
            # Kubernetes deletes the pods with other indexes.
            spec |= dict.fromkeys(("completions", "parallelism"), len(self.hosts))
        self._api.request("PATCH", "jobs", self._name, body={"spec": spec})

    def interrupt(self) -> None:
        for host in self.hosts:
            host.interrupt()

    def _owner(self) -> dict[str, Any] | None:
        """Return the reference to the pod of this process, or None."""
        name = socket.gethostname()
        if not (
            kubernetes_config.in_pod(self._options["kubeconfig"], self._options["context"])
            and kubernetes_jobs.DNS_LABEL.fullmatch(name)
        ):
            return None
        try:
            pod = self._api.request("GET", "pods", name)
            return kubernetes_jobs.reference("v1", "Pod", name, kubernetes_jobs.uid_of(pod))
        except (LaunchError, InvalidMessage, OSError):
            return None

    def _list(self) -> dict[int, Pod]:
        """Return the pods of the job by index."""
        query = {"labelSelector": f"{kubernetes_jobs.LABEL}={self._name}"}
        reply = self._api.request("GET", "pods", query=query)
        items = reply.get("items") if isinstance(reply, dict) else None
        if not isinstance(items, list):
            raise InvalidMessage("invalid list of pods: expected items")
        pods = [pod for item in items if (pod := job_pods.parse(item, self._uid)) is not None]
        # Without `backoffLimitPerIndex`, which is new, another pod may replace one that has ended.
        return {pod.index: pod for pod in sorted(pods, key=lambda pod: not pod.ends)}

    def _warning(self, name: str) -> tuple[str, str]:
        """Return the message of the last warning about a pod or the job, and the next step."""
        query = {"fieldSelector": f"involvedObject.name={name},type=Warning"}
        try:
            return job_pods.event_message(self._api.request("GET", "events", query=query))
        except (LaunchError, OSError):  # the account may have no permission for events
            return "", ""
