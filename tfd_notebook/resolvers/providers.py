"""Registry of the task sources in packages that resolvers cannot import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_clusters: list[Callable[[], Mapping[str, Any]]] = []
_attach: list[Callable[[Any, str, bool], Any]] = []
_spark_clusters: list[Callable[[], Mapping[str, Any]]] = []
_remote_kernels: list[Callable[[], Sequence[Any]]] = []


def register_clusters(
    provider: Callable[[], Mapping[str, Any]], attach: Callable[[Any, str, bool], Any]
) -> None:
    """Register the functions for clusters of this process.

    Parameters
    ----------
    provider : callable
        Returns the running clusters by name.
    attach : callable
        Returns a new cluster for a resolver, a name, and whether to connect to its workers.
    """
    _clusters[:] = [provider]
    _attach[:] = [attach]


def register_spark_clusters(provider: Callable[[], Mapping[str, Any]]) -> None:
    """Register the function that returns this process's running TFClusters by name.

    The newest cluster comes last.
    """
    _spark_clusters[:] = [provider]


def register_remote_kernels(provider: Callable[[], Sequence[Any]]) -> None:
    """Register the function that returns the open `RemoteKernel` objects of this process."""
    _remote_kernels[:] = [provider]


def clusters() -> Mapping[str, Any]:
    """Return the running clusters of this process by name."""
    return _clusters[0]() if _clusters else {}


def attach(resolver: Any, name: str, connect: bool) -> Any:
    """Return a new cluster of this process with the tasks of a resolver."""
    return _attach[0](resolver, name, connect)


def spark_clusters() -> Mapping[str, Any]:
    """Return the running TFClusters of this process by name, the newest last."""
    return _spark_clusters[0]() if _spark_clusters else {}


def remote_kernels() -> Sequence[Any]:
    """Return the open `RemoteKernel` objects of this process."""
    return _remote_kernels[0]() if _remote_kernels else ()
