"""Feeding from Spark's tasks: RDDs, and DataFrames through Arrow."""

from __future__ import annotations

import datetime
import decimal
import functools
from pathlib import Path
from typing import Any

import pytest

from tests.spark._feeding import node
from tfd_notebook.errors import NodeFailed
from tfd_notebook.spark.driver import feeding
from tfd_notebook.spark.feed import arrow
from tfd_notebook.spark.feed.sender import feed_partition, infer_partition

pytestmark = pytest.mark.integration

SCHEMA = (
    "i int, l long, b byte, f float, d double, t boolean, s string, y binary, day date, "
    "at timestamp, ntz timestamp_ntz, n decimal(10,2), nothing int, array array<double>, "
    "varying array<string>, map map<string,int>, struct struct<a: int, b: array<struct<c: string>>>"
)


def rows(count: int) -> list[tuple[Any, ...]]:
    day = datetime.datetime(2020, 2, 29, 1, 2, 3, 4)
    return [
        (
            *(n, n * 2**40, n % 100, n / 4, n / 3, n % 2 == 0, f"ü{n}" * (n % 4), bytes([n % 256])),
            *(day.date(), day, day, decimal.Decimal(n) / 4, None if n % 3 else n, [n / 2, 1.0]),
            *([str(m) for m in range(n % 3)], {"a": n}, (n, [(str(n),)] * (n % 2))),
        )
        for n in range(count)
    ]


def test_partitions_of_different_sizes_are_fed(sc: Any, tmp_path: Path) -> None:
    data = sc.parallelize([range(0), range(5), range(5, 2000), range(2000, 2001)], 4)
    with node(tmp_path, "collect") as running:
        data.flatMap(list).foreachPartition(
            functools.partial(feed_partition, inboxes=running.address)
        )
        rows_read = [row for batch in running.end() for row in batch]
    assert sorted(map(int, rows_read)) == list(range(2001))


def test_results_of_an_rdd_are_in_order(sc: Any, tmp_path: Path) -> None:
    with node(tmp_path, "double") as running:
        infer = functools.partial(infer_partition, inboxes=running.address)
        data = sc.parallelize(range(1000), 7).mapPartitions(infer)
        assert data.collect() == list(range(0, 2000, 2))
        assert data.take(3) == [0, 2, 4]  # the second action computes it again, and only in part
        assert data.sum() == 999_000
        running.end()


def test_a_dataframe_feeds_the_same_rows_as_its_rdd(spark: Any, sc: Any, tmp_path: Path) -> None:
    frame = spark.createDataFrame(rows(500), SCHEMA).repartition(3)
    assert not arrow.unsupported_columns(frame)
    with node(tmp_path, "collect") as running:
        assert feeding.training(frame, 2, running.address, 60, "input", lambda: None)() is None
        rows_read = [row for batch in running.end() for row in batch]
    assert sorted(rows_read) == sorted(map(repr, frame.rdd.collect() * 2))


def test_feeding_a_dataframe_returns_the_error_of_a_node(
    spark: Any, sc: Any, tmp_path: Path
) -> None:
    with node(tmp_path, "fail") as running:
        error = feeding.training(
            spark.range(100_000), 1, running.address, 60, "input", lambda: None
        )()
    assert isinstance(error, NodeFailed)
    assert "that row is wrong" in str(error)


def test_batches_of_arrow_are_limited_by_the_size_of_rows(spark: Any, sc: Any) -> None:
    assert arrow.records_per_batch(spark.range(10)) == 1 << 16
    large = spark.createDataFrame([(bytes(150_000),)] * 3, "image binary")
    assert 20 < arrow.records_per_batch(large) < 30


@pytest.mark.parametrize("before", [0, 10, 20_000])
def test_batches_of_arrow_are_small_during_a_feed(spark: Any, sc: Any, before: int) -> None:
    def limit() -> int:
        return int(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch"))

    usual = limit()
    small = spark.range(10)
    large = spark.createDataFrame([(bytes(150_000),)] * 3, "image binary")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", before)
    try:
        first, second = arrow.small_batches(small), arrow.small_batches(large)
        with first:
            assert limit() == (before or 1 << 16)
            second.__enter__()
            reduced = min(before or 1 << 16, arrow.records_per_batch(large))
            assert limit() == reduced
        assert limit() == reduced
        second.__exit__(None, None, None)
        assert limit() == before
    finally:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", usual)


def test_columns_without_an_arrow_type_are_named(spark: Any, sc: Any) -> None:
    from pyspark.ml.linalg import Vectors

    frame = spark.createDataFrame([(1, Vectors.dense([1.0]))], ["label", "features"])
    assert arrow.unsupported_columns(frame) == ["features"]
    assert arrow.unsupported_columns(frame.select("label", "label")) == ["label", "label"]


def average(args: Any, ctx: Any) -> None:
    """Write the number and the sum of the fed values into a directory."""
    total, count = 0.0, 0
    for batch in ctx.get_data_feed().as_dataset(32):
        total += float(sum(batch["x"])) + float(sum(sum(batch["pair"])))
        count += len(batch["x"])
    (Path(args["directory"]) / str(ctx.task_index)).write_text(f"{count} {total}")


def test_a_cluster_is_fed_from_a_dataframe(spark: Any, sc: Any, tmp_path: Path) -> None:
    from tfd_notebook.spark import TFCluster

    data = [(float(n), [n, 1]) for n in range(400)]
    frame = spark.createDataFrame(data, "x double, pair array<int>").repartition(5)
    cluster = TFCluster.run(
        sc, average, {"directory": str(tmp_path)}, 2, 0, input_mode=TFCluster.InputMode.SPARK
    )
    cluster.train(frame, num_epochs=2, feed_timeout=100)
    cluster.shutdown(timeout=100)
    results = [path.read_text().split() for path in tmp_path.iterdir()]
    assert sum(int(count) for count, _ in results) == 800
    assert sum(float(total) for _, total in results) == 2 * (2 * sum(range(400)) + 400)
