"""Proxy variables. TensorFlow's gRPC applies them even to ``localhost``, where it then hangs."""

from __future__ import annotations

import os
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, MutableMapping

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_LOCAL = ("localhost", "127.0.0.1", "::1")


#: The next step after an invalid address.
FIX = "encode / as %2F, # as %23, ? as %3F and [ as %5B in its password, and check host and port"


def invalid_variable(url: str) -> str | None:
    """Return the variable of the proxy for a URL if its value is not a valid address, or None.

    Errors of the clients would quote a part of the password.
    """
    parts = urllib.parse.urlsplit(url)
    if urllib.request.proxy_bypass_environment(parts.hostname or ""):  # type: ignore[attr-defined]
        return None
    names = (f"{parts.scheme}_proxy", f"{parts.scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    name = next((name for name in names if os.environ.get(name)), None)
    return name if name and not is_address(os.environ[name]) else None


def is_address(proxy: str) -> bool:
    """Return True if the address of a proxy has a host, and a valid port or none."""
    try:
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    # A password with a slash would end the host.
    return has_host and "@" not in parts.path + parts.query + parts.fragment


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
