"""Clusters on Spark of this process, and their adapters for the panel and the command line."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from tfd_notebook._lazy import first_use
from tfd_notebook.cluster import control_socket, registry
from tfd_notebook.cluster.view import PerformedCommands
from tfd_notebook.errors import StateError, Unsupported
from tfd_notebook.launchers import spark_slots
from tfd_notebook.model.snapshot import Snapshot, spark_state
from tfd_notebook.resolvers import providers

if TYPE_CHECKING:
    import pandas as pd

    from tfd_notebook.spark.driver.cluster import SparkClusterBase

#: Timeout in seconds of a shutdown from a button or the command line.
_STOP_SECONDS = 60

_lock = threading.Lock()
_running: dict[str, Any] = {}
_last: Any = None


def running() -> Mapping[str, SparkClusterBase]:
    """Return the running clusters by name, newest last."""
    with _lock:
        return dict(_running)


def last() -> SparkClusterBase | None:
    """Return the newest cluster, running or not; None if there was none."""
    cluster: SparkClusterBase | None = _last
    return cluster


def add(cluster: SparkClusterBase, name: str | None) -> str:
    """Register a cluster that starts; return its name, unique among the running clusters."""
    global _last
    with _lock:
        number, chosen = 1, name or "spark"
        while chosen in _running:
            number += 1
            chosen = f"{name or 'spark'}-{number}"
        _running[chosen] = cluster
        _last = cluster
    first_use()
    registry.notify_cluster_start()
    return chosen


def remove(cluster: SparkClusterBase) -> None:
    """Remove a cluster that has ended."""
    with _lock:
        for name in [name for name, other in _running.items() if other is cluster]:
            del _running[name]
    control_socket.stop_if_unused()


def adapters() -> Mapping[str, SparkClusterAdapter]:
    """Return adapters of the running clusters by name."""
    return {name: cluster.adapter for name, cluster in running().items()}


class SparkClusterAdapter(PerformedCommands):
    """Adapter of a cluster on Spark for views and commands of `tfd_notebook.cluster`.

    It supports `logs` and `stop` only. Its snapshot contains the nodes.

    Parameters
    ----------
    cluster : TFCluster
    """

    has_coordinator = False
    detached = False

    def __init__(self, cluster: SparkClusterBase) -> None:
        self.cluster = cluster

    @property
    def name(self) -> str:
        """The name of the cluster."""
        return self.cluster.name

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the cluster."""
        return self.cluster.snapshot()

    @property
    def state(self) -> str:
        """``Snapshot.state`` of the cluster."""
        return spark_state(str(self.cluster.phase), (node.state for node in self.cluster.nodes))

    @property
    def ended(self) -> bool:
        """True if the cluster has stopped or failed."""
        return self.cluster.phase.is_end

    @property
    def version(self) -> Hashable:
        """A value that is different after each change of `snapshot`."""
        return self.cluster.version

    def to_frame(self) -> pd.DataFrame:
        """Return the nodes, see ``Snapshot.nodes_frame``."""
        return self.snapshot().nodes_frame()

    def stop(self) -> None:
        """Shut the cluster down. Nodes that still run after a minute are stopped."""
        if not self.ended:
            self.cluster.shutdown(timeout=_STOP_SECONDS)

    def current_coordinator(self) -> NoReturn:
        """Raise StateError: a coordinator of a cluster on Spark is not shown."""
        raise StateError(f"cluster {self.name!r} on Spark has no coordinator to control")

    def perform(self, command: str, timeout: float = 0.0, **arguments: Any) -> Any:
        """Perform a command of `tfd_notebook.cluster.commands.perform`: ``logs`` or ``stop``.

        Raises
        ------
        Unsupported
            The command is a different one.
        """
        if command == "stop":
            self.stop()
            return self.state
        if command == "logs":
            lines = int(arguments.get("lines", 100))
            text = str(self.cluster.logs(arguments.get("task"), lines))
            return {"text": text, "offset": None}
        raise Unsupported(
            f"cluster {self.name!r} runs on Spark, which does not support {command!r}",
            fix="stop the cluster, and run another one",
        )


spark_slots.register_slot_holder(
    lambda: {name: cluster.slots_held for name, cluster in running().items()}
)
providers.proxies["spark"] = adapters
