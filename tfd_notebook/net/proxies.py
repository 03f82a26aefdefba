"""Proxy variables: TensorFlow's gRPC obeys them even for ``localhost``, and then waits for ever."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_LOCAL = ("localhost", "127.0.0.1", "::1")


def bypass(
    hosts: Iterable[str] = (), environment: MutableMapping[str, str] = os.environ
) -> str | None:
    """Let connections to this host, and to others, past the proxy that `environment` names.

    Extends ``no_grpc_proxy``, which only gRPC reads, and which for gRPC takes the place of
    ``no_proxy``.

    Parameters
    ----------
    hosts : iterable of str
        Names or addresses of the others.
    environment : mapping
        Default: this process's own; gRPC reads it when a connection is made.

    Returns
    -------
    str or None
        A sentence for the user, None where nothing had to be done.
    """
    if (found := in_the_way(hosts, environment)) is None:
        return None
    proxy, missing = found
    environment["no_grpc_proxy"] = ",".join([*_exceptions(environment), *missing])
    return (
        f"{proxy} is set, and TensorFlow would go through it even to the cluster's own hosts: "
        f"no_grpc_proxy now excepts {', '.join(missing)}"
    )


def in_the_way(
    hosts: Iterable[str] = (), environment: Mapping[str, str] = os.environ
) -> tuple[str, list[str]] | None:
    """Return the variable of a proxy and the hosts without an exception; None if all have one."""
    proxy = next((name for name in _PROXIES if environment.get(name)), None)
    if proxy is None:
        return None
    known = _exceptions(environment)
    missing = [name for name in dict.fromkeys((*_LOCAL, *hosts)) if name not in known]
    return (proxy, missing) if missing else None


def _exceptions(environment: Mapping[str, str]) -> list[str]:
    listed = environment.get("no_grpc_proxy") or environment.get("no_proxy") or ""
    return [entry.strip() for entry in listed.split(",") if entry.strip()]
