"""Servers in this very process: what they can do, what they cannot, and that nobody hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tests.integration._consume import KINDS, Enough, consume
from tfd_notebook.errors import Interrupted, PortInUse, StateError
from tfd_notebook.probe import probe

pytestmark = [
    pytest.mark.integration,
    # Keras warns of every dataset that it does not shuffle, and of its end.
    pytest.mark.filterwarnings("ignore:.shuffle=True.", "ignore:Your input ran out of data"),
]

ENDLESS = 1 << 40


def batches(count: int = 60) -> Any:
    return tf.data.Dataset.range(count).batch(5)


@pytest.fixture
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, launcher="inprocess", name="inside") as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_consumer_gets_everything(cluster: tfd.Cluster, kind: str) -> None:
    dataset = batches().apply(cluster.distribute("dynamic"))
    assert consume(kind, cluster, dataset) == dict.fromkeys(range(60), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_down_the_next_epoch_ends(cluster: tfd.Cluster, kind: str) -> None:
    # A dispatcher never forgets a worker, and TensorFlow's consumers would wait for it for ever.
    dataset = batches().apply(cluster.distribute("dynamic"))
    assert consume(kind, cluster, dataset) == dict.fromkeys(range(60), 1)
    cluster.scale(data_workers=1)
    assert consume(kind, cluster, dataset) == dict.fromkeys(range(60), 1)
    cluster.scale(data_workers=2)
    assert [task.name for task in cluster.tasks][1:] == ["data_worker:0", "data_worker:1"]
    assert consume(kind, cluster, dataset) == dict.fromkeys(range(60), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_while_somebody_reads(cluster: tfd.Cluster, kind: str) -> None:
    dataset = batches(ENDLESS).apply(cluster.distribute("off"))
    stopper = threading.Thread(target=cluster.stop)

    def on_batch(number: int) -> None:
        if number == 10:
            stopper.start()

    with pytest.raises(Interrupted):
        consume(kind, cluster, dataset, on_batch)
    stopper.join(20)
    assert cluster.state == "stopped"


def test_static_sharding_restarts_the_dispatcher(cluster: tfd.Cluster) -> None:
    dataset = batches().apply(cluster.distribute("data"))
    assert consume("for", cluster, dataset) == dict.fromkeys(range(60), 1)
    assert cluster.snapshot().task("dispatcher:0").restarts == 1


def test_what_it_cannot_do_is_said(cluster: tfd.Cluster) -> None:
    with pytest.raises(StateError, match="cannot be killed"):
        cluster.kill("data_worker:0")
    assert "kernel's own output" in cluster.logs("data_worker:0")
    cluster.restart("data_worker:0")
    assert cluster.snapshot().task("data_worker:0").state == "ready"


def test_a_worker_restarts_while_it_is_read_from(cluster: tfd.Cluster) -> None:
    dataset = batches(ENDLESS).apply(cluster.distribute("off"))
    with cluster.stream(dataset).start() as stream:
        stream.wait(elements=5, timeout=30)
        cluster.restart("data_worker:0")
        stream.wait(elements=stream.elements + 20, timeout=60)
    assert cluster.snapshot().task("data_worker:0").state == "ready"


def test_a_port_that_is_taken(cluster: tfd.Cluster) -> None:
    port = int(cluster.dispatcher.target.rpartition(":")[2])
    with pytest.raises(PortInUse, match=str(port)):
        tfd.Cluster(launcher="inprocess", name="other", service=tfd.Service(port=port))
    assert probe(cluster.dispatcher.target).alive


def test_nothing_counts_as_sent_that_is_taken_in_memory(cluster: tfd.Cluster) -> None:
    dataset = tf.data.Dataset.range(ENDLESS).batch(10_000).apply(cluster.distribute("off"))
    began = time.monotonic()

    def on_batch(number: int) -> None:
        if time.monotonic() > began + 2.5:
            raise Enough

    consume("for", cluster, dataset, on_batch)
    rows = [row for row in cluster.snapshot().tasks if row.role == "data_worker"]
    assert [row.bytes_sent for row in rows] == [None, None]
    until(lambda: cluster.snapshot().streams)
