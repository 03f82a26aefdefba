"""Rows that Spark feeds come out of a tf.data service."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tfd_notebook.errors import FeedTimeout
from tfd_notebook.spark.feed import ServiceFeed

pytestmark = pytest.mark.integration


def test_rows_go_by_data_workers_to_a_consumer(sc: Any) -> None:
    rows = sc.parallelize([[float(n), 2.0 * n] for n in range(5000)], 6)
    feed = ServiceFeed(64, tf.TensorSpec([2], tf.float32))
    failed: list[BaseException] = []

    def train() -> None:
        try:
            feed.train(rows, num_epochs=2, feed_timeout=120)
        except BaseException as error:
            failed.append(error)
        feed.end(sc)

    with tfd.Cluster(data_workers=2) as cluster:
        dataset = feed.dataset().apply(cluster.distribute("off"))
        thread = threading.Thread(target=train)
        thread.start()
        found = np.concatenate(list(dataset.as_numpy_iterator()))
        thread.join(120)
    assert not failed
    assert sorted(found[:, 0].tolist()) == sorted([float(n) for n in range(5000)] * 2)
    np.testing.assert_array_equal(found[:, 1], 2 * found[:, 0])


def test_a_dataset_that_nobody_reads(sc: Any) -> None:
    feed = ServiceFeed(64, tf.TensorSpec([], tf.int64))
    with pytest.raises(FeedTimeout, match="no data worker on "):
        feed.train(sc.parallelize(range(10), 1), feed_timeout=1)
