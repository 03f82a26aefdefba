"""Cloud TPUs: TensorFlow's own resolver, with answers that are looked at first."""

from __future__ import annotations

import os
import re
import urllib.request
from collections import Counter
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfd_notebook.errors import Malformed, NoTasks, NotThere, UsageError
from tfd_notebook.model.spec import Endpoint
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.gce import google_api
from tfd_notebook.resolvers.validation import Found, checked, parsed

_Theirs = tf.distribute.cluster_resolver.TPUClusterResolver
#: Where a TPU worker listens if an address names no port.
_PORT = 8470
#: Seconds for an answer of the metadata server, which is in the host itself.
_METADATA_SECONDS = 3.0
_FORM = 'write {"tpu_node_name": "name", ...}'


class TPUResolver(Resolver, _Theirs):  # type: ignore[misc,valid-type]
    """A Cloud TPU, for ``tf.distribute.TPUStrategy``: TensorFlow's TPUClusterResolver.

    Addresses are checked before anybody connects to them, each worker is asked for its cores, and
    what is asked has a limit in time.

    Parameters
    ----------
    tpu : str, optional
        A name, ``"grpc://host:port"`` of one worker or more with commas between, or ``"local"``.
        Default: ``KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS``, ``TPU_NAME`` or ``TPU_CONFIG``.
    zone, project : str, optional
        Of a TPU that is named. Default: of ``TPU_CONFIG``, or those of this host, from Google's
        metadata server (``GCE_METADATA_HOST``).
    job_name : str
        Default ``"worker"``.
    coordinator_name, coordinator_address : str, optional
        A coordinator to be in the cluster, too; both or none.
    credentials, service : optional
        As for `GCEResolver`.

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
            raise UsageError("coordinator_name and coordinator_address: say both, or none")
        config = _config()
        tpu = tpu or _named() or config.get("tpu_node_name")
        if not isinstance(tpu, str):
            raise NotThere(
                "no TPU is named, and none of TPU_NAME, TPU_CONFIG and "
                "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS names one",
                fix='write TPUResolver("name") or TPUResolver("grpc://host:8470")',
            )
        named = tpu != "local" and not tpu.startswith("grpc://")
        if named:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", tpu):
                raise UsageError(
                    f"tpu={tpu!r} is neither a name nor an address",
                    fix='write "name", "grpc://host:port" or "local"',
                )
            project = project or config.get("project") or _metadata("project/project-id")
            zone = zone or config.get("zone") or _metadata("instance/zone").rpartition("/")[2]
        self._node = f"projects/{project}/locations/{zone}/nodes/{tpu}" if named else ""
        self._addresses = [] if named or tpu == "local" else _addresses(tpu)
        self._asks = (credentials, service)
        _Theirs.__init__(
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
        if self._tpu == "local":
            return Counter(_Theirs.num_accelerators(self, task_type, task_id, config_proto))
        return super().num_accelerators(task_type or self.task_type, task_id, config_proto)

    def _own(self) -> None:
        """The job that TensorFlow names is the TPU's; this process is none of its workers."""

    def _find(self) -> Found:
        return self._and_coordinator(self._ask_google() if self._node else self._addresses)

    def _and_coordinator(self, workers: list[str]) -> Found:
        spec = {str(self.task_type): workers} if workers else {}
        if workers and self._coordinator_name:
            spec[self._coordinator_name] = [self._coordinator_address]
        return spec

    def _ask_google(self) -> list[str]:
        credentials, service = self._asks
        with google_api("tpu", "v1", self.place, credentials, service) as api:
            node = api.projects().locations().nodes().get(name=self._node).execute()
            if node.get("state") != "READY":
                raise NoTasks(
                    f"{self.place} is {node.get('state')}",
                    fix="wait until it is READY, or start it",
                )
            ends = node.get("networkEndpoints") or [node]
            return [str(Endpoint(end["ipAddress"], int(end["port"]))) for end in ends]


def _named() -> str | None:
    for name in ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME"):
        if os.environ.get(name):
            return os.environ[name]
    return None


def _config() -> Mapping[str, Any]:
    text = os.environ.get("TPU_CONFIG")
    config = parsed(text, "TPU_CONFIG", _FORM) if text else {}
    if not isinstance(config, Mapping):
        raise Malformed(f"TPU_CONFIG={text!r} names no TPU", fix=_FORM)
    return config


def _addresses(tpu: str) -> list[str]:
    """Return ``"host:port"`` of each worker in ``"grpc://host:port,host"``."""
    found = []
    for part in tpu.split(","):
        address = part.strip().removeprefix("grpc://")
        has_port = re.fullmatch(r"(\[.*\]|[^:\[]*):.*", address)
        found.append(address if has_port else f"{address}:{_PORT}")
    return found


def _metadata(path: str) -> str:
    host = os.environ.get("GCE_METADATA_HOST") or os.environ.get(
        "GCE_METADATA_IP", "metadata.google.internal"
    )
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError) as error:
        raise NotThere(
            f"project and zone of the TPU are not known: the metadata server {host}: {error}",
            fix="say project= and zone=; outside of Google's cloud nobody else knows them",
        ) from error
