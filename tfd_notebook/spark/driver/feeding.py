"""Functions that Spark tasks call to feed rows, and the transport of their errors."""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tfd_notebook.errors import StateError, TfdError, Unsupported, UsageError
from tfd_notebook.net import agent_protocol, secure_channel
from tfd_notebook.spark.driver import application, jobs
from tfd_notebook.spark.driver.phases import SHUT_DOWN
from tfd_notebook.spark.feed.sender import (
    InboxAddress,
    InboxAddresses,
    feed_partition,
    infer_partition,
)

if TYPE_CHECKING:
    from tfd_notebook.spark.driver.cluster import SparkClusterBase


def inbox_addresses(cluster: SparkClusterBase) -> tuple[InboxAddress, ...]:
    """Return the addresses of the nodes that receive rows."""
    return tuple(
        InboxAddress(
            cluster=str(cluster.cluster_id),
            role=node.assignment.role,
            index=node.assignment.index,
            host=node.host,
            executor=node.executor,
            jvm=node.jvm,
            path=node.path,
            secret=cluster.server.secret,
        )
        for node in cluster.fed
    )


def training(
    data: Any,
    epochs: int,
    inboxes: InboxAddresses,
    feed_timeout: float,
    qname: str,
    report_retry: Callable[[], None],
) -> Callable[[], TfdError | None]:
    """Return the action that feeds `data`; the action returns the first error of a node.

    Each task calls `report_retry` before it feeds its rows.
    """
    options: dict[str, Any] = {"inboxes": inboxes, "qname": qname, "feed_timeout": feed_timeout}
    if _is_frame(data):
        # Imports pyarrow, which only DataFrames need.
        from tfd_notebook.spark.feed import arrow

        if not arrow.unsupported_columns(data):
            feed = functools.partial(arrow.feed_batches, **options)
            return _training_by_arrow(
                data, epochs, functools.partial(_feed, report_retry, feed, _arrow_error)
            )
    rdd = _rdd(data)
    repeated = rdd if epochs == 1 else rdd.context.union([rdd] * epochs)
    feed = functools.partial(feed_partition, **options)
    fed = repeated.mapPartitions(functools.partial(_feed, report_retry, feed, _same))
    return lambda: next(iter(fed.collect()), None)


def retry_reporter(driver: str, secret: bytes) -> Callable[[], None]:
    """Return a function with which a task reports to `driver` that Spark runs it again."""
    return functools.partial(_report_retry, driver, secret)


def _report_retry(driver: str, secret: bytes) -> None:
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is not None and context.attemptNumber():
        _request(
            driver,
            secret,
            type="feed_repeated",
            partition=context.partitionId(),
            attempt=context.attemptNumber(),
        )


def retry_message(message: Mapping[str, Any]) -> str:
    """Return the text for a report of `retry_reporter`."""
    return (
        f"Spark runs the task of partition {message['partition']} again (attempt "
        f"{message['attempt'] + 1}): rows that an earlier attempt fed are fed again"
    )


def _request(driver: str, secret: bytes, **message: Any) -> dict[str, Any]:
    """Send a message to the driver and return its answer, or {} if the driver is unreachable."""
    with contextlib.suppress(OSError, EOFError), secure_channel.connect(driver, secret) as channel:
        channel.send(message)
        return channel.receive(timeout=30.0)[0]
    return {}


def _feed(
    report_retry: Callable[[], None],
    feed: Callable[[Iterable[Any]], Any],
    result: Callable[[TfdError], Any],
    rows: Iterable[Any],
) -> Iterator[Any]:
    """Feed a partition. An error of the node is a result, so that Spark does not retry."""
    report_retry()
    try:
        feed(rows)
    except TfdError as error:
        yield result(error)


def _same(error: TfdError) -> TfdError:
    return error


def _arrow_error(error: TfdError) -> Any:
    # Imports pyarrow, which only DataFrames need.
    from tfd_notebook.spark.feed import arrow

    return arrow.one_value("error", pickle.dumps(error))


def _training_by_arrow(frame: Any, epochs: int, feed: Any) -> Callable[[], TfdError | None]:
    # Imports pyarrow, which only DataFrames need.
    from tfd_notebook.spark.feed import arrow

    fed = frame.mapInArrow(feed, "error binary")

    def work() -> TfdError | None:
        with arrow.small_batches(frame):
            # One action per epoch: Spark reuses the shuffle files of the first one.
            for _ in range(epochs):
                if rows := fed.collect():
                    # From tasks of the same Spark application, as all collected data.
                    error: TfdError = pickle.loads(rows[0].error)  # noqa: S301
                    return error
        return None

    return work


def inference(
    data: Any,
    cluster: SparkClusterBase,
    inboxes: InboxAddresses,
    feed_timeout: float,
    qname: str,
    schema: Any = None,
) -> Any:
    """Return the results for the rows of `data`, an RDD, or with `schema` a DataFrame."""
    options: dict[str, Any] = {"inboxes": inboxes, "qname": qname, "feed_timeout": feed_timeout}
    report_errors = functools.partial(_report_errors, cluster.server.address, cluster.server.secret)
    if schema is None:
        infer = functools.partial(infer_partition, **options)
        return _rdd(data).mapPartitions(functools.partial(_infer, report_errors, infer))
    if not _is_frame(data):
        raise UsageError(
            f"schema= requires a DataFrame, got {type(data).__name__}",
            fix="omit schema=, or pass a DataFrame: spark.createDataFrame(rdd)",
        )
    # Imports pyarrow, which only DataFrames need.
    from tfd_notebook.spark.feed import arrow

    if unsupported := arrow.unsupported_columns(data):
        raise UsageError(
            f"Arrow does not support the columns {', '.join(unsupported)} of the DataFrame: each "
            "needs a unique name and a type that Arrow has",
            fix="select other columns, or convert them, for example with "
            "pyspark.ml.functions.vector_to_array(column); or omit schema= to get an RDD",
        )
    spark_schema, columns = arrow.schemas(schema)
    infer = functools.partial(arrow.infer_batches, schema=columns, **options)
    return data.mapInArrow(functools.partial(_infer, report_errors, infer), spark_schema)


def _infer(
    report_errors: Callable[[], contextlib.AbstractContextManager[None]],
    infer: Callable[[Iterable[Any]], Iterator[Any]],
    rows: Iterable[Any],
) -> Iterator[Any]:
    """Yield the results for a partition: values, or record batches."""
    with report_errors():
        yield from infer(rows)


@contextlib.contextmanager
def _report_errors(driver: str, secret: bytes) -> Iterator[None]:
    """Report an error to the driver before Spark retries the task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    stage = context.stageId() if context is not None else -1

    request = functools.partial(_request, driver, secret, type="feed_failed", stage=stage)
    # A driver with Spark Connect cannot cancel a stage: Spark then retries the task.
    if context is not None and context.attemptNumber() and (before := request().get("error")):
        raise agent_protocol.unpack_error(before)
    try:
        yield
    except TfdError as error:
        request(error=agent_protocol.pack_error(error))
        raise


def _is_frame(data: Any) -> bool:
    """Return True if `data` is a DataFrame."""
    return hasattr(data, "mapInArrow")


def _rdd(data: Any) -> Any:
    """Return the RDD of a DataFrame, or `data` if it is an RDD."""
    if not _is_frame(data):
        return data
    if application.is_connect(data):
        raise Unsupported(
            "Spark Connect has no RDDs: only DataFrames whose columns Arrow supports can be fed, "
            "and results need a schema",
            fix='call cluster.inference(df, schema="guess long"), or use a SparkSession of this '
            "process",
        )
    return data.rdd


def feed_batches(
    train: Callable[..., object],
    wait: Callable[[], object],
    stream: Any,
    feed_timeout: float,
    qname: str,
    trigger: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Feed each micro-batch of a streaming DataFrame; return the query.

    `train` feeds a batch. The query is stopped when `wait` returns at the end of the cluster.
    """
    feeding = threading.Lock()
    failed = False

    def feed(batch: Any, number: int) -> None:
        nonlocal failed
        with feeding:
            failed = True
            train(batch, 1, feed_timeout, qname)
            failed = False

    def end_with_cluster() -> None:
        wait()
        # A batch that is being fed ends the query with its error, which has more detail than
        # `stop`. Read the flag, then release the lock: `stop` waits for the batch, which needs it.
        with feeding:
            batch_failed = failed
        if not batch_failed:
            with contextlib.suppress(Exception):  # Spark's JVM may have ended
                query.stop()

    writer = stream.writeStream.foreachBatch(feed).options(**options)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    query = writer.start()
    jobs.in_background(end_with_cluster, "stream")
    return query


def is_stream(data: Any) -> bool:
    """Return True if `data` is a DStream."""
    # Check the class: a DataFrame of Spark Connect resolves any attribute as a column.
    return hasattr(type(data), "foreachRDD")


def feed_stream(
    cluster: SparkClusterBase, stream: Any, train: Callable[[Any], object]
) -> Future[None]:
    """Feed each RDD of a DStream when it arrives.

    The future is done when the cluster ends, or at the first error of a feed. A batch that arrives
    after `shutdown` is dropped: Spark generates batches until its context is stopped.
    """
    warnings.warn(
        "DStreams are deprecated by Spark: use Structured Streaming and cluster.train_stream(df)",
        DeprecationWarning,
        stacklevel=3,
    )

    problems: list[Exception] = []

    def feed(rdd: Any) -> None:
        try:
            train(rdd)
        except Exception as error:
            if isinstance(error, StateError) and cluster.phase in SHUT_DOWN:
                return
            problems.append(error)
            cluster.phases.wake_waiters()
            raise  # Spark reports it to the thread that waits for the StreamingContext

    def follow() -> None:
        cluster.phases.wait_until(lambda: problems or cluster.phase.is_end, None)
        if cluster.error is not None:
            raise cluster.error
        if problems:
            raise problems[0]

    stream.foreachRDD(feed)
    return jobs.in_background(follow, "stream")
