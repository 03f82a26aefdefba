"""Registry of the clusters of this process, with those of `resolvers.providers`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tfd_notebook import errors
from tfd_notebook.resolvers import providers

if TYPE_CHECKING:
    from tfd_notebook.cluster.view import ClusterProxy, ClusterView, RegisteredCluster
    from tfd_notebook.model.spec import ClusterConfig

_clusters: dict[str, RegisteredCluster] = {}
_lock = threading.RLock()
_on_start: list[Callable[[], object]] = []
#: A tuple, because other threads call the callbacks of `on_change` without a lock.
_on_change: tuple[Callable[[], None], ...] = ()


def clusters() -> dict[str, RegisteredCluster]:
    """Return the running clusters of this process by name."""
    with _lock:
        return {name: cluster for name, cluster in _clusters.items() if not cluster.ended}


def get_or_create(
    config: ClusterConfig, if_exists: str, create: Callable[[], RegisteredCluster]
) -> RegisteredCluster:
    """Return the running cluster of a name, or a new one.

    Parameters
    ----------
    config : ClusterConfig
    if_exists : {"reuse", "replace", "error"}
        What to do if a cluster of that name is running; see `Cluster`.
    create : callable
        Returns a new cluster, which is not started yet.

    Raises
    ------
    UsageError
        Invalid `if_exists`.
    NameTaken
        A cluster of that name is running with another specification.
    """
    # Import time: %load_ext imports this module.
    from tfd_notebook.model.spec import is_same

    choices = ("reuse", "replace", "error")
    if if_exists not in choices:
        raise errors.UsageError(
            f"invalid if_exists {if_exists!r}", fix=errors.one_of(if_exists, choices)
        )
    stopped: RegisteredCluster | None = None
    while True:
        with _lock:
            existing = clusters().get(config.name)
            if existing is None or existing is stopped:
                cluster = _clusters[config.name] = create()
                return cluster
            if not existing._is_ending and if_exists != "replace":
                same = is_same(existing.config, config)
                if if_exists == "error" or not same:
                    raise errors.NameTaken(
                        f"cluster {config.name!r} is already running"
                        + ("" if same else " with another specification"),
                        fix="scale that cluster (cluster.scale, %tfd_cluster scale), stop it, "
                        'pass if_exists="replace", or choose another name=',
                    )
                return existing
        # Not under the lock: the thread that ends the cluster acquires it.
        existing.stop()
        stopped = existing


def proxies() -> dict[str, ClusterProxy]:
    """Return the running clusters of the providers by name, if no `Cluster` has that name."""
    running: dict[str, ClusterProxy] = {}
    for provider in tuple(providers.proxies.values()):
        running.update(provider())
    for name in clusters():
        running.pop(name, None)
    return running


def running_clusters() -> dict[str, ClusterView]:
    """Return the running clusters of this process and of the providers by name."""
    return {**proxies(), **clusters()}


def remove_ended() -> None:
    """Remove the clusters that have ended, which `clusters` no longer returns."""
    global _clusters
    with _lock:
        _clusters = clusters()


@contextlib.contextmanager
def locked() -> Iterator[dict[str, RegisteredCluster]]:
    """Lock the registry and yield its clusters by name, to add or remove clusters."""
    with _lock:
        yield _clusters


def on_cluster_start(callback: Callable[[], object]) -> None:
    """Call `callback` whenever a cluster starts in this process."""
    _on_start.append(callback)


def remove_on_cluster_start(callback: Callable[[], object]) -> None:
    """Stop calling `callback`."""
    if callback in _on_start:
        _on_start.remove(callback)


def notify_cluster_start() -> None:
    """Call the callbacks of `on_cluster_start`."""
    for callback in tuple(_on_start):
        callback()


def on_change(callback: Callable[[], None]) -> None:
    """Call `callback` after each change of a running cluster.

    Any thread may call it, also with a lock of the cluster, so it must return at once.
    """
    global _on_change
    with _lock:
        _on_change = (*_on_change, callback)


def remove_on_change(callback: Callable[[], None]) -> None:
    """Stop calling `callback`."""
    global _on_change
    with _lock:
        _on_change = tuple(each for each in _on_change if each != callback)


def notify_change() -> None:
    """Call the callbacks of `on_change`."""
    for callback in _on_change:
        callback()


def _after_fork_in_child() -> None:
    # The clusters belong to the parent, and a thread of the parent may hold the lock.
    global _clusters, _lock, _on_change
    _clusters, _lock, _on_change = {}, threading.RLock(), ()


os.register_at_fork(after_in_child=_after_fork_in_child)
