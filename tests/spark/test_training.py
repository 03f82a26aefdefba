"""TensorFlow's strategies on nodes of Spark, each trained for real."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfd_notebook as tfd
from tfd_notebook import errors
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.TFCluster import InputMode

pytestmark = pytest.mark.integration

LONG = 120.0


@pytest.fixture(scope="module", autouse=True)
def _ports_stay(leftovers: Any) -> None:
    """TensorFlow keeps a port of this process for each strategy that connected it."""
    leftovers.own_ports = False


def test_multi_worker_mirrored_strategy_learns(sc: Any, tmp_path: Path, ended: list[Any]) -> None:
    """Both workers find y = 3x + 1, and the same weights, each from data of its own."""

    def function(args: Any, ctx: Any) -> None:
        import json

        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        assert strategy.num_replicas_in_sync == 2
        with strategy.scope():
            slope = tf.Variable(0.0)
            offset = tf.Variable(0.0)
        generator = tf.random.Generator.from_seed(ctx.task_index)

        @tf.function
        def step(x: Any) -> None:
            def replica(x: Any) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((slope * x + offset - (3 * x + 1)) ** 2)
                gradients = tape.gradient(loss, [slope, offset])
                for variable, gradient in zip((slope, offset), gradients, strict=True):
                    total = tf.distribute.get_replica_context().all_reduce("mean", gradient)
                    variable.assign_sub(0.3 * total)

            strategy.run(replica, (x,))

        for _ in range(200):
            step(generator.uniform([32], -1.0, 1.0))
        found = [float(slope.numpy()), float(offset.numpy())]
        (tmp_path / str(ctx.task_index)).write_text(json.dumps(found))

    cluster = TFCluster.run(sc, function, None, 2, 0)
    ended.append(cluster)
    cluster.shutdown(timeout=LONG)
    first, second = (json.loads((tmp_path / str(index)).read_text()) for index in range(2))
    assert first == second
    assert first == pytest.approx([3, 1], abs=0.01)


def test_keras_takes_frames_of_pandas(sc: Any, tmp_path: Path, ended: list[Any]) -> None:
    """Keras was imported where nodes are forked from, and pandas, which starts threads, was not."""

    def function(args: Any, ctx: Any) -> None:
        import sys

        if "pandas" in sys.modules:
            raise AssertionError("imported before it was asked for")
        import keras
        import pandas as pd

        seen = pd.DataFrame({"a": [0.0, 0.5, 1.0, 0.25], "b": [1.0, 0.0, 0.5, 0.75]})
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        for wanted in (seen["a"], seen[["a"]]):
            told = model.fit(seen, wanted, validation_split=0.25, verbose=0).history
        Path(args).write_text(f"{sorted(told)} {model.predict(seen, verbose=0).shape}")

    cluster = TFCluster.run(sc, function, str(tmp_path / "told"), 1, 0)
    ended.append(cluster)
    cluster.shutdown(timeout=LONG)
    assert (tmp_path / "told").read_text() == "['loss', 'val_loss'] (4, 1)"


def test_mirrored_workers_are_fed_until_they_have_enough(
    sc: Any, tmp_path: Path, ended: list[Any]
) -> None:
    """Each takes as many steps; who has enough ends its feed, however much is still to come."""

    def function(args: Any, ctx: Any) -> None:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            total = tf.Variable(0.0)

        @tf.function
        def step(amount: Any) -> None:
            def replica(amount: Any) -> None:
                context = tf.distribute.get_replica_context()
                # An argument has no device, and all_reduce wants to know one.
                total.assign_add(context.all_reduce("sum", tf.identity(amount)))

            strategy.run(replica, (amount,))

        feed = ctx.get_data_feed()
        for _ in range(args):
            step(tf.constant(float(sum(feed.next_batch(8)))))
        feed.terminate()
        (tmp_path / str(ctx.task_index)).write_text(str(total.numpy()))

    def endless(index: int, _: Any) -> Any:
        import itertools

        return itertools.repeat(1, 100_000 if index else 1_000_000)

    cluster = TFCluster.run(sc, function, 20, 2, 0, input_mode=InputMode.SPARK)
    ended.append(cluster)
    cluster.train(sc.parallelize(range(4), 4).mapPartitionsWithIndex(endless), 1)
    cluster.shutdown(timeout=LONG)
    assert [(tmp_path / str(n)).read_text() for n in range(2)] == [str(20.0 * 8 * 2)] * 2


def test_uneven_partitions_do_not_hold_up_mirrored_workers(
    sc: Any, tmp_path: Path, ended: list[Any]
) -> None:
    """A worker without rows takes part in each step of the others, until all have ended."""

    def function(args: Any, ctx: Any) -> None:
        import json

        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            total = tf.Variable(0.0)

        @tf.function(reduce_retracing=True)
        def step(rows: Any) -> None:
            def replica(rows: Any) -> None:
                context = tf.distribute.get_replica_context()
                total.assign_add(context.all_reduce("sum", tf.reduce_sum(rows)))

            strategy.run(replica, (rows,))

        steps = counted = mine = 0
        feed = ctx.get_data_feed()
        for rows, count in feed.together(strategy, 8, tf.TensorSpec([], tf.float32)):
            step(rows)
            steps, counted, mine = steps + 1, counted + count, mine + len(rows)
        found = {"total": float(total.numpy()), "steps": steps, "rows": counted, "mine": mine}
        (tmp_path / str(ctx.task_index)).write_text(json.dumps(found))

    def uneven(index: int, _: Any) -> Any:
        return iter([1.0] * (1000, 3, 0)[index])

    cluster = TFCluster.run(sc, function, None, 2, 0, input_mode=InputMode.SPARK)
    ended.append(cluster)
    cluster.train(sc.parallelize(range(3), 3).mapPartitionsWithIndex(uneven), 1)
    cluster.shutdown(timeout=LONG)
    one, two = (json.loads((tmp_path / str(index)).read_text()) for index in range(2))
    assert one["total"] == two["total"] == one["rows"] == two["rows"] == 1003
    assert one["steps"] == two["steps"] > 100
    assert one["mine"] + two["mine"] == 1003
    assert one["mine"] != two["mine"]


@pytest.mark.parametrize("beside", [False, True])
def test_parameter_server_strategy_with_the_coordinator_here(
    sc: Any, ended: list[Any], beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    from tfd_notebook._compat.tf_coordinator import thread_parking

    nodes = 3 if beside else 2
    cluster = TFCluster.run(sc, TFCluster.serve, None, nodes, 1, driver_ps_nodes=beside)
    ended.append(cluster)
    assert cluster.snapshot().spark.nodes[0].node == "ps:0"
    assert (cluster.nodes[0].executor == "driver") is beside
    resolver = tfd.resolvers.SparkResolver(cluster)
    assert {job: len(at) for job, at in resolver.cluster_spec().as_dict().items()} == {
        "ps": 1,
        "worker": nodes - 1,
    }
    assert tfd.resolve().rule == "spark"
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(0.0)
    assert "/job:ps" in weight.device

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = (weight - 5.0) ** 2
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    for _ in range(60):
        coordinator.schedule(step)
    coordinator.join(LONG)
    assert float(weight.numpy()) == pytest.approx(5.0, abs=0.05)
    assert coordinator.values.counts()
    begun, goes_on = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        begun.set()
        assert goes_on.wait(60)
        yield 1

    numbers = tf.data.Dataset.from_generator(slow, output_signature=tf.TensorSpec((), tf.int64))
    reader = threading.Thread(target=lambda: list(numbers))
    reader.start()
    assert begun.wait(60)
    monkeypatch.setattr(thread_parking, "SECONDS", 1.0)
    with pytest.raises(errors.StateError, match="reads a dataset"):
        cluster.strategy()
    goes_on.set()
    reader.join(60)
    assert cluster.coordinator() is coordinator  # nothing was changed before
    cluster.shutdown(timeout=LONG)
    assert cluster.phase == "stopped"
    assert sc.parallelize(range(4), 2).sum() == 6


def test_a_strategy_needs_servers(sc: Any, ended: list[Any]) -> None:
    cluster = TFCluster.run(sc, TFCluster.serve, None, 1, 0)
    ended.append(cluster)
    with pytest.raises(errors.StateError, match="no ps"):
        cluster.strategy()
    cluster.shutdown(timeout=LONG)
