"""Proxy variables, which TensorFlow's gRPC applies even to ``localhost``, where it then hangs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_LOCAL = ("localhost", "127.0.0.1", "::1")


def bypass(
    hosts: Iterable[str] = (), environment: MutableMapping[str, str] = os.environ
) -> str | None:
    """Exclude this host and others from the proxy that `environment` sets.

    Extends ``no_grpc_proxy``, which only gRPC reads, and which replaces ``no_proxy`` for gRPC.

    Parameters
    ----------
    hosts : iterable of str
        Names or addresses of the other hosts.
    environment : mapping
        Default: that of this process. gRPC reads it when a connection is made.

    Returns
    -------
    str or None
        A sentence for the user, or None if no change was needed.
    """
    if (obstacle := in_the_way(hosts, environment)) is None:
        return None
    proxy, missing = obstacle
    environment["no_grpc_proxy"] = ",".join([*_exceptions(environment), *missing])
    return (
        f"{proxy} is set, and TensorFlow would use it even for the cluster's own hosts: "
        f"no_grpc_proxy now excludes {', '.join(missing)}"
    )


def in_the_way(
    hosts: Iterable[str] = (), environment: Mapping[str, str] = os.environ
) -> tuple[str, list[str]] | None:
    """Return the proxy's variable and the hosts without an exception, or None if all have one."""
    proxy = next((name for name in _PROXIES if environment.get(name)), None)
    if proxy is None:
        return None
    known = _exceptions(environment)
    missing = [name for name in dict.fromkeys((*_LOCAL, *hosts)) if name not in known]
    return (proxy, missing) if missing else None


def _exceptions(environment: Mapping[str, str]) -> list[str]:
    listed = environment.get("no_grpc_proxy") or environment.get("no_proxy") or ""
    return [entry.strip() for entry in listed.split(",") if entry.strip()]
