"""Number of accelerators, from servers that answer like TensorFlow's servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import tensorflow as tf

from tests._grpc import Server, status
from tfd_notebook import errors
from tfd_notebook.resolvers import (
    Resolver,
    SlurmResolver,
    TFConfigResolver,
    TPUResolver,
    UnionResolver,
)

pytestmark = pytest.mark.usefixtures("plain_environment")

tf_resolvers = tf.distribute.cluster_resolver


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


def test_running_cluster_is_probed(cluster: dict[str, list[str]]) -> None:
    spec = tf.train.ClusterSpec(cluster)
    for resolver in (
        tf_resolvers.TFConfigClusterResolver(),
        tf_resolvers.SimpleClusterResolver(spec),
    ):
        assert resolver.num_accelerators("worker", 0) == {}
    for resolver in (TFConfigResolver(), UnionResolver(tf_resolvers.SimpleClusterResolver(spec))):
        assert resolver.num_accelerators("worker", 0) == {"GPU": 4}
        assert resolver.num_accelerators("worker", 2) == {"GPU": 3, "TPU": 1}
        assert resolver.num_accelerators("ps", 0) == {}
        resolver.check()


def test_unequal_hosts_report_the_smallest_number(cluster: dict[str, list[str]]) -> None:
    assert TFConfigResolver().num_accelerators() == {"GPU": 2}
    assert TFConfigResolver().num_accelerators("worker") == {"GPU": 2}
    assert TFConfigResolver().num_accelerators(task_id=2) == {"GPU": 3, "TPU": 1}
    chief = TFConfigResolver(task_type="ps", task_id=1)
    assert chief.num_accelerators(task_id=0) == {}


def test_missing_tasks_are_named(cluster: dict[str, list[str]]) -> None:
    for job, index in (("worker", 3), ("chief", 0), ("chief", None)):
        with pytest.raises(errors.UnknownName, match=f"TF_CONFIG has no task {job}:{index or 0}"):
            TFConfigResolver().num_accelerators(job, index)


def test_different_task_at_the_address_is_an_error(
    cluster: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow's Slurm resolver sorts ten hosts wrongly, so that tasks are mismatched."""
    cluster["worker"].reverse()
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster}))
    with pytest.raises(errors.TasksMissing, match="worker:2 answers there") as caught:
        TFConfigResolver().num_accelerators("worker", 0)
    assert caught.value.task == "worker:0"
    with pytest.raises(errors.TasksMissing) as caught:
        TFConfigResolver().check()
    assert caught.value.task is None
    assert str(caught.value).count("answers there") == 2


def test_different_server_at_the_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    version = {"/tensorflow.data.DispatcherService/GetVersion": b"\x08\x09"}
    with Server(version) as server:
        spec = {"cluster": {"worker": [server.address]}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(spec))
        with pytest.raises(errors.TasksMissing, match="a dispatcher answers there"):
            TFConfigResolver().check()


def test_cores_of_a_tpu_are_counted() -> None:
    with Server(status("worker:0", "CPU", *["TPU"] * 8)) as server:
        assert TPUResolver(f"grpc://{server.address}").num_accelerators() == {"TPU": 8}


def test_union_renumbers_tasks_of_two_clusters() -> None:
    with Server(status("worker:0")) as first, Server(status("worker:0", "GPU")) as second:
        both = UnionResolver(
            *(
                tf_resolvers.SimpleClusterResolver(
                    tf.train.ClusterSpec({"worker": [server.address]})
                )
                for server in (first, second)
            )
        )
        both.check()
        assert both.num_accelerators("worker", 1) == {"GPU": 1}
    with Server(status("ps:0", "CPU")) as mismatched:
        spec = tf.train.ClusterSpec({"worker": [mismatched.address]})
        with pytest.raises(errors.TasksMissing, match="ps:0 answers there"):
            UnionResolver(tf_resolvers.SimpleClusterResolver(spec)).check()


#: Tasks at ports of this host that refuse connections.
JOBS = {"worker": {0: "127.0.0.1:1", 1: "127.0.0.1:2"}, "ps": {3: "127.0.0.1:3"}}


def skeleton() -> Any:
    """Return the skeleton of TensorFlow's reference page: three methods and plain attributes."""

    class Skeleton(Resolver):
        def __init__(self) -> None:
            self.task_type = "worker"
            self.task_id = 1
            self.rpc_layer = "grpc"

        def cluster_spec(self) -> Any:
            return tf.train.ClusterSpec(JOBS)

        def master(self, task_type: Any = None, task_id: Any = None, rpc_layer: Any = None) -> str:
            return "grpc://127.0.0.1:2"

        def num_accelerators(
            self, task_type: Any = None, task_id: Any = None, config_proto: Any = None
        ) -> dict[str, int]:
            return {"GPU": 4}

    return Skeleton()


def test_subclass_of_the_reference_skeleton_works() -> None:
    resolver = skeleton()
    assert isinstance(resolver, tf_resolvers.ClusterResolver)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.environment == ""
    assert resolver.master() == "grpc://127.0.0.1:2"
    assert resolver.num_accelerators() == {"GPU": 4}
    assert resolver.tasks() == JOBS
    assert next(resolver.watch(seconds=0)) == resolver.cluster_spec()
    with pytest.raises(errors.TasksMissing, match="Skeleton: worker:0"):
        resolver.check()
    both = UnionResolver(resolver)
    assert both.cluster_spec() == resolver.cluster_spec()


def test_subclass_inherits_all_other_methods() -> None:
    class Least(Resolver):
        def cluster_spec(self) -> Any:
            return tf.train.ClusterSpec({"worker": ["a:1"]})

    assert Least().master("worker", 0) == "grpc://a:1"
    with pytest.raises(errors.UsageError, match="Resolver defines no tasks"):
        Resolver().tasks()


def test_missing_device_type_counts_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(status("worker:0")) as server:
        spec = {"cluster": {"worker": [server.address]}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(spec))
        result = TFConfigResolver().num_accelerators()
    assert result == {}
    assert result["GPU"] == 0
    monkeypatch.delenv("TF_CONFIG")
    assert SlurmResolver({"worker": 1}, gpus_per_task=0).num_accelerators()["GPU"] == 0
