"""Rows that Spark feeds to a tf.data service."""

from __future__ import annotations

import copy
import gc
import pickle
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook.errors import FeedTimeout, UsageError
from tfd_notebook.spark import TFCluster

pytestmark = pytest.mark.integration

#: Timeout in seconds of steps that take 1 s on an idle machine.
LONG = 120.0
NUMBER = tf.TensorSpec([], tf.int64)


@pytest.fixture(scope="module")
def local() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=1, name="local") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(spark: Any, local: tfd.Cluster) -> Iterator[tfd.Cluster]:
    """Yield a cluster with one data worker for each of Spark's executors."""
    launcher = tfd.launchers.Spark(spark)
    with tfd.Cluster(data_workers=2, name="fed", launcher=launcher) as cluster:
        yield cluster
    assert not list(Path(tempfile.gettempdir()).glob("tfd-feed-*"))


def read(cluster: tfd.Cluster, feed: Any) -> list[int]:
    dataset = feed.dataset().apply(cluster.distribute("off"))
    return [int(n) for batch in dataset.as_numpy_iterator() for n in batch]


def test_rows_reach_a_consumer_through_data_workers(sc: Any, cluster: Any) -> None:
    rows = sc.parallelize([[float(n), 2.0 * n] for n in range(5000)], 6)
    with (
        tfd.spark.ServiceFeed(sc, 64, tf.TensorSpec([2], tf.float32)) as feed,
        ThreadPoolExecutor(1) as pool,
    ):
        dataset = feed.dataset().apply(cluster.distribute("off"))
        reader = pool.submit(lambda: np.concatenate(list(dataset.as_numpy_iterator())))
        feed.train(rows, num_epochs=2, feed_timeout=LONG)
        feed.end()
        rows_read = reader.result(LONG)
    assert sorted(rows_read[:, 0].tolist()) == sorted([float(n) for n in range(5000)] * 2)
    np.testing.assert_array_equal(rows_read[:, 1], 2 * rows_read[:, 0])


def test_copies_of_a_feed_and_a_cluster_are_the_same_object(sc: Any, clusters: list[Any]) -> None:
    def wait(args: Any, ctx: Any) -> None:
        threading.Event().wait()

    clusters.append(TFCluster.run(sc, wait, None, 1, 0))
    assert repr(clusters[0]).endswith(", 1 node>")
    with tfd.spark.ServiceFeed(sc, 64, tf.TensorSpec([2], tf.float32)) as feed:
        for each in (clusters[0], feed):
            assert copy.copy(each) is copy.deepcopy({"each": each})["each"] is each
            assert {each: 1}[each] == 1
            assert each != clusters
            assert "secret" not in repr(each).lower()
            with pytest.raises(UsageError, match=f"this {type(each).__name__} cannot be sent"):
                pickle.dumps(each)
            with pytest.raises(UsageError, match=f"this {type(each).__name__} cannot be sent"):
                cloudpickle.dumps(lambda each=each: each)
    unused = weakref.ref(feed)
    del feed, each
    until(lambda: gc.collect() >= 0 and unused() is None)


def test_a_dataframe_is_fed_to_a_local_cluster(
    spark: Any, sc: Any, cluster: Any, local: Any
) -> None:
    frame = spark.range(0, 100, 1, 3).selectExpr("id", "id / 2 as half")
    signature = {"id": NUMBER, "half": tf.TensorSpec([], tf.float32)}
    with tfd.spark.ServiceFeed(spark, 8, signature) as feed:
        dataset = feed.dataset().apply(local.distribute("off"))
        fed = feed.train(frame, feed_timeout=LONG, wait=False)
        fed.add_done_callback(lambda _: feed.end())
        rows_read = list(dataset.unbatch().as_numpy_iterator())
        fed.result(LONG)
    assert {row["id"]: row["half"] for row in rows_read} == {n: n / 2 for n in range(100)}


def test_concurrent_iterations_share_the_rows(sc: Any, cluster: Any) -> None:
    with tfd.spark.ServiceFeed(sc, 8, NUMBER) as feed, ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read, cluster, feed) for _ in range(2)]
        feed.train(sc.parallelize(range(1000), 20), feed_timeout=LONG)
        feed.end()
        numbers = [n for reader in readers for n in reader.result(LONG)]
    assert sorted(numbers) == list(range(1000))


def test_reading_after_the_end_of_the_feed_gives_no_rows(sc: Any, cluster: Any) -> None:
    with tfd.spark.ServiceFeed(sc, 8, NUMBER) as feed:
        feed.end()
        assert read(cluster, feed) == []


def test_reading_a_closed_feed_fails(sc: Any, cluster: Any) -> None:
    feed = tfd.spark.ServiceFeed(sc, 8, NUMBER)
    feed.close()
    with pytest.raises(Exception, match="keep the ServiceFeed open"):
        read(cluster, feed)


def test_feeding_without_a_consumer_times_out(sc: Any) -> None:
    with (
        tfd.spark.ServiceFeed(sc, 64, NUMBER) as feed,
        pytest.raises(FeedTimeout, match="no data worker on "),
    ):
        feed.train(sc.parallelize(range(10), 1), feed_timeout=1)
