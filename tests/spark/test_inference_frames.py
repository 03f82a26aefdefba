"""Inference with DataFrames as input and output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests._waiting import until
from tests.spark.driver.test_feeding import SCHEMA, rows
from tfd_notebook import errors
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.TFCluster import InputMode

pytestmark = pytest.mark.integration

#: Timeout in seconds of steps that take 1 s on an idle machine.
LONG = 60.0


@pytest.fixture(scope="module")
def cluster(spark: Any) -> Iterator[Any]:
    """Yield two nodes. They double a row of one value and return longer rows unchanged."""

    def function(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed(train_mode=False)
        while not feed.should_stop():
            batch = feed.next_batch(64)
            feed.batch_results([row if len(row) > 1 else 2 * row[0] for row in batch])

    cluster = TFCluster.run(spark, function, None, 2, input_mode=InputMode.SPARK)
    yield cluster
    cluster.shutdown(timeout=LONG)
    assert cluster.phase == "stopped"


def rows_read(cluster: Any) -> int:
    return sum(row.rows for row in cluster.snapshot().spark.nodes)


def test_each_row_has_one_result_in_order(spark: Any, cluster: Any) -> None:
    frame = spark.range(0, 1000, 1, 7)
    before = rows_read(cluster)
    results = cluster.inference(frame, schema="twice long")
    assert results.columns == ["twice"]
    assert rows_read(cluster) == before  # evaluation is lazy
    assert [row.twice for row in results.collect()] == list(range(0, 2000, 2))
    assert results.selectExpr("sum(twice)").first()[0] == 999_000
    assert [row.twice for row in results.take(3)] == [0, 2, 4]
    until(lambda: rows_read(cluster) > before, LONG)


def test_values_of_all_types_are_restored(spark: Any, cluster: Any) -> None:
    frame = spark.createDataFrame(rows(300), SCHEMA)
    results = cluster.inference(frame, schema=frame.schema)
    assert results.schema == frame.schema
    assert list(map(repr, results.collect())) == list(map(repr, frame.collect()))


def test_inference_without_a_schema_returns_an_rdd(spark: Any, cluster: Any) -> None:
    results = cluster.inference(spark.range(0, 100, 1, 3))
    assert results.collect() == list(range(0, 200, 2))


def test_a_schema_mismatch_is_not_retried(spark: Any, cluster: Any, tmp_path: Path) -> None:
    def note(batches: Any) -> Iterator[Any]:
        from pyspark import TaskContext

        (tmp_path / f"attempt {TaskContext.get().attemptNumber()}").touch()
        yield from batches

    frame = spark.range(0, 100, 1, 2).mapInArrow(note, "id long")
    with pytest.raises(Exception, match="do not fit the schema"):
        cluster.inference(frame, schema="twice array<string>").collect()
    assert [path.name for path in tmp_path.iterdir()] == ["attempt 0"]
    halves = frame.selectExpr("id / 4 + 1e300 as x", "id / 4 as y")
    # Either partition may fail first.
    half = r"do not fit the schema.*row 1, column twice: (0|25)\.5 \(float\) does not fit int64"
    with pytest.raises(Exception, match=half):
        cluster.inference(halves.select("y"), schema="twice long").collect()
    with pytest.raises(
        Exception, match=r"do not fit the schema.*2e\+300 \(float\) does not fit float"
    ):
        cluster.inference(halves.select("x"), schema="twice float").collect()
    assert cluster.phase in ("running", "feeding")
    assert cluster.inference(frame, schema="twice long").count() == 100


def test_invalid_arguments_of_inference(spark: Any, sc: Any, cluster: Any) -> None:
    from pyspark.ml.linalg import Vectors

    with pytest.raises(errors.UsageError, match="schema= requires a DataFrame"):
        cluster.inference(sc.parallelize([1]), schema="twice long")
    with pytest.raises(errors.UsageError, match="invalid schema"):
        cluster.inference(spark.range(3), schema="twice wise")
    with pytest.raises(errors.UsageError, match="invalid schema"):
        cluster.inference(spark.range(3), schema=["twice"])
    frame = spark.createDataFrame([(1, Vectors.dense([1.0]))], ["label", "features"])
    with pytest.raises(errors.UsageError, match="columns features of"):
        cluster.inference(frame, schema="twice long")


def test_an_error_of_the_function_fails_the_cluster(spark: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        ctx.get_data_feed(train_mode=False).next_batch(1)
        raise LookupError("no weights")

    cluster = TFCluster.run(spark, function, None, 2, input_mode=InputMode.SPARK)
    # Spark raises the error of its last try, for which the nodes may have ended.
    with pytest.raises(Exception, match=r"no weights|that received rows have ended"):
        cluster.inference(spark.range(0, 10, 1, 2), schema="guess long").collect()
    assert cluster.wait(LONG)
    assert isinstance(cluster.error, errors.NodeFailed)
    assert "no weights" in str(cluster.error)
    assert spark.range(4).count() == 4
