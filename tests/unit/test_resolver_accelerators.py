"""How many accelerators tasks have: asked of servers that answer as TensorFlow's do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import tensorflow as tf

from tests.unit._grpc import Server, status
from tfd_notebook import errors
from tfd_notebook.resolvers import (
    Resolver,
    SlurmResolver,
    TFConfigResolver,
    TPUResolver,
    UnionResolver,
)

pytestmark = pytest.mark.usefixtures("nowhere")

theirs = tf.distribute.cluster_resolver


@pytest.fixture
def servers() -> Iterator[dict[str, str]]:
    """Return the addresses of four tasks on unequal hosts."""
    with ExitStack() as stack:
        yield {
            task: stack.enter_context(Server(status(task, "CPU", *devices))).address
            for task, devices in {
                "worker:0": ("XLA_CPU", "GPU", "GPU", "GPU", "GPU"),
                "worker:1": ("GPU", "XLA_GPU", "GPU"),
                "worker:2": ("GPU", "GPU", "GPU", "TPU"),
                "ps:0": (),
            }.items()
        }


@pytest.fixture
def cluster(servers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    spec: dict[str, list[str]] = {}
    for task, address in servers.items():
        spec.setdefault(task.partition(":")[0], []).append(address)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": spec}))
    return spec


def test_a_live_cluster_is_asked(cluster: dict[str, list[str]]) -> None:
    spec = tf.train.ClusterSpec(cluster)
    for resolver in (theirs.TFConfigClusterResolver(), theirs.SimpleClusterResolver(spec)):
        assert resolver.num_accelerators("worker", 0) == {}
    for ours in (TFConfigResolver(), UnionResolver(theirs.SimpleClusterResolver(spec))):
        assert ours.num_accelerators("worker", 0) == {"GPU": 4}
        assert ours.num_accelerators("worker", 2) == {"GPU": 3, "TPU": 1}
        assert ours.num_accelerators("ps", 0) == {}
        ours.check()


def test_of_unequal_hosts_each_has_the_least(cluster: dict[str, list[str]]) -> None:
    assert TFConfigResolver().num_accelerators() == {"GPU": 2}
    assert TFConfigResolver().num_accelerators("worker") == {"GPU": 2}
    assert TFConfigResolver().num_accelerators(task_id=2) == {"GPU": 3, "TPU": 1}
    chief = TFConfigResolver(task_type="ps", task_id=1)
    assert chief.num_accelerators(task_id=0) == {}


def test_tasks_that_are_not_there(cluster: dict[str, list[str]]) -> None:
    for job, index in (("worker", 3), ("chief", 0), ("chief", None)):
        with pytest.raises(errors.UnknownName, match=f"TF_CONFIG has no task {job}:{index or 0}"):
            TFConfigResolver().num_accelerators(job, index)


def test_another_task_at_the_address(
    cluster: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What TensorFlow's Slurm resolver made of ten hosts: a task believes to be another."""
    cluster["worker"].reverse()
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster}))
    with pytest.raises(errors.TasksMissing, match="worker:2 answers there") as caught:
        TFConfigResolver().num_accelerators("worker", 0)
    assert caught.value.task == "worker:0"
    with pytest.raises(errors.TasksMissing) as caught:
        TFConfigResolver().check()
    assert caught.value.task is None
    assert str(caught.value).count("answers there") == 2


def test_a_server_of_another_kind_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    version = {"/tensorflow.data.DispatcherService/GetVersion": b"\x08\x09"}
    with Server(version) as server:
        spec = {"cluster": {"worker": [server.address]}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(spec))
        with pytest.raises(errors.TasksMissing, match="a dispatcher answers there"):
            TFConfigResolver().check()


def test_cores_of_a_tpu() -> None:
    with Server(status("worker:0", "CPU", *["TPU"] * 8)) as server:
        assert TPUResolver(f"grpc://{server.address}").num_accelerators() == {"TPU": 8}


def test_tasks_of_two_clusters_have_new_numbers() -> None:
    with Server(status("worker:0")) as one, Server(status("worker:0", "GPU")) as two:
        both = UnionResolver(
            *(
                theirs.SimpleClusterResolver(tf.train.ClusterSpec({"worker": [server.address]}))
                for server in (one, two)
            )
        )
        both.check()
        assert both.num_accelerators("worker", 1) == {"GPU": 1}
    with Server(status("ps:0", "CPU")) as other:
        spec = tf.train.ClusterSpec({"worker": [other.address]})
        with pytest.raises(errors.TasksMissing, match="ps:0 answers there"):
            UnionResolver(theirs.SimpleClusterResolver(spec)).check()


def skeleton() -> Any:
    """The skeleton of TensorFlow's reference page: three methods, and plain attributes."""

    class Skeleton(Resolver):
        def __init__(self) -> None:
            self.task_type = "worker"
            self.task_id = 1
            self.rpc_layer = "grpc"

        def cluster_spec(self) -> Any:
            return tf.train.ClusterSpec({"worker": ["a:1", "b:2"], "ps": {3: "c:3"}})

        def master(self, task_type: Any = None, task_id: Any = None, rpc_layer: Any = None) -> str:
            return "grpc://b:2"

        def num_accelerators(
            self, task_type: Any = None, task_id: Any = None, config_proto: Any = None
        ) -> dict[str, int]:
            return {"GPU": 4}

    return Skeleton()


def test_a_subclass_of_the_reference_pages_skeleton() -> None:
    resolver = skeleton()
    assert isinstance(resolver, theirs.ClusterResolver)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.environment == ""
    assert resolver.master() == "grpc://b:2"
    assert resolver.num_accelerators() == {"GPU": 4}
    assert resolver.tasks() == {"worker": {0: "a:1", 1: "b:2"}, "ps": {3: "c:3"}}
    assert next(resolver.watch(seconds=0)) == resolver.cluster_spec()
    with pytest.raises(errors.TasksMissing, match="Skeleton: worker:0"):
        resolver.check(timeout=0.1)
    both = UnionResolver(resolver)
    assert both.cluster_spec() == resolver.cluster_spec()


def test_a_subclass_may_leave_the_rest_to_the_base() -> None:
    class Least(Resolver):
        def cluster_spec(self) -> Any:
            return tf.train.ClusterSpec({"worker": ["a:1"]})

    assert Least().master("worker", 0) == "grpc://a:1"
    with pytest.raises(NotImplementedError, match="must override cluster_spec"):
        Resolver().tasks()


def test_a_kind_that_no_task_has_counts_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(status("worker:0")) as server:
        spec = {"cluster": {"worker": [server.address]}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(spec))
        found = TFConfigResolver().num_accelerators()
    assert found == {}
    assert found["GPU"] == 0
    monkeypatch.delenv("TF_CONFIG")
    assert SlurmResolver({"worker": 1}, gpus_per_task=0).num_accelerators()["GPU"] == 0
