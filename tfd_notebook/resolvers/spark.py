"""The tasks of a cluster on the executors of Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfd_notebook.errors import NoTasks, NotThere, UsageError
from tfd_notebook.resolvers import providers
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import Found

#: States of a node of which nothing answers any more.
_OVER = ("finished", "failed", "lost", "stopped")


class SparkResolver(Resolver):
    """The nodes of a `TFCluster`, or the servers of a cluster of ``launcher="spark"``.

    Only those that have not ended: an index is missing while its node is gone. The evaluator is
    none of the tasks that strategies connect, and is left out. A node answers once its function has
    started TensorFlow's server there; `check` says which do.

    Parameters
    ----------
    cluster : optional
        A `tfd_notebook.spark.TFCluster.TFCluster`, or a `tfd_notebook.Cluster`. Default: the newest
        TFCluster of this process, at each call.
    task_type, task_id : optional
        Which task this process is. Default: none.
    rpc_layer : str
        Default ``"grpc"``.

    Raises
    ------
    UsageError
        `cluster` is nothing of that kind.
    """

    def __init__(
        self,
        cluster: Any = None,
        *,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = "grpc",
    ) -> None:
        if cluster is not None and not hasattr(cluster, "snapshot"):
            raise UsageError(
                f"{cluster!r} is no cluster on Spark",
                fix="name what TFCluster.run returned, or a tfd.Cluster",
            )
        super().__init__(task_type, task_id, rpc_layer)
        self._cluster = cluster

    @property
    def place(self) -> str:
        cluster = self._cluster or _newest()
        return f"the cluster {cluster.name!r} on Spark" if cluster else "Spark"

    def _find(self) -> Found:
        cluster = self._cluster or _newest()
        if cluster is None:
            raise NotThere(
                "no cluster of this process runs on Spark",
                fix="start one with TFCluster.run(...), or name it: SparkResolver(cluster)",
            )
        found: dict[str, dict[int, str]] = {}
        for job, index, address in _addresses(cluster):
            found.setdefault(job, {})[index] = address
        if not found:
            state = cluster.snapshot().state
            raise NoTasks(
                f"{self.place} has no node that could be used: it is {state}",
                fix="wait until its nodes have started, or run it again",
            )
        return found


def _addresses(cluster: Any) -> Iterator[tuple[str, int, str]]:
    snapshot = cluster.snapshot()
    if snapshot.spark is not None:
        for node in snapshot.spark.nodes:
            if node.address and node.state not in _OVER and node.role != "evaluator":
                yield node.role, node.index, node.address
        return
    for row in snapshot.tasks:
        if row.role in ("worker", "ps") and row.address and not row.state.ended:
            yield str(row.role), row.index, row.address


def _newest() -> Any:
    """Return the newest TFCluster of this process that has not ended; None without one."""
    return next(reversed(list(providers.spark_clusters().values())), None)
