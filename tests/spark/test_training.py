"""Training with TensorFlow's strategies on nodes of Spark."""

from __future__ import annotations

import json
import re
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
def _allow_ports(leftovers: Any) -> None:
    """Allow the port that TensorFlow keeps in this process for each connected strategy."""
    leftovers.own_ports = False


def test_multi_worker_mirrored_strategy_trains(
    sc: Any, tmp_path: Path, clusters: list[Any]
) -> None:
    """Both workers find y = 3x + 1 and equal weights, each from separate data."""

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
        values = [float(slope.numpy()), float(offset.numpy())]
        (tmp_path / str(ctx.task_index)).write_text(json.dumps(values))

    cluster = TFCluster.run(sc, function, None, 2, 0)
    clusters.append(cluster)
    cluster.shutdown(timeout=LONG)
    first, second = (json.loads((tmp_path / str(index)).read_text()) for index in range(2))
    assert first == second
    assert first == pytest.approx([3, 1], abs=0.01)


def test_keras_accepts_pandas_frames(sc: Any, tmp_path: Path, clusters: list[Any]) -> None:
    """The fork server imports Keras, but not pandas, which starts threads."""

    def function(args: Any, ctx: Any) -> None:
        import sys

        if "pandas" in sys.modules:
            raise AssertionError("pandas was imported by the fork server")
        import keras
        import pandas as pd

        features = pd.DataFrame({"a": [0.0, 0.5, 1.0, 0.25], "b": [1.0, 0.0, 0.5, 0.75]})
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        for target in (features["a"], features[["a"]]):
            history = model.fit(features, target, validation_split=0.25, verbose=0).history
        Path(args).write_text(f"{sorted(history)} {model.predict(features, verbose=0).shape}")

    cluster = TFCluster.run(sc, function, str(tmp_path / "history"), 1, 0)
    clusters.append(cluster)
    cluster.shutdown(timeout=LONG)
    assert (tmp_path / "history").read_text() == "['loss', 'val_loss'] (4, 1)"


def test_mirrored_workers_terminate_their_feed(
    sc: Any, tmp_path: Path, clusters: list[Any]
) -> None:
    """Each worker takes the same number of steps and then ends its feed before the last row."""

    def function(args: Any, ctx: Any) -> None:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            total = tf.Variable(0.0)

        @tf.function
        def step(amount: Any) -> None:
            def replica(amount: Any) -> None:
                context = tf.distribute.get_replica_context()
                # A function argument has no device, but all_reduce requires one.
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
    clusters.append(cluster)
    cluster.train(sc.parallelize(range(4), 4).mapPartitionsWithIndex(endless), 1)
    cluster.shutdown(timeout=LONG)
    assert [(tmp_path / str(n)).read_text() for n in range(2)] == [str(20.0 * 8 * 2)] * 2


def test_uneven_partitions_do_not_block_mirrored_workers(
    sc: Any, tmp_path: Path, clusters: list[Any]
) -> None:
    """A worker without rows takes part in the steps of the others until all have ended."""

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

        steps = counted = local_rows = 0
        feed = ctx.get_data_feed()
        for rows, count in feed.together(strategy, 8, tf.TensorSpec([], tf.float32)):
            step(rows)
            steps, counted, local_rows = steps + 1, counted + count, local_rows + len(rows)
        report = {
            "total": float(total.numpy()),
            "steps": steps,
            "rows": counted,
            "local_rows": local_rows,
        }
        (tmp_path / str(ctx.task_index)).write_text(json.dumps(report))

    def uneven(index: int, _: Any) -> Any:
        return iter([1.0] * (1000, 3, 0)[index])

    cluster = TFCluster.run(sc, function, None, 2, 0, input_mode=InputMode.SPARK)
    clusters.append(cluster)
    cluster.train(sc.parallelize(range(3), 3).mapPartitionsWithIndex(uneven), 1)
    cluster.shutdown(timeout=LONG)
    first, second = (json.loads((tmp_path / str(index)).read_text()) for index in range(2))
    assert first["total"] == second["total"] == first["rows"] == second["rows"] == 1003
    assert first["steps"] == second["steps"] > 100
    assert first["local_rows"] + second["local_rows"] == 1003
    assert first["local_rows"] != second["local_rows"]


@pytest.mark.parametrize("kind", ["rdd", "frame"])
def test_a_value_that_does_not_fit_is_named_by_together(
    spark: Any, sc: Any, clusters: list[Any], kind: str
) -> None:
    def function(args: Any, ctx: Any) -> None:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        signature: Any = tf.TensorSpec([], tf.int64)
        if args == "frame":
            signature = {"x": signature}
        feed = ctx.get_data_feed()
        for _ in feed.together(strategy, 8, signature):
            pass

    cluster = TFCluster.run(sc, function, kind, 1, 0, input_mode=InputMode.SPARK)
    clusters.append(cluster)
    rows = sc.parallelize([1.0, 2.0, 3.0, 2.5], 1)
    fed = rows if kind == "rdd" else spark.createDataFrame(rows.map(lambda x: (x,)), "x double")
    place = "row 3" if kind == "rdd" else "row 3, column x"
    message = re.escape(f"{place}: 2.5 (float64) does not fit int64, the type in output_signature")
    with pytest.raises(errors.NodeFailed, match=message):
        cluster.train(fed, 1)


@pytest.mark.parametrize("explicit", [False, True])
def test_a_value_of_a_fed_frame_that_does_not_fit_is_named(
    spark: Any, sc: Any, clusters: list[Any], explicit: bool
) -> None:
    def function(args: Any, ctx: Any) -> None:
        import tensorflow as tf

        signature = {"n": tf.TensorSpec([], tf.int8)} if args else None
        for _ in ctx.get_data_feed().as_dataset(2, signature):
            pass

    cluster = TFCluster.run(sc, function, explicit, 1, 0, input_mode=InputMode.SPARK)
    clusters.append(cluster)
    rows = [(1,), (2,), (3,), (300 if explicit else None,)]
    frame = spark.createDataFrame(rows, "n long").coalesce(1)
    message = (
        "row 3, column n: 300 (int64) does not fit int8, the type in output_signature"
        if explicit
        else "row 3, column n: None (NoneType) does not fit int64, the type of the first rows"
    )
    setting = "spark.sql.execution.arrow.maxRecordsPerBatch"
    previous = spark.conf.get(setting)
    spark.conf.set(setting, "2")  # rows of a chunk
    try:
        with pytest.raises(errors.NodeFailed, match=re.escape(message)):
            cluster.train(frame, 1)
    finally:
        spark.conf.set(setting, previous)


@pytest.mark.parametrize("on_driver", [False, True])
def test_parameter_server_strategy_with_a_local_coordinator(
    sc: Any, clusters: list[Any], on_driver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    from tfd_notebook._compat.tf_coordinator import thread_parking

    nodes = 3 if on_driver else 2
    cluster = TFCluster.run(sc, TFCluster.serve, None, nodes, 1, driver_ps_nodes=on_driver)
    clusters.append(cluster)
    assert cluster.snapshot().spark.nodes[0].node == "ps:0"
    assert (cluster.nodes[0].executor == "driver") is on_driver
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
    started, resume = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        started.set()
        assert resume.wait(60)
        yield 1

    numbers = tf.data.Dataset.from_generator(slow, output_signature=tf.TensorSpec((), tf.int64))
    reader = threading.Thread(target=lambda: list(numbers))
    reader.start()
    assert started.wait(60)
    monkeypatch.setattr(thread_parking, "SECONDS", 1.0)
    with pytest.raises(errors.StateError, match="reads a dataset"):
        cluster.strategy()
    resume.set()
    reader.join(60)
    assert cluster.coordinator() is coordinator  # the failed call changed nothing
    cluster.shutdown(timeout=LONG)
    assert cluster.phase == "stopped"
    assert sc.parallelize(range(4), 2).sum() == 6


def test_a_strategy_requires_parameter_servers(sc: Any, clusters: list[Any]) -> None:
    cluster = TFCluster.run(sc, TFCluster.serve, None, 1, 0)
    clusters.append(cluster)
    with pytest.raises(errors.StateError, match="no ps"):
        cluster.strategy()
    cluster.shutdown(timeout=LONG)
