"""Feeding a cluster by `train` and `inference`."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.TFCluster import InputMode

pytestmark = pytest.mark.integration

#: Timeout in seconds of steps that take 1 s on an idle machine.
LONG = 60.0
Start = Callable[..., Any]


@pytest.fixture
def start(sc: Any) -> Iterator[Start]:
    """Return a function that starts a fed cluster. The cluster is ended after the test."""
    clusters = []

    def start(function: Any, args: Any = None, nodes: int = 2, **options: Any) -> Any:
        options.setdefault("input_mode", InputMode.SPARK)
        clusters.append(TFCluster.run(sc, function, args, nodes, **options))
        return clusters[-1]

    yield start
    for cluster in clusters:
        if not cluster.phase.is_end:
            cluster.fail(errors.SparkError("the test is over"))
        until(lambda: cluster.phase.is_end, LONG)  # noqa: B023
        cluster.server.close()


def reading_function(directory: Path, batch: int = 7) -> Any:
    """Return a function that writes each row to a file."""

    def function(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed()
        with (directory / f"{ctx.job_name}-{ctx.task_index}").open("a") as file:
            while not feed.should_stop():
                for row in feed.next_batch(batch):
                    file.write(f"{row[0]}\n")
                file.flush()

    return function


def rows_read(directory: Path) -> Counter[int]:
    return Counter(int(line) for file in directory.iterdir() for line in file.read_text().split())


def rows(sc: Any, count: int, partitions: int = 4) -> Any:
    return sc.parallelize([(n, n / 2) for n in range(count)], partitions)


def test_every_row_arrives_in_every_epoch(start: Start, sc: Any, tmp_path: Path) -> None:
    cluster = start(reading_function(tmp_path))
    assert cluster.train(rows(sc, 100), 3) is None
    assert cluster.phase == "running"
    cluster.train(rows(sc, 10), 1)
    cluster.shutdown(timeout=LONG)
    assert cluster.phase == "stopped"
    expected = Counter({n: 4 if n < 10 else 3 for n in range(100)})
    assert rows_read(tmp_path) == expected
    spark = cluster.snapshot().spark
    assert sum(row.rows for row in spark.nodes) == 310
    assert {row.state for row in spark.nodes} == {"finished"}


def test_the_default_is_ten_epochs(start: Start, sc: Any, tmp_path: Path) -> None:
    cluster = start(reading_function(tmp_path), nodes=1)
    with pytest.warns(UserWarning, match="10 epochs"):
        cluster.train(rows(sc, 5, 1))
    cluster.shutdown(timeout=LONG)
    assert rows_read(tmp_path) == Counter(dict.fromkeys(range(5), 10))


def test_uneven_partitions_are_fed_completely(start: Start, sc: Any, tmp_path: Path) -> None:
    """One partition has nearly all rows, others have none. Each node gets the end of the feed."""

    def uneven(index: int, _: Any) -> Any:
        return ((n, 0) for n in range(5000)) if index == 0 else iter([(index, 0)] * (index % 2))

    cluster = start(reading_function(tmp_path))
    cluster.train(sc.parallelize(range(7), 7).mapPartitionsWithIndex(uneven), 1)
    cluster.shutdown(timeout=LONG)
    assert sum(rows_read(tmp_path).values()) == 5000 + 3
    assert {path.name for path in tmp_path.iterdir()} == {"worker-0", "worker-1"}


@pytest.mark.parametrize("kind", ["rdd", "frame"])
def test_a_repeated_task_is_reported(
    start: Start, spark: Any, sc: Any, tmp_path: Path, kind: str
) -> None:
    def breaking(rows: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        yield from rows
        if TaskContext.get().attemptNumber() == 0:
            raise RuntimeError("the first attempt fails")

    cluster = start(reading_function(tmp_path), nodes=1)
    data = rows(sc, 20, 1).mapPartitions(breaking)
    cluster.train(data if kind == "rdd" else spark.createDataFrame(data, "n long, x double"), 1)
    cluster.shutdown(timeout=LONG)
    assert set(rows_read(tmp_path)) == set(range(20))
    (notice,) = cluster.snapshot().notices
    assert notice.severity == "warning"
    assert "partition 0" in notice.what
    assert "fed again" in notice.what
    assert "fed again" in cluster._repr_html_()


def test_terminate_in_one_node_ends_its_feeders(start: Start, sc: Any, tmp_path: Path) -> None:
    def function(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed()
        if ctx.task_index == 0:
            feed.next_batch(3)
            feed.terminate()
            return
        count = 0
        while not feed.should_stop():
            count += len(feed.next_batch(100))
        (tmp_path / "count").write_text(str(count))

    cluster = start(function)
    # A feeder that waits for node 0 raises FeedTimeout.
    cluster.train(rows(sc, 50_000, 8), 2, feed_timeout=LONG)
    cluster.train(rows(sc, 50, 8), 1, feed_timeout=LONG)
    cluster.shutdown(timeout=LONG)
    assert int((tmp_path / "count").read_text()) > 0


def test_an_error_of_a_node_stops_the_feed_at_once(start: Start, sc: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed()
        feed.next_batch(10)
        if ctx.task_index == 0:
            raise RuntimeError("NaN in the loss")
        while not feed.should_stop():
            feed.next_batch(10)

    cluster = start(function)
    endless = sc.parallelize(range(8), 8).mapPartitions(_endless_rows)
    with pytest.raises(errors.NodeFailed, match="NaN in the loss") as caught:
        cluster.train(endless, 1)
    assert caught.value.task == "worker:0"
    assert cluster.phase == "failed"
    with pytest.raises(errors.NodeFailed, match="NaN in the loss"):
        cluster.train(endless, 1)
    with pytest.raises(errors.NodeFailed, match="NaN in the loss"):
        cluster.shutdown(timeout=LONG)
    assert sc.parallelize(range(4), 2).sum() == 6


def _endless_rows(_: Any) -> Iterator[tuple[int, int]]:
    while True:
        time.sleep(0.001)
        yield 1, 2


def test_a_failed_row_does_not_end_the_cluster(start: Start, sc: Any, tmp_path: Path) -> None:
    def broken(number: int) -> Any:
        raise ValueError("this order was cancelled")

    cluster = start(reading_function(tmp_path))
    with pytest.raises(errors.SparkError, match=r"(?s)could not compute .*order was cancelled"):
        cluster.train(sc.parallelize(range(4), 2).map(broken), 1)
    assert cluster.phase == "running"
    cluster.train(rows(sc, 20), 1)
    cluster.shutdown(timeout=LONG)
    assert rows_read(tmp_path) == Counter(range(20))


def test_ctrl_c_ends_only_the_feed(start: Start, sc: Any, tmp_path: Path) -> None:
    cluster = start(reading_function(tmp_path))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        endless = sc.parallelize(range(2), 2).mapPartitions(_endless_rows)
        timer = threading.Thread(target=_interrupt_when, args=(cluster,))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            cluster.train(endless, 1)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: cluster.phase == "running", LONG)
    cluster.train(rows(sc, 20), 1)
    cluster.shutdown(timeout=LONG)
    assert rows_read(tmp_path).keys() >= set(range(20))


def _interrupt_when(cluster: Any) -> None:
    until(lambda: any(row.rows for row in cluster.snapshot().spark.nodes), LONG)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_train_can_return_a_future(start: Start, sc: Any, tmp_path: Path) -> None:
    cluster = start(reading_function(tmp_path))
    first = cluster.train(rows(sc, 30), 1, wait=False)
    second = cluster.train(rows(sc, 30), 1, wait=False)
    assert first.result(LONG) is None
    assert second.result(LONG) is None
    cluster.shutdown(timeout=LONG)
    assert rows_read(tmp_path) == Counter(dict.fromkeys(range(30), 2))


def test_the_snapshot_shows_the_feed(start: Start, sc: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def function(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed()
        while not feed.should_stop():
            feed.next_batch(10)
            while not gate.exists():
                time.sleep(0.02)

    cluster = start(function)
    feeding = cluster.train(rows(sc, 1000), 1, wait=False)
    until(lambda: sum(row.rows for row in cluster.snapshot().spark.nodes) >= 20, LONG)
    snapshot = cluster.snapshot().spark
    assert snapshot.phase == "feeding"
    assert all(row.queue_capacity for row in snapshot.nodes)
    assert all(row.batch_age_s is not None for row in snapshot.nodes)
    gate.touch()
    feeding.result(LONG)
    cluster.shutdown(timeout=LONG)


def test_inference_answers_each_row_in_order(start: Start, sc: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed(train_mode=False)
        while not feed.should_stop():
            batch = feed.next_batch(16)
            if batch:
                feed.batch_results([2 * row for row in batch])

    cluster = start(function)
    results = cluster.inference(sc.parallelize(range(1000), 6))
    assert cluster.snapshot().spark.rows_per_s == 0
    assert results.collect() == [2 * n for n in range(1000)]
    assert results.map(lambda n: n + 1).take(3) == [1, 3, 5]
    cluster.shutdown(timeout=LONG)


def test_an_action_on_inference_results_feeds(start: Start, sc: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        import time

        feed = ctx.get_data_feed(train_mode=False)
        while not feed.should_stop():
            batch = feed.next_batch(1)
            time.sleep(0.1)
            feed.batch_results(batch)

    cluster = start(function)
    results = cluster.inference(sc.parallelize(range(60), 2))
    assert cluster.phase == "running"
    rows_returned: list[int] = []
    action = threading.Thread(target=lambda: rows_returned.extend(results.collect()))
    action.start()
    until(lambda: cluster.phase == "feeding", LONG)
    cluster.shutdown(timeout=LONG)  # waits for the action
    action.join(LONG)
    assert rows_returned == list(range(60))
    assert cluster.phase == "stopped"


def test_inference_that_fails_names_the_node(start: Start, sc: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        ctx.get_data_feed(train_mode=False).next_batch(1)
        raise LookupError("no weights")

    cluster = start(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = cluster.inference(sc.parallelize(range(10), 2))
    with pytest.raises(Exception, match="no weights"):
        results.collect()
    until(lambda: cluster.phase == "failed", LONG)
    assert isinstance(cluster.error, errors.NodeFailed)
    assert sc.parallelize(range(4), 2).sum() == 6
