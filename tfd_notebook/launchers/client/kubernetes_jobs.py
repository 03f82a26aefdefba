"""Options and manifests of the job of ``launcher="kubernetes"``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import InvalidMessage, UsageError
from tfd_notebook.model.spec import ClusterConfig, check_count

LABEL = "tfd-notebook/job"
#: Name of the container with the agent.
CONTAINER = "agent"
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(rf"{DNS_LABEL.pattern}(\.{DNS_LABEL.pattern})*")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(
    rf"({_DNS_SUBDOMAIN.pattern}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_QUANTITY = re.compile(r"\d{1,15}(\.\d{1,9})?(m|[kMGTPE]|[KMGTPE]i)?")
_SECRET = re.compile(r".*(TOKEN|SECRET|PASSWORD|KEY)", re.IGNORECASE)
#: Seconds added to the start timeout, after which a job without a kernel ends.
_START_MARGIN = 60
#: Seconds before Kubernetes removes a job that has ended.
_TTL_SECONDS = 300
#: Names of resources in Kubernetes.
_RESOURCES = {"cpus": "cpu", "memory": "memory", "gpus": "nvidia.com/gpu"}
_TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the launcher as JSON values, or raise UsageError."""
    if not options["image"]:
        raise UsageError(
            'launcher "kubernetes" needs an image',
            fix='tfd.launchers.Kubernetes("registry.example/with-tfd-notebook:1")',
        )
    for option in ("image", "python"):
        text = options[option]
        if not isinstance(text, str) or not re.fullmatch(r"[\w./:@+-]+", text, re.ASCII):
            raise UsageError(f"invalid {option} {text!r}: expected a name without spaces")
    check_count("pods", options["pods"], minimum=1)
    if options["minimum"] is not None:
        check_count("minimum", options["minimum"], minimum=1, maximum=options["pods"])
    _check_name("namespace", options["namespace"] or "default", DNS_LABEL)
    _check_name("service_account", options["service_account"] or "default", _DNS_SUBDOMAIN)
    maps = ("resources", "node_selector", "volumes", "environment", "labels")
    result = {**options, **{option: _mapping(option, options[option]) for option in maps}}
    for option in ("node_selector", "labels"):
        for key, value in result[option].items():
            _check_name(option, key, _LABEL_KEY)
            _check_name(option, value, _LABEL_VALUE)
    for key, value in result["environment"].items():
        _check_name("environment", key, _VARIABLE)
        if not isinstance(value, str) or "\0" in value:
            raise UsageError(f"invalid environment[{key!r}]: expected a string")
    result["tolerations"] = [_mapping("tolerations", item) for item in options["tolerations"]]
    for item in result["tolerations"]:
        if unknown := sorted(set(item) - set(_TOLERATION)):
            raise UsageError(
                f"invalid tolerations: unknown key {unknown[0]!r}",
                fix=f"use {', '.join(_TOLERATION)}",
            )
    result["resources"] = _checked_resources(result["resources"])
    result["volumes"] = _checked_volumes(result["volumes"])
    return result


def _mapping(option: str, value: Any) -> dict[str, Any]:
    """Return a mapping as a dictionary, or raise UsageError; None is an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"invalid {option} {value!r}: expected a mapping")
    return dict(value or {})


def _check_name(option: str, value: Any, pattern: re.Pattern[str]) -> None:
    """Raise UsageError if a value is not a name that matches the pattern."""
    if not isinstance(value, str) or not pattern.fullmatch(value) or len(value) > 253:
        raise UsageError(
            f"invalid {option} {value!r}: expected a name that Kubernetes accepts",
            fix="use letters, digits and '-'; namespaces and accounts have lower-case letters only",
        )


def _checked_resources(resources: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return requests and limits."""
    if not resources.keys() & {"requests", "limits"}:
        resources = {"requests": resources, "limits": resources} if resources else {}
    result = {}
    for kind, amounts in resources.items():
        if kind not in ("requests", "limits"):
            raise UsageError(
                f"invalid resources: unknown key {kind!r}",
                fix=f"use {', '.join(_RESOURCES)}, or the keys requests and limits",
            )
        result[kind] = _mapping(f"resources[{kind!r}]", amounts)
        for key, amount in result[kind].items():
            if key not in _RESOURCES:
                raise UsageError(
                    f"invalid resources: unknown key {key!r}", fix=f"use {', '.join(_RESOURCES)}"
                )
            if isinstance(amount, bool) or not _QUANTITY.fullmatch(str(amount)):
                raise UsageError(
                    f"invalid resources[{key!r}] {amount!r}: expected a quantity",
                    fix='such as 4, "500m" or "16Gi"',
                )
    return result


def _checked_volumes(volumes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the volume sources by path."""
    result = {}
    for path, source in volumes.items():
        if not isinstance(path, str) or not re.fullmatch(r"/[^\0:]*", path):
            raise UsageError(f"invalid volumes: path {path!r}: expected an absolute path")
        if isinstance(source, str):
            _check_name("volumes", source, _DNS_SUBDOMAIN)
            source = {"persistentVolumeClaim": {"claimName": source}}
        source = _mapping(f"volumes[{path!r}]", source)
        try:
            json.dumps(source)
        except (TypeError, ValueError):
            raise UsageError(f"invalid volumes[{path!r}]: expected JSON values") from None
        if len(source) != 1:
            raise UsageError(
                f"invalid volumes[{path!r}]: expected one volume source",
                fix='such as "my-claim", or {"emptyDir": {}}',
            )
        result[path] = source
    return result


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without values of variables with secret names."""
    environment = {
        name: "(hidden)" if _SECRET.match(name) else value
        for name, value in options["environment"].items()
    }
    return {**options, "environment": environment}


def name_of(cluster: str, suffix: str) -> str:
    """Return the name of a job: at most 47 characters of a DNS label."""
    prefix = f"tfd-{re.sub('[^a-z0-9]+', '-', cluster.lower())[:36].strip('-')}".strip("-")
    return f"{prefix}-{suffix}"


def reference(version: str, kind: str, name: str, uid: str) -> dict[str, Any]:
    """Return the reference to the owner of an object."""
    return {"apiVersion": version, "kind": kind, "name": name, "uid": uid}


def uid_of(item: Any) -> str:
    """Return the uid in a reply of the API, or raise InvalidMessage."""
    metadata = item.get("metadata") if isinstance(item, dict) else None
    uid = metadata.get("uid") if isinstance(metadata, dict) else None
    if not isinstance(uid, str) or not re.fullmatch(r"[\w.-]{1,128}", uid, re.ASCII):
        raise InvalidMessage("invalid uid: expected a name")
    return uid


def job(
    options: Mapping[str, Any], config: ClusterConfig, name: str, owner: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the manifest of the job of a cluster."""
    first_seconds = int(config.policy.start_timeout) + _START_MARGIN
    volumes = list(options["volumes"].items())
    container = {
        "name": CONTAINER,
        "image": options["image"],
        "command": [options["python"], "-u", "-c", stdio.bootstrap("pod", str(first_seconds))],
        "env": [{"name": key, "value": value} for key, value in options["environment"].items()],
        "resources": {
            kind: {_RESOURCES[key]: str(value) for key, value in amounts.items()}
            for kind, amounts in options["resources"].items()
        },
        "volumeMounts": [
            {"name": f"volume-{number}", "mountPath": path}
            for number, (path, _) in enumerate(volumes)
        ],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    account = options["service_account"]
    pod = {
        "restartPolicy": "Never",
        "subdomain": name,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [
            {"name": f"volume-{number}", **source} for number, (_, source) in enumerate(volumes)
        ],
        "nodeSelector": options["node_selector"],
        "tolerations": options["tolerations"],
        **({"serviceAccountName": account} if account else {"automountServiceAccountToken": False}),
    }
    metadata = _metadata(options, name, owner)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completions": options["pods"],
            "parallelism": options["pods"],
            "completionMode": "Indexed",
            # A pod that fails neither ends the others nor starts again.
            "backoffLimitPerIndex": 0,
            # Removed when all pods run.
            "activeDeadlineSeconds": first_seconds,
            "ttlSecondsAfterFinished": _TTL_SECONDS,
            "template": {"metadata": {"labels": metadata["labels"]}, "spec": pod},
        },
    }


def service(options: Mapping[str, Any], name: str, job_uid: str) -> dict[str, Any]:
    """Return the manifest of the service, which gives each pod a host name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(options, name, reference("batch/v1", "Job", name, job_uid)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL: name},
        },
    }


def _metadata(
    options: Mapping[str, Any], name: str, owner: Mapping[str, Any] | None
) -> dict[str, Any]:
    own = {"app.kubernetes.io/managed-by": "tfd-notebook", LABEL: name}
    owners = [dict(owner)] if owner else []
    return {"name": name, "labels": {**options["labels"], **own}, "ownerReferences": owners}
