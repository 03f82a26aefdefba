"""Checks of the options of ``launcher="kubernetes"``, by the rules of Kubernetes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tfd_notebook.errors import UsageError

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(rf"{DNS_LABEL.pattern}(\.{DNS_LABEL.pattern})*")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
LABEL_KEY = re.compile(
    rf"({DNS_SUBDOMAIN.pattern}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_QUANTITY = re.compile(r"\d{1,15}(\.\d{1,9})?(m|[kMGTPE]|[KMGTPE]i)?")
#: Names of resources in Kubernetes.
RESOURCES = {"cpus": "cpu", "memory": "memory", "gpus": "nvidia.com/gpu"}
TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")


def mapping(option: str, value: Any) -> dict[str, Any]:
    """Return a mapping as a dictionary, or raise UsageError; None is an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"invalid {option} {value!r}: expected a mapping")
    return dict(value or {})


def check_name(option: str, value: Any, pattern: re.Pattern[str]) -> None:
    """Raise UsageError if a value is not a name that matches the pattern."""
    if not isinstance(value, str) or not pattern.fullmatch(value) or len(value) > 253:
        raise UsageError(
            f"invalid {option} {value!r}: expected a name that Kubernetes accepts",
            fix="use letters, digits and '-'; namespaces and accounts have lower-case letters only",
        )


def checked_resources(resources: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return requests and limits."""
    if not resources.keys() & {"requests", "limits"}:
        resources = {"requests": resources, "limits": resources} if resources else {}
    result = {}
    for kind, amounts in resources.items():
        if kind not in ("requests", "limits"):
            raise UsageError(
                f"invalid resources: unknown key {kind!r}",
                fix=f"use {', '.join(RESOURCES)}, or the keys requests and limits",
            )
        result[kind] = mapping(f"resources[{kind!r}]", amounts)
        for key, amount in result[kind].items():
            if key not in RESOURCES:
                raise UsageError(
                    f"invalid resources: unknown key {key!r}", fix=f"use {', '.join(RESOURCES)}"
                )
            if isinstance(amount, bool) or not _QUANTITY.fullmatch(str(amount)):
                raise UsageError(
                    f"invalid resources[{key!r}] {amount!r}: expected a quantity",
                    fix='such as 4, "500m" or "16Gi"',
                )
    return result


def checked_volumes(volumes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the volume sources by path."""
    result = {}
    for path, source in volumes.items():
        if not isinstance(path, str) or not re.fullmatch(r"/[^\0:]*", path):
            raise UsageError(f"invalid volumes: path {path!r}: expected an absolute path")
        if isinstance(source, str):
            check_name("volumes", source, DNS_SUBDOMAIN)
            source = {"persistentVolumeClaim": {"claimName": source}}
        source = mapping(f"volumes[{path!r}]", source)
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
