"""Resolver for Cloud TPUs: TensorFlow's resolver with validated addresses."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfd_notebook.errors import InvalidMessage, Malformed, NoTasks, NotThere, UsageError
from tfd_notebook.model.spec import Endpoint
from tfd_notebook.net import limited_http, validation
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.gce import google_api, request_of
from tfd_notebook.resolvers.validation import AddressesByJob, checked, parsed

_TensorFlowResolver = tf.distribute.cluster_resolver.TPUClusterResolver
#: Port of a TPU worker if its address has none.
_PORT = 8470
#: Timeout for the metadata server, in seconds. It runs on the same host.
_METADATA_SECONDS = 3.0
#: Limit of its reply, in bytes, with its headers: the name of a project or zone.
_MAX_METADATA_BYTES = 10_000
#: The port is a number, or its digits.
_PORT_FIELD = validation.either(
    validation.integer(1, 65535), validation.matching(re.compile(r"[1-9]\d{0,4}"), "a port")
)
_ENDPOINTS = validation.listing(
    validation.record_with({"ipAddress": validation.ip_address, "port": _PORT_FIELD})
)
_FORM = 'write {"tpu_node_name": "name", ...}'


class TPUResolver(Resolver, _TensorFlowResolver):  # type: ignore[misc,valid-type]
    """A Cloud TPU, for ``tf.distribute.TPUStrategy``: TensorFlow's TPUClusterResolver.

    The addresses are validated before any connection. The number of cores comes from each worker.
    Every request has a timeout.

    Parameters
    ----------
    tpu : str, optional
        A name, a comma-separated list of ``"grpc://host:port"`` of the workers, or ``"local"``.
        Default: ``KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS``, ``TPU_NAME`` or ``TPU_CONFIG``.
    zone, project : str, optional
        Zone and project of a TPU with a name. Default: those of ``TPU_CONFIG``, or of this host,
        from Google's metadata server (``GCE_METADATA_HOST``).
    job_name : str
        Default ``"worker"``.
    coordinator_name, coordinator_address : str, optional
        An additional coordinator in the cluster. Pass both, or neither of them.
    credentials, service : optional
        See `GCEResolver`.

    See Also
    --------
    tf.distribute.cluster_resolver.TPUClusterResolver
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = None,
        service: Any = None,
    ) -> None:
        Resolver.__init__(self)
        if bool(coordinator_name) != bool(coordinator_address):
            raise UsageError(
                "invalid coordinator: expected both coordinator_name and coordinator_address, "
                "or neither"
            )
        config = _config()
        tpu = tpu or _tpu_from_environment() or config.get("tpu_node_name")
        if not isinstance(tpu, str):
            raise NotThere(
                "no TPU: tpu=, TPU_NAME, TPU_CONFIG and KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS are not "
                "set",
                fix='use TPUResolver("name") or TPUResolver("grpc://host:8470")',
            )
        named = tpu != "local" and not tpu.startswith("grpc://")
        if named:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", tpu):
                raise UsageError(
                    f"invalid tpu={tpu!r}: expected a name or an address",
                    fix='use "name", "grpc://host:port" or "local"',
                )
            project = project or config.get("project") or _metadata("project/project-id")
            zone = zone or config.get("zone") or _metadata("instance/zone").rpartition("/")[2]
        self._node = f"projects/{project}/locations/{zone}/nodes/{tpu}" if named else ""
        self._addresses = [] if named or tpu == "local" else _addresses(tpu)
        self._client_options = (credentials, service)
        _TensorFlowResolver.__init__(
            self,
            tpu,
            zone,
            project,
            job_name,
            coordinator_name,
            coordinator_address,
            service=service,
        )
        checked(self._and_coordinator(self._addresses), self.place)

    @property
    def place(self) -> str:
        return f"the TPU {self._node or self._tpu}"

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the cores of each worker; raises like `Resolver.num_accelerators`."""
        return super().num_accelerators(task_type or self.task_type, task_id, config_proto)

    def _declared_accelerators(self, *task: Any) -> Mapping[str, int] | None:
        is_local = self._tpu == "local"
        return _TensorFlowResolver.num_accelerators(self, *task) if is_local else None

    def own_task(self) -> None:
        """Return None. `task_type` is the TPU's job, and this process is not a worker of it."""

    def _find(self) -> AddressesByJob:
        return self._and_coordinator(self._api_addresses() if self._node else self._addresses)

    def _and_coordinator(self, workers: list[str]) -> AddressesByJob:
        spec = {str(self.task_type): workers} if workers else {}
        if workers and self._coordinator_name:
            spec[self._coordinator_name] = [self._coordinator_address]
        return spec

    def _api_addresses(self) -> list[str]:
        credentials, service = self._client_options
        with google_api("tpu", "v1", self.place, credentials, service) as (api, execute):
            nodes = api.projects().locations().nodes()
            node = execute(request_of(nodes.get, self.place, name=self._node))
            state = validation.short_text(node.get("state", "in an unknown state"), "state")
            if state != "READY":
                raise NoTasks(
                    f"{self.place} is {state}",
                    fix="wait until it is READY, or start it",
                )
            endpoints = _ENDPOINTS(node.get("networkEndpoints") or [node], "networkEndpoints")
            return [
                str(Endpoint(endpoint["ipAddress"], int(endpoint["port"])))
                for endpoint in endpoints
            ]


def _tpu_from_environment() -> str | None:
    for name in ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME"):
        if os.environ.get(name):
            return os.environ[name]
    return None


def _config() -> Mapping[str, Any]:
    text = os.environ.get("TPU_CONFIG")
    config = parsed(text, "TPU_CONFIG", _FORM) if text else {}
    if not isinstance(config, Mapping):
        raise Malformed(f"invalid TPU_CONFIG={text!r}: expected an object", fix=_FORM)
    return config


def _addresses(tpu: str) -> list[str]:
    """Return ``"host:port"`` of each worker in ``"grpc://host:port,host"``."""
    addresses = []
    for part in tpu.split(","):
        address = part.strip().removeprefix("grpc://")
        has_port = re.fullmatch(r"(\[.*\]|[^:\[]*):.*", address)
        addresses.append(address if has_port else f"{address}:{_PORT}")
    return addresses


def _metadata(path: str) -> str:
    host = os.environ.get("GCE_METADATA_HOST") or os.environ.get(
        "GCE_METADATA_IP", "metadata.google.internal"
    )
    end = time.monotonic() + _METADATA_SECONDS
    limited = limited_http.limited(http.client.HTTPConnection, _MAX_METADATA_BYTES, end)
    try:
        with contextlib.closing(limited(host, timeout=_METADATA_SECONDS)) as connection:
            headers = {"Metadata-Flavor": "Google", "Accept-Encoding": "identity"}
            connection.request("GET", f"/computeMetadata/v1/{path}", headers=headers)
            reply = connection.getresponse()
            if reply.status != http.HTTPStatus.OK:
                raise ValueError(f"HTTP {reply.status}")
            content: bytes = reply.read()
        # TensorFlow would request an empty value again.
        if not re.fullmatch(rb"[\w.:/-]*[\w.:-]", content):
            raise ValueError("its reply is not a name")
    except (OSError, ValueError, http.client.HTTPException, InvalidMessage) as error:
        raise NotThere(
            f"reading project and zone of the TPU from the metadata server {host} failed: {error}",
            fix="pass project= and zone=; only Google Cloud has a metadata server",
        ) from error
    return content.decode()
