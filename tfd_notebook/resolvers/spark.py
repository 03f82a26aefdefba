"""Resolver for the tasks of a cluster on Spark executors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfd_notebook.errors import NoTasks, NotThere, UsageError
from tfd_notebook.resolvers import providers
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import AddressesByJob

#: States of a node that no longer answers.
_ENDED = ("finished", "failed", "lost", "stopped")


class SparkResolver(Resolver):
    """The nodes of a `TFCluster`, or the servers of a cluster with ``launcher="spark"``.

    Ended nodes are left out, so that their indexes are missing. The evaluator is left out, because
    strategies do not connect to it. A node answers after its function has started a TensorFlow
    server. `check` reports the nodes that do not answer.

    Parameters
    ----------
    cluster : optional
        A `tfd_notebook.spark.TFCluster.TFCluster`, or a `tfd_notebook.Cluster`. Default: the newest
        TFCluster of this process, at each call.
    task_type, task_id : optional
        The task of this process. Default: not a task of the cluster.
    rpc_layer : str
        Default ``"grpc"``.

    Raises
    ------
    UsageError
        `cluster` is of a different type.
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
                f"invalid cluster {cluster!r}: expected a TFCluster or a tfd.Cluster",
                fix="pass the result of TFCluster.run, or a tfd.Cluster",
            )
        super().__init__(task_type, task_id, rpc_layer)
        self._cluster = cluster

    @property
    def place(self) -> str:
        cluster = self._cluster or _newest()
        return f"the cluster {cluster.name!r} on Spark" if cluster else "Spark"

    def _find(self) -> AddressesByJob:
        cluster = self._cluster or _newest()
        if cluster is None:
            raise NotThere(
                "no cluster of this process runs on Spark",
                fix="start a cluster with TFCluster.run(...), or pass it: SparkResolver(cluster)",
            )
        tasks: dict[str, dict[int, str]] = {}
        for job, index, address in _addresses(cluster):
            tasks.setdefault(job, {})[index] = address
        if not tasks:
            state = cluster.snapshot().state
            raise NoTasks(
                f"{self.place} has no usable node: it is {state}",
                fix="wait until its nodes have started, or run it again",
            )
        return tasks


def _addresses(cluster: Any) -> Iterator[tuple[str, int, str]]:
    snapshot = cluster.snapshot()
    if snapshot.spark is not None:
        for node in snapshot.spark.nodes:
            if node.address and node.state not in _ENDED and node.role != "evaluator":
                yield node.role, node.index, node.address
        return
    for row in snapshot.tasks:
        if row.role in ("worker", "ps") and row.address and not row.state.ended:
            yield str(row.role), row.index, row.address


def _newest() -> Any:
    """Return the newest running TFCluster of this process, or None."""
    return next(reversed(list(providers.spark_clusters().values())), None)
