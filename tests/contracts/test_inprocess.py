"""A cluster whose tasks are servers inside the kernel."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tests.contracts._gate import WAIT
from tfd_notebook import errors
from tfd_notebook.net.probe import probe

pytestmark = pytest.mark.integration

Range = tf.data.Dataset.range


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, launcher="inprocess", name="inside") as cluster:
        yield cluster


def test_servers_of_the_kernel_answer(cluster: tfd.Cluster) -> None:
    assert [task.name for task in cluster.tasks] == [
        "dispatcher:0",
        "data_worker:0",
        "data_worker:1",
    ]
    for task in cluster.tasks:
        assert task.state == "ready"
        assert probe(task.address, timeout=WAIT).kind == task.role
        row = cluster.snapshot().task(task.name)
        assert row
        assert row.open_to == "loopback"


@pytest.mark.parametrize(("mode", "times"), [("dynamic", 1), ("off", 2)])
def test_epoch_has_each_element_as_often_as_promised(
    cluster: tfd.Cluster, mode: str, times: int
) -> None:
    read = Range(30).batch(5).apply(cluster.distribute(mode))
    numbers = [int(number) for batch in read for number in batch]
    assert sorted(numbers) == sorted([*range(30)] * times)


def test_stream_reads_to_the_end(cluster: tfd.Cluster) -> None:
    with cluster.stream(Range(30).apply(cluster.distribute("dynamic"))) as stream:
        assert stream.wait(elements=10, timeout=WAIT)
        assert stream.wait(timeout=WAIT)
        assert (stream.state, stream.elements) == ("finished", 30)


def test_python_function_needs_no_transfer(cluster: tfd.Cluster) -> None:
    lock, pids = threading.Lock(), set()

    def locked(value: int) -> np.int64:
        with lock:
            pids.add(os.getpid())
        return np.int64(value + 1)

    read = Range(5).map(lambda x: tf.numpy_function(locked, [x], tf.int64))
    read = read.apply(cluster.distribute("dynamic"))
    assert sorted(read.as_numpy_iterator()) == [1, 2, 3, 4, 5]
    assert pids == {os.getpid()}


def test_failing_python_function_raises_its_message(cluster: tfd.Cluster) -> None:
    def fail(value: int) -> int:
        raise ValueError(f"label {value} is invalid")

    read = Range(7, 8).map(lambda x: tf.numpy_function(fail, [x], tf.int64))
    with pytest.raises(errors.PipelineError, match="label 7 is invalid"):
        list(read.apply(cluster.distribute("dynamic")))


def test_cluster_of_the_kernel_cannot_outlive_it(cluster: tfd.Cluster) -> None:
    with pytest.raises(errors.Unsupported, match="cannot outlive"):
        cluster.detach()
    with pytest.raises(errors.StateError, match="cannot be killed"):
        cluster.kill("data_worker:0")
    assert cluster.state == "ready"


def test_second_cluster_works_after_a_stop() -> None:
    for _ in range(2):
        with tfd.Cluster(data_workers=1, launcher="inprocess", name="again") as cluster:
            read = Range(10).apply(cluster.distribute("dynamic"))
            assert sorted(read.as_numpy_iterator()) == list(range(10))
            addresses = [task.address for task in cluster.tasks]
        assert cluster.state == "stopped"
        for address in addresses:
            until(lambda address=address: probe(address, timeout=WAIT).state == "refused", WAIT)
