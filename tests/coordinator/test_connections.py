"""State of a process after a connection, and clusters with several parameter servers."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook.coordinator.coordinator import Coordinator
from tfd_notebook.errors import StateError, UsageError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    # When TensorFlow's executors are collected, they log the expected errors.
    pytest.mark.filterwarnings("ignore:Exception ignored in. .*Executor.__del__"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(workers=2, ps=2, name="two-servers") as cluster:
        yield cluster


def build(coordinator: Coordinator) -> tf.train.Checkpoint:
    """Create a variable on each of two parameter servers."""
    with coordinator.strategy.scope():
        return tf.train.Checkpoint(one=tf.Variable(0.0), other=tf.Variable(0.0))


def stepping(checkpoint: tf.train.Checkpoint) -> Any:
    @tf.function
    def step() -> Any:
        checkpoint.one.assign_add(1.0)
        return checkpoint.other.assign_add(1.0, read_value=True)

    return step


def ps_bytes(cluster: tfd.Cluster) -> dict[str, int]:
    row = cluster.snapshot().coordinator
    return {} if row is None else dict(row.ps_bytes)


def test_coordinator_of_a_stopped_cluster_is_collected() -> None:
    with tfd.Cluster(workers=1, ps=1, name="collected") as cluster:
        coordinator = cluster.coordinator()
        assert coordinator.schedule(tf.function(lambda: tf.constant(7))).fetch() == 7
    references = [weakref.ref(each) for each in (cluster, coordinator, coordinator.strategy)]
    del cluster, coordinator
    until(lambda: gc.collect() >= 0 and not any(each() for each in references))


def test_variables_are_partitioned_by_the_users_partitioner(cluster: tfd.Cluster) -> None:
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    coordinator = cluster.coordinator(cluster.strategy(variable_partitioner=partitioner))
    with coordinator.strategy.scope():
        table = tf.Variable(tf.ones((1_000, 10)))
    assert [tuple(part.shape) for part in table.variables] == [(500, 10)] * 2
    until(lambda: ps_bytes(cluster) == {"ps:0": 20_000, "ps:1": 20_000})
    total = tf.function(lambda: tf.reduce_sum(tf.nn.embedding_lookup(table, tf.range(1_000))))
    assert coordinator.schedule(total).fetch() == 10_000.0


def waiting_for(path: Any) -> Any:
    result = tf.constant(0)
    while result == 0:
        result = tf.size(tf.io.matching_files(path))
    return result


def test_tensorflows_coordinator_of_a_strategy_is_adopted(
    cluster: tfd.Cluster, tmp_path: Path
) -> None:
    strategy = tf.distribute.ParameterServerStrategy(cluster.resolver)
    cluster_coordinator: Any = tf.distribute.coordinator.ClusterCoordinator(strategy)
    numbers = cluster_coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(100))
    iterator = iter(numbers)
    following = tf.function(lambda it: next(it))
    assert (
        int(cluster_coordinator.fetch(cluster_coordinator.schedule(following, args=(iterator,))))
        == 0
    )
    go_on = tf.constant(str(tmp_path / "go"))
    cluster_coordinator.schedule(tf.function(waiting_for), args=(go_on,))
    with pytest.raises(StateError, match="have not ended"):
        tfd.Coordinator(strategy)
    (tmp_path / "go").touch()
    cluster_coordinator.join()
    adopted = cluster.coordinator(strategy)
    assert adopted is cluster_coordinator
    assert isinstance(adopted, tfd.Coordinator)
    assert adopted is tf.distribute.coordinator.ClusterCoordinator(strategy)
    assert cluster.current_coordinator() is adopted
    later = [adopted.schedule(following, args=(iterator,)) for _ in range(4)]
    adopted.join(timeout=60)
    assert all(0 <= int(value.fetch()) < 5 for value in later)
    assert adopted.values.counts()["ready"] == 4
    adopted.pause()
    waiting = adopted.schedule(following, args=(iterator,))
    assert not adopted.done()
    assert adopted.step() == 1
    assert int(waiting.fetch()) >= 0
    adopted.resume()


def test_unsupported_strategy_is_refused() -> None:
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with pytest.raises(ValueError, match="OneDeviceStrategy") as caught:
        tfd.Coordinator(strategy)
    assert isinstance(caught.value, UsageError)


def test_all_arguments_can_be_passed_by_name(cluster: tfd.Cluster) -> None:
    coordinator = cluster.coordinator()

    @tf.function
    def scaled(x: Any, factor: Any = 2, power: Any = 1, *, plus: Any = 0) -> Any:
        return x**power * factor + plus

    three = tf.constant(3)
    for args, kwargs, expected in (
        (None, {"x": three, "power": 2}, 18),
        (None, {"x": three, "plus": 1}, 7),
        ((three,), {"plus": tf.constant(1)}, 7),
        ((three, 5), {}, 15),
    ):
        assert coordinator.schedule(scaled, args=args, kwargs=kwargs).fetch() == expected


def test_stored_resolver_reports_later_tasks(cluster: tfd.Cluster) -> None:
    resolver = cluster.resolver
    before = resolver.cluster_spec().as_dict()["worker"]
    assert resolver.num_accelerators("worker", 0) == {}
    cluster.scale(workers=3)
    assert resolver.cluster_spec().num_tasks("worker") == 3
    third = resolver.cluster_spec().task_address("worker", 2)
    assert third == cluster.snapshot().task("worker:2").address
    assert resolver.master("worker", 2).endswith(third)
    cluster.scale(workers=2)
    assert resolver.cluster_spec().as_dict()["worker"] == before


def test_loss_of_one_of_two_parameter_servers(cluster: tfd.Cluster, tmp_path: Path) -> None:
    coordinator = cluster.coordinator(cluster.strategy())
    checkpoint = build(coordinator)
    until(lambda: ps_bytes(cluster) == {"ps:0": 4, "ps:1": 4})
    step = stepping(checkpoint)
    for _ in range(5):
        coordinator.schedule(step)
    coordinator.join()
    path = checkpoint.save(str(tmp_path / "ck"))
    pids = {task.name: task.pid for task in cluster.tasks}
    os.kill(pids["ps:1"] or 0, signal.SIGKILL)

    def train() -> None:
        for _ in range(1_000):
            coordinator.schedule(step)
        coordinator.join(timeout=60)

    with pytest.raises((tf.errors.UnavailableError, tf.errors.AbortedError)):
        train()
    answer = until(
        lambda: [n for n in cluster.snapshot().notices if n.task == "ps:1" and "killed" in n.what]
    )
    assert answer
    restored: list[tf.train.Checkpoint] = []

    def again(coordinator: Coordinator) -> tf.train.Checkpoint:
        restored.append(build(coordinator))
        return restored[-1]

    fresh = cluster.recover(path, again)
    (back,) = restored
    assert (back.one.numpy(), back.other.numpy()) == (5.0, 5.0)
    assert fresh.schedule(stepping(back)).fetch() == 6.0
    until(lambda: ps_bytes(cluster) == {"ps:0": 4, "ps:1": 4})


@pytest.mark.parametrize(("on_time_limit", "limit"), [("continue", 20), ("checkpoint", 625)])
def test_training_ends_before_its_clusters_time_limit(
    tmp_path: Path, on_time_limit: str, limit: int
) -> None:
    """With "checkpoint", it ends at the notice, ten minutes before the limit."""
    policy = tfd.Policy(time_limit=limit)
    with tfd.Cluster(workers=1, ps=1, name="limited", policy=policy) as cluster:

        def work(coordinator: Coordinator) -> tfd.Work:
            checkpoint = build(coordinator)
            step = stepping(checkpoint)

            @tf.function
            def slow_step() -> Any:
                for _ in tf.data.Dataset.range(1).apply(testing.sleep(20_000)):
                    pass
                return step()

            return tfd.Work(slow_step, checkpoint)

        result = tfd.training_loop(
            cluster, work, 10**9, str(tmp_path / "ck"), every=50, on_time_limit=on_time_limit
        )
        assert not result.finished
        assert result.steps >= 50
        assert result.steps % 50 == 0
        assert result.checkpoint.endswith(f"-{result.steps}")
        assert result.work is not None
        saved = tf.train.load_checkpoint(result.checkpoint)
        names = [name for name, _ in tf.train.list_variables(result.checkpoint) if "one" in name]
        assert saved.get_tensor(names[0]) == result.steps


#: Module of a worker with a function that takes the GIL and never releases it.
HOLDING = """
import ctypes, os, threading, time

def hold():
    while not os.path.exists(f"{directory}/hold-{{os.getpid()}}"):
        time.sleep(0.01)
    ctypes.PyDLL(None).sleep(1_000_000)

threading.Thread(target=hold, daemon=True).start()
"""


def test_worker_that_never_releases_the_gil_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tfd_test_holding.py").write_text(HOLDING.format(directory=tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = tfd.Policy(on_hang="restart", hang_seconds=2)
    with tfd.Cluster(
        workers=2, ps=1, name="locked", policy=policy, preload=["tfd_test_holding"]
    ) as cluster:
        coordinator = cluster.coordinator()

        @tf.function
        def wait(pattern: Any) -> Any:
            result = tf.constant(0)
            while result == 0:
                result = tf.size(tf.io.matching_files(pattern))
            return result

        pid = cluster.snapshot().task("worker:0").pid
        coordinator.pause_worker(1)
        value = coordinator.schedule(wait, args=(tf.constant(str(tmp_path / "go")),))
        until(lambda: coordinator.values.counts()["running"] == 1)
        coordinator.resume_worker(1)
        (tmp_path / f"hold-{pid}").touch()
        # Its server continues with the closure, and answers probes.
        until(lambda: coordinator.values.records(1)[0]["attempts"] == 2)
        (tmp_path / "go").touch()
        assert value.fetch() == 1
        assert coordinator.values.records(1)[0]["worker"] == 1
        until(lambda: cluster.snapshot().task("worker:0").pid not in (pid, None))
        until(lambda: cluster.snapshot().task("worker:0").state == "ready")
        assert any("holds the GIL" in str(event) for event in cluster.snapshot().events)
