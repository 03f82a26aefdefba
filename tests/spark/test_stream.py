"""Structured Streaming by `train_stream`, and DStreams."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.driver.registry import running
from tfd_notebook.spark.TFCluster import InputMode

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    # pyspark leaves a Java connection to the garbage collector when a query is stopped.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

#: Timeout in seconds of steps that take a few seconds on an idle machine.
LONG = 200.0


@pytest.fixture
def cluster(sc: Any, tmp_path: Path) -> Iterator[Any]:
    """Yield two nodes that write each row to a file."""
    received = tmp_path / "received"
    received.mkdir()

    def function(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed()
        with (received / str(ctx.task_index)).open("a") as file:
            while not feed.should_stop() and not (tmp_path / "enough").exists():
                for (row,) in feed.next_batch(1):
                    if row < 0:
                        raise ValueError(f"no such number: {row}")
                    file.write(f"{row}\n")
                file.flush()
        feed.terminate()

    cluster = TFCluster.run(sc, function, None, 2, 0, input_mode=InputMode.SPARK)
    yield cluster
    cluster.fail(errors.SparkError("the test is over"))
    until(lambda: not running(), LONG)


def rows_received(tmp_path: Path) -> list[int]:
    files = (tmp_path / "received").iterdir()
    return sorted(int(line) for file in files for line in file.read_text().split())


def test_new_files_are_fed(spark: Any, cluster: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()

    def drop(name: str, numbers: range) -> None:
        text = "".join(json.dumps({"n": number}) + "\n" for number in numbers)
        (tmp_path / name).write_text(text)
        (tmp_path / name).rename(source / name)

    drop("first", range(10))
    stream = spark.readStream.schema("n long").json(str(source))
    query = cluster.train_stream(stream, checkpointLocation=str(tmp_path / "checkpoint"))
    try:
        until(lambda: rows_received(tmp_path) == list(range(10)), LONG)
        drop("second", range(10, 25))
        until(lambda: rows_received(tmp_path) == list(range(25)), LONG)
    finally:
        query.stop()
    assert query.exception() is None
    cluster.shutdown(timeout=LONG)


def test_a_static_dataframe_is_refused(spark: Any, cluster: Any) -> None:
    with pytest.raises(errors.UsageError, match="streaming"):
        cluster.train_stream(spark.range(3))


@pytest.fixture
def context(sc: Any) -> Iterator[Any]:
    """Yield a StreamingContext with five batches each second."""
    from pyspark.streaming import StreamingContext

    with pytest.warns(FutureWarning, match="DStream is deprecated"):
        context = StreamingContext(sc, 0.2)
    yield context
    context.stop(stopSparkContext=False, stopGraceFully=False)


def batches(sc: Any, context: Any, *numbers: int) -> Any:
    """Return a DStream with one number in each batch, then batches of twice 100."""
    rows = [sc.parallelize([(number,)], 1) for number in numbers]
    return context.queueStream(rows, default=sc.parallelize([(100,), (100,)], 2))


def test_a_dstream_is_fed_until_the_nodes_have_enough(
    sc: Any, cluster: Any, context: Any, tmp_path: Path
) -> None:
    with pytest.warns(DeprecationWarning, match="train_stream"):
        fed = cluster.train(batches(sc, context, *range(8)), 1, wait=False)
    context.start()
    until(lambda: rows_received(tmp_path)[8:], LONG)
    assert rows_received(tmp_path)[:8] == list(range(8))
    assert not fed.done()
    stopping = cluster.shutdown(ssc=context, timeout=LONG, wait=False)
    (tmp_path / "enough").touch()
    stopping.result(LONG)
    assert cluster.phase == "stopped"
    assert fed.result(LONG) is None
    assert context.getActive() is None
    assert sc.parallelize(range(4), 2).sum() == 6


def test_a_batch_during_the_shutdown_is_not_an_error(
    sc: Any, context: Any, tmp_path: Path, clusters: list[Any]
) -> None:
    """The nodes' functions have left the loop over the feed, but still run."""

    def function(args: Any, ctx: Any) -> None:
        import threading

        feed = ctx.get_data_feed()
        while not feed.should_stop():
            feed.next_batch(1)
        while not (tmp_path / "finish").exists():
            threading.Event().wait(0.05)

    cluster = TFCluster.run(sc, function, None, 2, 0, input_mode=InputMode.SPARK)
    clusters.append(cluster)
    arrived = threading.Event()
    stream = batches(sc, context, 1)
    with pytest.warns(DeprecationWarning, match="train_stream"):
        fed = cluster.train(stream, 1, wait=False)
    stream.foreachRDD(lambda rdd: arrived.set())  # after the feed of the same batch
    stopping = cluster.shutdown(timeout=LONG, wait=False)
    until(lambda: cluster.phase == "draining", LONG)
    context.start()
    assert arrived.wait(LONG)
    (tmp_path / "finish").touch()
    stopping.result(LONG)
    assert fed.result(LONG) is None
    context.stop(stopSparkContext=False, stopGraceFully=False)
    assert context.awaitTerminationOrTimeout(LONG)  # it would raise the error of a batch


def test_stopping_the_server_ends_a_dstream(
    sc: Any, cluster: Any, context: Any, tmp_path: Path
) -> None:
    with pytest.warns(DeprecationWarning, match="train_stream"):
        fed = cluster.train(batches(sc, context, 1), 1, wait=False)
    context.start()
    until(lambda: rows_received(tmp_path), LONG)
    stopping = cluster.shutdown(ssc=context, timeout=LONG, wait=False)
    assert not cluster.server.done
    cluster.server.stop()
    assert cluster.server.done
    stopping.result(LONG)
    assert cluster.phase == "stopped"
    assert fed.result(LONG) is None
    assert context.getActive() is None


def test_an_error_of_a_node_ends_a_dstream(sc: Any, cluster: Any, context: Any) -> None:
    with pytest.warns(DeprecationWarning, match="train_stream"):
        fed = cluster.train(batches(sc, context, 1, -2, 3), 1, wait=False)
    context.start()
    with pytest.raises(errors.NodeFailed, match="no such number: -2"):
        fed.result(LONG)
    with pytest.raises(errors.NodeFailed, match="no such number: -2"):
        cluster.shutdown(ssc=context, timeout=LONG)
    assert context.getActive() is None
    assert sc.parallelize(range(4), 2).sum() == 6


def test_a_failed_batch_ends_a_dstream_and_then_the_cluster(
    sc: Any, cluster: Any, context: Any, tmp_path: Path
) -> None:
    broken = batches(sc, context, 1, 0).map(lambda row: (1 // row[0],))
    with pytest.warns(DeprecationWarning, match="train_stream"):
        fed = cluster.train(broken, 1, wait=False)
    context.start()
    with pytest.raises(errors.SparkError, match="ZeroDivisionError"):
        fed.result(LONG)
    assert not cluster.phase.is_end
    with pytest.raises(errors.SparkError, match=r"(?s)a batch of the stream failed.*ZeroDivision"):
        cluster.shutdown(ssc=context, timeout=LONG)
    assert cluster.phase == "stopped"
    assert context.getActive() is None
    assert 1 in rows_received(tmp_path)


def test_an_error_of_a_node_during_the_feed_ends_a_stream(
    spark: Any, cluster: Any, tmp_path: Path
) -> None:
    from pyspark.errors import StreamingQueryException

    (tmp_path / "some.json").write_text('{"n": -1}\n{"n": 2}\n')  # the second row is never read
    stream = spark.readStream.schema("n long").json(str(tmp_path / "*.json"))
    query = cluster.train_stream(stream, checkpointLocation=str(tmp_path / "checkpoint"))
    with pytest.raises(StreamingQueryException, match="no such number: -1"):
        query.awaitTermination(LONG)
    assert not query.isActive
    with pytest.raises(errors.NodeFailed, match="no such number: -1"):
        cluster.shutdown(timeout=LONG)
    assert spark.range(3).count() == 3


def test_an_error_of_a_node_after_its_last_row_ends_a_stream(
    spark: Any, cluster: Any, tmp_path: Path
) -> None:
    (tmp_path / "one.json").write_text('{"n": 1}\n')
    stream = spark.readStream.schema("n long").json(str(tmp_path / "*.json"))
    query = cluster.train_stream(stream, checkpointLocation=str(tmp_path / "checkpoint"))
    until(lambda: rows_received(tmp_path) == [1] and cluster.phase == "running", LONG)
    cluster.fail(errors.NodeFailed("worker:0 failed after its last row"))
    assert query.awaitTermination(LONG)
    assert query.exception() is None
    with pytest.raises(errors.NodeFailed, match="after its last row"):
        cluster.shutdown(timeout=LONG)
    assert spark.range(3).count() == 3
