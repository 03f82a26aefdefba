"""Findings in real servers and clusters, and servers without findings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._doctor import DOCTOR, in_child
from tests._grpc import Server, status
from tests._waiting import until
from tests.integration._service import Service
from tfd_notebook.cluster import data_service
from tfd_notebook.data.service.protocols import Registered
from tfd_notebook.net import tf_messages

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def cluster(no_coordinator: None) -> Iterator[tfd.Cluster]:
    """Yield a healthy private cluster with every role."""
    policy = tfd.Policy(restarts=0)
    with tfd.Cluster(data_workers=2, workers=2, ps=1, name="whole", policy=policy) as cluster:
        yield cluster


def codes(target: object) -> set[str]:
    return set(tfd.doctor(target).codes)


def addresses(cluster: tfd.Cluster, *tasks: str) -> list[str]:
    return [cluster.snapshot().task(task).address for task in tasks]  # type: ignore[union-attr]


def test_healthy_cluster_has_no_findings(cluster: tfd.Cluster) -> None:
    # A Keras model of another test in this process may cause TFD851.
    assert codes(cluster) - {"TFD851"} == set()
    assert codes(cluster.resolver) == set()
    spec = tf.train.ClusterSpec({"worker": addresses(cluster, "worker:0", "worker:1")})
    assert codes(spec) == set()
    assert codes(cluster.dispatcher.target) == set()
    for address in addresses(cluster, "ps:0", "data_worker:1"):
        assert codes(address) == set()


def test_tasks_at_wrong_addresses_are_found(cluster: tfd.Cluster) -> None:
    (finding,) = tfd.doctor({"worker": addresses(cluster, "ps:0")})
    assert finding.code == "TFD807"
    assert finding.what.endswith("ps:0 answers there")
    swapped = tfd.doctor({"worker": addresses(cluster, "worker:1", "worker:0")})
    assert [item.code for item in swapped] == ["TFD807", "TFD807"]
    (finding,) = tfd.doctor({"worker": addresses(cluster, "dispatcher:0")})
    assert finding.what.endswith("a dispatcher answers there")


def test_renumbered_tasks_of_a_union_are_healthy() -> None:
    simple = tf.distribute.cluster_resolver.SimpleClusterResolver
    with Server(status("worker:0", "CPU")) as first, Server(status("worker:0", "CPU")) as second:
        specs = [tf.train.ClusterSpec({"worker": [server.address]}) for server in (first, second)]
        union = tfd.resolvers.UnionResolver(*map(simple, specs))
        assert codes(union) == set()
        assert codes(union.cluster_spec()) == {"TFD807"}


#: Imports TensorFlow, which loads Keras, after the clusters, so that they set up no coordinator.
KERAS = """
import sys
import tfd_notebook as tfd
from tfd_notebook.launchers import Fake

with_ps = tfd.Cluster(workers=1, ps=1, launcher=Fake(), name="keras")
without = tfd.Cluster(data_workers=1, launcher=Fake(), name="data")
import tensorflow as tf
import keras

assert keras.__version__.startswith("3.")
assert "TFD851" not in tfd.doctor(with_ps).codes, "no model"
model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
assert "TFD851" not in tfd.doctor(without).codes, "no parameter server"
assert "TFD851" in tfd.doctor(with_ps).codes
"""


def test_keras_3_with_parameter_servers_is_found() -> None:
    assert in_child(KERAS) == set()


def test_edited_modules_are_found_until_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is imported after the start of the cluster, and a restart repairs it."""
    module = tmp_path / "tfd_doctor_module.py"
    module.write_text("def add(a):\n    return a + 1\n")
    os.utime(module, (1, 1))
    monkeypatch.syspath_prepend(str(tmp_path))

    def stale() -> list[str]:
        return [finding.what for finding in tfd.doctor(cluster) if finding.code == "TFD833"]

    with tfd.Cluster(data_workers=2, name="modules") as cluster:
        import tfd_doctor_module

        dataset = tf.data.Dataset.range(3).map(
            lambda a: tf.numpy_function(tfd_doctor_module.add, [a], tf.int64)
        )
        assert sorted(dataset.apply(cluster.distribute("dynamic")).as_numpy_iterator()) == [1, 2, 3]
        assert stale() == []
        module.write_text("def add(a):\n    return a + 10\n")
        (message,) = stale()
        assert "tfd_doctor_module was edited after data_worker:0, data_worker:1" in message
        cluster.restart("data_worker:0")
        (message,) = stale()
        assert "data_worker:0" not in message
        cluster.restart("data_worker:1")
        assert stale() == []


def test_datasets_can_be_registered_meanwhile() -> None:
    with tfd.Cluster(data_workers=1, launcher="inprocess") as cluster:
        registered = data_service.of(cluster).registered

        def add() -> None:
            registered["later"] = Registered(-1, None)

        read: Any = add  # called during the check, like the reference to a dataset
        registered["first"] = Registered(-1, None, read)
        assert codes(cluster.name) == set()
        assert "later" in registered


def test_removed_workers_are_not_findings() -> None:
    with tfd.Cluster(data_workers=2, name="smaller") as cluster:
        cluster.scale(data_workers=1)
        assert codes(cluster) == set()
        cluster.scale(data_workers=2)
        assert codes(cluster) == set()


def test_failed_worker_and_missing_workers_are_found(cluster: tfd.Cluster) -> None:
    cluster.kill("data_worker:1")
    until(lambda: cluster.snapshot().task("data_worker:1").state == "failed")  # type: ignore[union-attr]
    assert {"TFD812", "TFD854"} <= codes(cluster)
    cluster.scale(data_workers=0)
    reported = codes(cluster)
    assert "TFD811" in reported
    assert "TFD854" not in reported
    cluster.scale(data_workers=2)
    assert "TFD811" not in codes(cluster)


@pytest.mark.slow
def test_external_service_is_diagnosed(tasks: Any) -> None:
    with Service(tasks, workers=2) as external:
        until(lambda: codes(external.target) == set())
        external.kill_workers()
        (finding,) = tfd.doctor(external.target)
        assert (finding.code, finding.severity) == ("TFD811", "error")
        external.add_worker()
        until(lambda: codes(external.target) == {"TFD812"})
    assert codes(external.target) == {"TFD809"}


def test_tasks_open_to_all_addresses_are_found() -> None:
    all_addresses = tfd.launchers.Local(allow="0.0.0.0/0")
    with tfd.Cluster(data_workers=1, launcher=all_addresses, name="open") as opened:
        assert "TFD852" in codes(opened)
    private = tfd.launchers.Local(allow="10.0.0.0/8")
    with tfd.Cluster(data_workers=1, launcher=private, name="private") as closed:
        assert "TFD852" not in codes(closed)


def test_dispatcher_of_another_version_is_found() -> None:
    from tfd_notebook.net.probe import probe

    own = tfd.Dispatcher()
    own_version = probe(own.target).version
    own.stop()
    assert own_version is not None

    def dispatcher(version: int) -> Server:
        return Server(
            {
                "/tensorflow.data.DispatcherService/GetVersion": tf_messages.GetVersionResponse(
                    version=version
                ).SerializeToString(),
                "/tensorflow.data.DispatcherService/GetWorkers": b"",
            }
        )

    with dispatcher(own_version + 1) as newer:
        assert codes(newer.address) == {"TFD811", "TFD813"}
    with dispatcher(own_version) as same:
        assert codes(same.address) == {"TFD811"}


@pytest.mark.slow
def test_replaced_tensorflow_is_found(tmp_path: Path) -> None:
    # The metadata of a package manager after an update.
    names = [name for name in ("tensorflow", "tensorflow_cpu") if _has(name)]
    metadata = tmp_path / f"{names[0]}-99.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {names[0].replace('_', '-')}\nVersion: 99.0\n"
    )
    (metadata / "top_level.txt").write_text("tensorflow\n")
    before = "import sys, tensorflow, tfd_notebook as tfd; assert not set(tfd.doctor().codes)"
    update = "sys.path.insert(0, sys.argv[1])"
    assert in_child(f"{before}; {update}; {DOCTOR}", str(tmp_path)) == {"TFD813"}


def _has(name: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


#: Sets TF_CONFIG before and after the first op.
TF_CONFIG = """
import os
import tensorflow as tf
import tfd_notebook as tfd

config = '{"cluster": {"worker": ["localhost:1", "localhost:2"]}}'
os.environ["TF_CONFIG"] = config
assert set(tfd.doctor().codes) == {"TFD809"}
del os.environ["TF_CONFIG"]
tf.constant(1)
os.environ["TF_CONFIG"] = config
"""


def test_tf_config_set_after_the_first_op_is_found() -> None:
    assert in_child(f"{TF_CONFIG}{DOCTOR}") == {"TFD804", "TFD809"}
