"""Resolver for pods of Kubernetes, based on the official client library."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfd_notebook.errors import (
    InvalidMessage,
    Malformed,
    NoAnswer,
    NoTasks,
    ResolveError,
    UsageError,
)
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.spec import Endpoint, check_count
from tfd_notebook.net import kubernetes_config, limited_http, optional_packages, validation
from tfd_notebook.resolvers import http_errors, kubernetes_watch
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import (
    MAX_PAGES,
    PAGE_HOSTS,
    RESOLVE_SECONDS,
    AddressesByJob,
    natural,
)

#: Timeout for one request to the API, in seconds.
_REQUEST_SECONDS = 10.0
#: Limit of one reply, which is a page of pods or the events of a watch, in bytes.
_MAX_REPLY_BYTES = 16_000_000
#: Attempts to list the pods. A list can expire between two pages (HTTP 410).
_LIST_ATTEMPTS = 3
#: Labels with the index of a pod, in the order of precedence.
_INDEX_LABELS = (
    "batch.kubernetes.io/job-completion-index",
    "apps.kubernetes.io/pod-index",
    "training.kubeflow.org/replica-index",
)
_port = validation.integer(1, 65535)
_RENEW = "renew the credentials of the kubeconfig or service account; see kubectl auth whoami"
_ALLOW = "grant this account a Role in this namespace that allows list and watch of pods"


class Client(Handle):
    """The API client of a resolver, which copies of the resolver share."""

    _instead = "create the KubernetesResolver there, with kubeconfig= and context="

    def __init__(self, api: Any) -> None:
        self.api = api


class KubernetesResolver(Resolver):
    """The ready pods of a namespace, at their pod IPs.

    In an indexed Job, a StatefulSet or a Kubeflow job, a pod has its own index. A task keeps this
    index while another pod is absent. Other pods are numbered by the order of their names,
    ``pod-2`` before ``pod-10``. Finished and terminating pods do not count.

    Parameters
    ----------
    jobs : mapping of str to str, or to sequence of str
        One or more label selectors per job: ``{"worker": "app=train,role=worker"}``.
    port : int or str
        Port of the tasks: a number, or the name of a port in the pods. Default 8470.
    namespace : str, optional
        Default: the namespace of the service account, or of the kubeconfig's context.
    field_selector : str, optional
        Additional filter for the pods, such as ``"spec.nodeName=n1"``.
    kubeconfig : str, optional
        Path of the kubeconfig. Default: in a pod its service account, otherwise ``$KUBECONFIG``
        or ``~/.kube/config``.
    context : str, optional
        A context of the kubeconfig. Default: the current context.
    client : kubernetes.client.CoreV1Api, optional
        API client. With it, the default of `namespace` is ``"default"``. Default: a new client
        that reads the credentials again, for each call.
    task_type, task_id : optional
        The task of this process.
    rpc_layer : str
        Default ``"grpc"``.

    See Also
    --------
    tf.distribute.cluster_resolver.KubernetesClusterResolver
    """

    def __init__(
        self,
        jobs: Mapping[str, str | Sequence[str]],
        port: int | str = 8470,
        namespace: str | None = None,
        field_selector: str | None = None,
        kubeconfig: str | None = None,
        context: str | None = None,
        client: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = "grpc",
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        if not isinstance(jobs, Mapping) or not jobs:
            raise UsageError(
                f"invalid jobs={jobs!r}: expected a selector for each job",
                fix='write {"worker": "app=train,role=worker"}',
            )
        self._selectors = {job: _selectors(job, value) for job, value in jobs.items()}
        self._port = port if isinstance(port, str) and port else check_count("port", port, 65535, 1)
        self._namespace = namespace
        self._fields = field_selector
        self._kubeconfig = kubeconfig
        self._context = context
        self._client = None if client is None else Client(client)

    @property
    def place(self) -> str:
        where = f"namespace {self._namespace!r}" if self._namespace else "the default namespace"
        return f"Kubernetes, {where}"

    def _find(self) -> AddressesByJob:
        with self._api(time.monotonic() + RESOLVE_SECONDS) as (api, namespace):
            pods = {
                job: [_list(api, namespace, selector, self._fields) for selector in selectors]
                for job, selectors in self._selectors.items()
            }
            return {job: self._addresses(job, groups) for job, groups in pods.items()}

    def _polls(self, end: float | None, every: float) -> Iterator[None]:
        selectors = sorted({selector for group in self._selectors.values() for selector in group})
        with self._api() as (api, namespace):
            options = {"namespace": namespace, **_options(field_selector=self._fields)}
            watched = [{"label_selector": selector, **options} for selector in selectors]
            yield from kubernetes_watch.changes(api.list_namespaced_pod, watched, end)

    def _addresses(self, job: str, groups: list[list[Any]]) -> dict[int, str]:
        usable = [[pod for pod in pods if _state(pod) == "ready"] for pods in groups]
        if not any(usable):
            raise self._no_pods(job, [pod for pods in groups for pod in pods])
        pods = [
            pod for group in usable for pod in sorted(group, key=lambda p: natural(p.metadata.name))
        ]
        pods = list({pod.metadata.uid or pod.metadata.name: pod for pod in pods}.values())
        return {index: self._address_of(pod) for index, pod in _numbered(pods).items()}

    def _no_pods(self, job: str, pods: list[Any]) -> NoTasks:
        selector = " or ".join(self._selectors[job])
        states = [f"{pod.metadata.name} is {_state(pod)}" for pod in pods]
        if states:
            more = ", ..." if len(states) > 4 else ""
            return NoTasks(
                f"{self.place}: no pod of {selector} is ready: {', '.join(states[:4])}{more}",
                fix="wait until they are ready; kubectl describe pod shows the cause",
            )
        return NoTasks(
            f"{self.place}: no pod matches {selector}",
            fix=f"see kubectl get pods --selector '{self._selectors[job][0]}'",
        )

    def _address_of(self, pod: Any) -> str:
        address = validation.ip_address(pod.status.pod_ip, "address")
        return str(Endpoint(address, self._port_of(pod)))

    def _port_of(self, pod: Any) -> int:
        if isinstance(self._port, int):
            return self._port
        for container in pod.spec.containers if pod.spec else ():
            for port in container.ports or ():
                if port.name == self._port:
                    return int(_port(port.container_port, "port"))
        raise Malformed(
            f"{self.place}: the pod {pod.metadata.name} has no port named {self._port!r}",
            fix="name the port in the pod's containers, or use its number",
        )

    @contextlib.contextmanager
    def _api(self, end: float = math.inf) -> Iterator[tuple[Any, str]]:
        """Yield the API and the namespace; convert the client's exceptions to `ResolveError`.

        Requests fail after `end`.
        """
        kubernetes = optional_packages.load("kubernetes", "KubernetesResolver", "kubernetes")
        urllib3 = optional_packages.load("urllib3", "KubernetesResolver", "kubernetes")
        with contextlib.ExitStack() as stack:
            if self._client is None:
                configuration, default_namespace = kubernetes_config.configure(
                    self._kubeconfig, self._context
                )
                api = stack.enter_context(kubernetes.client.ApiClient(configuration))
                limited_http.limit_pools(api.rest_client.pool_manager, _MAX_REPLY_BYTES, end)
                core = kubernetes.client.CoreV1Api(api)
                namespace = self._namespace or default_namespace
            else:
                core, namespace = self._client.api, self._namespace or "default"
            place = f"Kubernetes at {core.api_client.configuration.host}, namespace {namespace!r}"
            try:
                yield core, namespace
            except ResolveError:
                raise
            except kubernetes.client.ApiException as error:
                raise http_errors.of_status(
                    error.status or 0,
                    kubernetes_config.message(error.body or error.reason),
                    place,
                    _RENEW,
                    _ALLOW,
                ) from error
            except urllib3.exceptions.HTTPError as error:
                raise NoAnswer(
                    f"{place} does not answer: {error}", fix="see kubectl cluster-info"
                ) from error
            except InvalidMessage as error:
                raise Malformed(
                    f"{place} answers what the client cannot read: {error!s:.300}",
                    fix="see kubectl get pods: something between may change or cut answers",
                ) from error


def _list(api: Any, namespace: str, selector: str, fields: str | None) -> list[Any]:
    """Return all pods of a paginated list; restart the list if it expires."""
    from kubernetes.client import ApiException

    options = {
        "label_selector": selector,
        "limit": PAGE_HOSTS,
        "_request_timeout": _REQUEST_SECONDS,
    }
    options |= _options(field_selector=fields)
    for remaining in reversed(range(_LIST_ATTEMPTS)):
        pods: list[Any] = []
        token: str | None = None
        try:
            for number in itertools.count(1):
                if number > MAX_PAGES:
                    raise InvalidMessage(f"a list of more than {MAX_PAGES} pages")
                page = kubernetes_watch.read_list(
                    api.list_namespaced_pod,
                    namespace=namespace,
                    **options,
                    **_options(_continue=token),
                )
                pods += map(_checked, page.items)
                if not (token := page.metadata._continue):
                    return pods
        except ApiException as error:
            if error.status != 410 or not remaining:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def _checked(pod: Any) -> Any:
    """Return a pod that has the parts which are read. The client checks their types only."""
    if pod.metadata is None or not pod.metadata.name or pod.status is None:
        raise InvalidMessage("a pod has no name or no status")
    return pod


def _options(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value}


def _selectors(job: str, value: Any) -> tuple[str, ...]:
    selectors = (value,) if isinstance(value, str) else tuple(value or ())
    if not selectors or not all(isinstance(item, str) and item.strip() for item in selectors):
        raise UsageError(
            f"invalid jobs[{job!r}]={value!r}: expected a label selector",
            fix='write "app=train,role=worker"',
        )
    return selectors


def _state(pod: Any) -> str:
    """Return ``"ready"``, or the state because of which a pod cannot be used."""
    status = pod.status
    if pod.metadata.deletion_timestamp is not None:
        return "ending"
    if status.phase != "Running":
        return str(status.phase)
    ready = {condition.type: condition.status for condition in status.conditions or ()}
    return "ready" if ready.get("Ready") == "True" and status.pod_ip else "not ready"


def _numbered(pods: list[Any]) -> dict[int, Any]:
    """Return the pods by index: their own if all have one, otherwise their position."""
    indexes = [_index(pod) for pod in pods]
    owners = {_owner(pod) for pod in pods}
    if None in indexes or len(owners) > 1:
        return dict(enumerate(pods))
    # Of two pods with the same index, the newer one replaces the older one.
    by_age = sorted(zip(indexes, pods, strict=True), key=lambda item: _created(item[1]))
    return dict(sorted({index: pod for index, pod in by_age if index is not None}.items()))


def _index(pod: Any) -> int | None:
    labels = {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}
    for name in _INDEX_LABELS:
        if re.fullmatch(r"\d{1,9}", str(labels.get(name, ""))):
            return int(labels[name])
    if any(owner.kind == "StatefulSet" for owner in pod.metadata.owner_references or ()):
        match = re.search(r"-(\d{1,9})$", pod.metadata.name)
        return int(match[1]) if match else None
    return None


def _owner(pod: Any) -> tuple[str, ...]:
    return tuple(owner.uid for owner in pod.metadata.owner_references or ())


def _created(pod: Any) -> datetime.datetime:
    created = pod.metadata.creation_timestamp  # always in UTC
    return created.replace(tzinfo=None) if created else datetime.datetime.min
