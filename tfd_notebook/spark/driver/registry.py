"""The clusters on Spark of this process, and their form for the panel and the command line."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfd_notebook.cluster import registry
from tfd_notebook.errors import StateError, Unsupported
from tfd_notebook.launchers import spark_slots
from tfd_notebook.model.snapshot import Snapshot
from tfd_notebook.resolvers import providers

if TYPE_CHECKING:
    import pandas as pd

    from tfd_notebook.spark.driver.cluster import SparkClusterBase
    from tfd_notebook.spark.TFCluster import TFCluster

_lock = threading.Lock()
_living: dict[str, Any] = {}
_last: Any = None
_callbacks: list[Callable[[], None]] = []


def running() -> Mapping[str, TFCluster]:
    """Return those that have not ended, by name, the newest last."""
    with _lock:
        return dict(_living)


def last() -> TFCluster | None:
    """Return the newest, ended or not; None where there was none."""
    found: TFCluster | None = _last
    return found


def on_change(callback: Callable[[], None]) -> None:
    """Have `callback` called when a cluster starts or ends."""
    with _lock:
        if callback not in _callbacks:
            _callbacks.append(callback)


def forget(callback: Callable[[], None]) -> None:
    """Call it no more."""
    with _lock, contextlib.suppress(ValueError):
        _callbacks.remove(callback)


def add(cluster: SparkClusterBase, name: str | None) -> str:
    """Note a cluster that starts; return its name, which no other living one has."""
    global _last
    with _lock:
        number, chosen = 1, name or "spark"
        while chosen in _living:
            number += 1
            chosen = f"{name or 'spark'}-{number}"
        _living[chosen] = cluster
        _last = cluster
    _tell()
    registry.notify_cluster_start()
    return chosen


def remove(cluster: SparkClusterBase) -> None:
    """Note that a cluster has ended."""
    with _lock:
        for name in [name for name, other in _living.items() if other is cluster]:
            del _living[name]
    _tell()


def _tell() -> None:
    with _lock:
        callbacks = list(_callbacks)
    for callback in callbacks:
        callback()


#: Seconds that a button or the command line gives the nodes to come to their end.
_STOP_SECONDS = 60

_shown_lock = threading.Lock()
_shown: dict[str, SparkClusterAdapter] = {}


def adapters() -> Mapping[str, SparkClusterAdapter]:
    """Return the clusters on Spark that have not ended, by name; the same objects each time."""
    with _shown_lock:
        known = running()
        for name in _shown.keys() - known.keys():
            del _shown[name]
        for name, cluster in known.items():
            if name not in _shown or _shown[name].cluster is not cluster:
                _shown[name] = SparkClusterAdapter(cluster)
        return dict(_shown)


def adapter_of(cluster: TFCluster) -> SparkClusterAdapter:
    """Return what shows `cluster`, also where it has ended."""
    known = adapters().get(cluster.name)
    return known if known is not None and known.cluster is cluster else SparkClusterAdapter(cluster)


class SparkClusterAdapter:
    """A cluster on Spark with what views and commands ask of any cluster.

    Parameters
    ----------
    cluster : TFCluster
    """

    #: It has no streams and no coordinator; its nodes stand in its snapshot.
    streams: Mapping[str, Any] = {}
    has_coordinator = False
    detached = False

    def __init__(self, cluster: TFCluster) -> None:
        self.cluster = cluster
        self.name = cluster.name

    def snapshot(self) -> Snapshot:
        """Return how it is now."""
        return self.cluster.snapshot()

    @property
    def state(self) -> str:
        """As ``Snapshot.state``."""
        return self.snapshot().state

    @property
    def ended(self) -> bool:
        """Whether it has stopped or failed."""
        return self.state in ("stopped", "failed")

    def to_frame(self) -> pd.DataFrame:
        """Return its nodes, see ``Snapshot.nodes_frame``."""
        return self.snapshot().nodes_frame()

    def logs(self, task: str | None = None, lines: int = 100) -> str:
        """Return the last lines that a node wrote, or all nodes."""
        return str(self.cluster.logs(task, lines))

    def stop(self) -> None:
        """Shut it down: nodes get to their end, or are ended after a minute."""
        if not self.ended:
            self.cluster.shutdown(timeout=_STOP_SECONDS)

    def present_coordinator(self) -> Any:
        """Raise StateError: what coordinates it, if anything does, is its own."""
        raise StateError(f"cluster {self.name!r} on Spark has no coordinator here")

    def ask(self, command: str, timeout: float = 0.0, **arguments: Any) -> Any:
        """Perform a command of `tfd_notebook.cluster.commands.perform`: ``logs`` or ``stop``.

        Raises
        ------
        Unsupported
            Another one.
        """
        if command == "stop":
            self.stop()
            return self.state
        if command == "logs":
            text = self.logs(arguments.get("task"), int(arguments.get("lines", 100)))
            return {"text": text, "offset": None}
        raise Unsupported(
            f"{command!r} cannot be done with cluster {self.name!r}, which runs on Spark",
            fix="stop it, and run another one",
        )


spark_slots.register_slot_holder(lambda: {name: one.slots_held for name, one in running().items()})
providers.register_spark_clusters(running)
registry.register_provider("spark", adapters)
