"""Tasks of a cluster on Spark, from its snapshot."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests._grpc import Server, status
from tfd_notebook import errors
from tfd_notebook.model.snapshot import NodeRow, Snapshot, SparkRow
from tfd_notebook.resolvers import SparkResolver, providers


class Shown:
    """The members of a TFCluster that a resolver uses."""

    name = "mine"

    def __init__(self, *nodes: NodeRow, phase: str = "running") -> None:
        self.nodes = nodes
        self.phase = phase

    def snapshot(self) -> Any:
        row = SparkRow(phase=self.phase, since=0.0, reserved=2, needed=2, nodes=self.nodes)
        return dataclasses.replace(
            Snapshot(version=1, time=0.0, name=self.name, launcher="spark", state="ready"),
            spark=row,
        )


def node(role: str, index: int, address: str, state: str = "running") -> NodeRow:
    return NodeRow(role, index, address=address, state=state)


def test_running_nodes_are_the_tasks() -> None:
    cluster = Shown(
        node("worker", 0, "a:1"),
        node("worker", 1, "b:2", "lost"),
        node("worker", 2, "c:3", "starting"),
        node("worker", 3, ""),
        node("ps", 0, "d:4"),
        node("evaluator", 0, "e:5"),
    )
    resolver = SparkResolver(cluster)
    assert resolver.tasks() == {"worker": {0: "a:1", 2: "c:3"}, "ps": {0: "d:4"}}
    assert resolver.cluster_spec().task_address("worker", 2) == "c:3"
    assert resolver.master("ps", 0) == "grpc://d:4"
    assert resolver.place == "the cluster 'mine' on Spark"
    with pytest.raises(errors.UnknownName, match="no task worker:1"):
        resolver.master("worker", 1)


def test_tasks_are_looked_up_at_each_call() -> None:
    cluster = Shown(node("worker", 0, "a:1"))
    resolver = SparkResolver(cluster)
    assert resolver.tasks() == {"worker": {0: "a:1"}}
    cluster.nodes = (node("worker", 0, "b:1"),)
    assert resolver.tasks() == {"worker": {0: "b:1"}}
    cluster.nodes = (node("worker", 0, "b:1", "failed"),)
    with pytest.raises(errors.NoTasks, match="no usable node"):
        resolver.tasks()


def test_check_compares_the_servers_identity() -> None:
    with Server(status("worker:0", "CPU")) as server:
        resolver = SparkResolver(Shown(node("worker", 0, server.address)))
        resolver.check()
        with pytest.raises(errors.TasksMissing, match="worker:0 answers there"):
            SparkResolver(Shown(node("worker", 1, server.address))).check()


def test_missing_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    running: dict[str, Any] = {}
    monkeypatch.setattr(providers, "spark_clusters", lambda: running)
    with pytest.raises(errors.NotThere, match="no cluster of this process"):
        SparkResolver().tasks()
    running.update(one=Shown(), two=Shown(node("ps", 0, "a:1")))
    assert SparkResolver().tasks() == {"ps": {0: "a:1"}}
    with pytest.raises(errors.UsageError, match="expected a TFCluster"):
        SparkResolver(3)
