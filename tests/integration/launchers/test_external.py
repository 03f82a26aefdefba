"""External clusters: bare TensorFlow servers in separate processes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

import tfd_notebook as tfd
from tests._ports import free_port
from tests._waiting import until
from tests.integration._service import Service
from tfd_notebook import errors
from tfd_notebook.launchers import external

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture
def service(tasks: Any) -> Iterator[Any]:
    with Service(tasks) as service:
        yield service


def test_external_service_is_monitored_and_read(service: Any) -> None:
    import tensorflow as tf

    cluster = tfd.attach(service.target, "external")
    try:
        assert (cluster.name, cluster.state) == ("external", "ready")
        until(lambda: len(cluster.tasks) == 2)
        assert [task.name for task in cluster.tasks] == ["dispatcher:0", "data_worker:0"]
        assert cluster.dispatcher.target.endswith(service.target.rpartition(":")[2])
        numbers = tf.data.Dataset.range(10).apply(cluster.distribute("dynamic"))
        assert sorted(int(x) for x in numbers) == list(range(10))
        stream = cluster.stream(tf.data.Dataset.range(20).apply(cluster.distribute("off"))).start()
        assert stream.wait(elements=20, timeout=60)
        assert tfd.attach(service.target, "external") is cluster
        for change in (
            lambda: cluster.scale(data_workers=2),
            lambda: cluster.restart("data_worker:0"),
            lambda: cluster.kill("data_worker:0"),
            cluster.detach,
        ):
            with pytest.raises(errors.Unsupported, match="'external'"):
                change()
        assert (cluster.state, len(cluster.tasks)) == ("ready", 2)
        python = tf.data.Dataset.range(3).map(lambda x: tf.numpy_function(abs, [x], tf.int64))
        with pytest.raises(errors.Unsupported, match="Python functions"):
            python.apply(cluster.distribute("dynamic"))
        service.kill_workers()
        until(lambda: cluster.snapshot().task("data_worker:0").state == "lost")  # type: ignore[union-attr]
        with pytest.raises(errors.NoWorkers):
            list(tf.data.Dataset.range(10).apply(cluster.distribute("dynamic")))
    finally:
        cluster.stop()
    assert cluster.state == "left"
    # The external servers keep running.
    again = tfd.attach(service.target, "external")
    assert again.snapshot().task("dispatcher:0").state == "ready"  # type: ignore[union-attr]
    again.stop()


def test_attach_without_an_answer_fails_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        with pytest.raises(errors.LaunchError, match=r"dispatcher:0 at localhost:\d+"):
            tfd.attach(f"grpc://localhost:{taken.getsockname()[1]}")
        taken.listen()
    assert not tfd.clusters()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("grpc://localhost", "invalid address"),
        ("grpc://localhost:99999", "invalid address"),
        ({"wroker": ["a:1"]}, "invalid job 'wroker'"),
        ({"worker": []}, "has no tasks"),
        ({"worker": ["a"]}, "invalid address"),
        (42, "invalid target"),
    ],
)
def test_invalid_targets_are_named(target: object, message: str) -> None:
    with pytest.raises(errors.UsageError, match=message):
        tfd.attach(target)  # type: ignore[arg-type]


def test_jobs_are_parsed_in_all_forms() -> None:
    spec = {"worker": {1: "b:2", 0: "a:1"}, "ps": ["c:3"], "chief": ["[::1]:4"]}
    assert external.addresses_of(spec) == {
        "worker:1": "b:2",
        "worker:0": "a:1",
        "ps:0": "c:3",
        "chief:0": "[::1]:4",
    }


def test_the_next_step_follows_the_reason_of_an_external_task() -> None:
    closed = f"localhost:{free_port()}"
    with tfd.Cluster(workers=1, ps=1, data_workers=1, name="servers") as servers:
        other = servers.dispatcher.target.partition("://")[2]
        known = servers.resolver.cluster_spec().as_dict()
        (worker,), (ps,) = known["worker"], known["ps"]
        jobs = {
            "worker": [worker, worker, "unknown.invalid:1", other, closed],
            "ps": [ps],
            "evaluator": [f"localhost:{free_port()}"],
        }
        with tfd.attach(jobs, "external", connect=False) as external_cluster:
            findings = [f for f in tfd.doctor(external_cluster) if f.code == "TFD854"]
            fixes = {finding.what.partition(" ")[0]: finding.fix for finding in findings}
            assert "separate TF_CONFIG" in fixes.pop("evaluator:0")
            assert fixes == {
                "worker:1": "give each task a separate port",
                "worker:2": "start it, or correct its address",
                "worker:3": "correct the address, or the indexes of the tasks",
                "worker:4": "start worker:4 again where it was started",
            }
            states = {task.name: task.state for task in external_cluster.tasks}
            assert states["worker:2"] == "lost"
