"""Functions of packages above the resolvers, which set them when they are imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Returns the running clusters of this process by name.
clusters: Callable[[], Mapping[str, Any]] = dict
#: Returns a new cluster for a resolver, a name, and whether to connect to its workers.
attach: Callable[[Any, str, bool], Any]
#: Returns the open `RemoteKernel` objects of this process.
remote_kernels: Callable[[], Sequence[Any]] = tuple
#: Return further running clusters by name, the newest last. The keys are the kinds of clusters:
#: ``"spark"`` for TFClusters, ``"kernels"`` for those of remote kernels.
proxies: dict[str, Callable[[], Mapping[str, Any]]] = {}


def spark_clusters() -> Mapping[str, Any]:
    """Return the running TFClusters of this process by name, the newest last."""
    return proxies["spark"]() if "spark" in proxies else {}
