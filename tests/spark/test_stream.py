"""Streams: Structured Streaming by `train_stream`, DStreams by what they look like."""

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
from tfd_notebook.spark.living import living
from tfd_notebook.spark.TFCluster import InputMode

pytestmark = [
    pytest.mark.integration,
    # pyspark leaves the end of a connection to Java to the garbage where a query is stopped.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LONG = 90.0


@pytest.fixture
def cluster(sc: Any, tmp_path: Path) -> Iterator[Any]:
    """Two nodes that write down every row."""
    seen = tmp_path / "seen"
    seen.mkdir()

    def function(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed()
        with (seen / str(ctx.task_index)).open("a") as file:
            while not feed.should_stop():
                for row in feed.next_batch(1):
                    file.write(f"{row[0]}\n")
                file.flush()

    cluster = TFCluster.run(sc, function, None, 2, 0, input_mode=InputMode.SPARK)
    yield cluster
    cluster.fail(errors.SparkError("the test is over"))
    until(lambda: not living(), LONG)


def seen(tmp_path: Path) -> list[int]:
    files = (tmp_path / "seen").iterdir()
    return sorted(int(line) for file in files for line in file.read_text().split())


def test_files_are_fed_as_they_come(spark: Any, cluster: Any, tmp_path: Path) -> None:
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
        until(lambda: seen(tmp_path) == list(range(10)), LONG)
        drop("second", range(10, 25))
        until(lambda: seen(tmp_path) == list(range(25)), LONG)
    finally:
        query.stop()
    assert query.exception() is None
    cluster.shutdown(timeout=LONG)


def test_what_does_not_stream_is_refused(spark: Any, cluster: Any) -> None:
    with pytest.raises(errors.UsageError, match="streaming"):
        cluster.train_stream(spark.range(3))


class Stream:
    """What a DStream looks like: `foreachRDD`."""

    def foreachRDD(self, work: Any) -> None:
        self.work = work


class Context:
    """What a StreamingContext looks like when it is waited for and stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.calls: list[tuple[bool, bool]] = []

    def awaitTerminationOrTimeout(self, timeout: float) -> bool:
        return self.stopped.wait(min(timeout, 0.2))

    def stop(self, stopSparkContext: bool = True, stopGraceFully: bool = False) -> None:
        self.calls.append((stopSparkContext, stopGraceFully))
        self.stopped.set()


def test_a_dstream_is_fed_and_said_to_be_of_yesterday(
    sc: Any, cluster: Any, tmp_path: Path
) -> None:
    stream, context = Stream(), Context()
    with pytest.warns(DeprecationWarning, match="train_stream"):
        cluster.train(stream, 1)
    stream.work(sc.parallelize([(n,) for n in range(8)], 2))
    assert seen(tmp_path) == list(range(8))
    stopping = cluster.shutdown(ssc=context, timeout=LONG, wait=False)
    context.stopped.set()
    stopping.result(LONG)
    assert cluster.phase == "stopped"
    assert context.calls == []
