"""What feeding is to Spark: the functions that its tasks call, and how their errors travel."""

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
from tfd_notebook.spark.feed import InboxAddress, feed_partition, infer_partition
from tfd_notebook.spark.feed.sender import Where

if TYPE_CHECKING:
    from tfd_notebook.spark.TFCluster import TFCluster


def places(cluster: TFCluster) -> tuple[InboxAddress, ...]:
    """Return where the nodes that take rows listen."""
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
    where: Where,
    feed_timeout: float,
    qname: str,
    report_retry: Callable[[], None],
) -> Callable[[], TfdError | None]:
    """Return the action that feeds `data`; it returns the first error of a node.

    Each task calls `report_retry` before it feeds its rows.
    """
    options: dict[str, Any] = {"where": where, "qname": qname, "feed_timeout": feed_timeout}
    if _is_frame(data):
        from tfd_notebook.spark.feed import arrow

        if not arrow.unsupported_columns(data):
            return _training_by_arrow(
                data, epochs, functools.partial(_feed_by_arrow, report_retry, **options)
            )
    rdd = _rdd(data)
    repeated = rdd if epochs == 1 else rdd.context.union([rdd] * epochs)
    fed = repeated.mapPartitions(functools.partial(_feed, report_retry, **options))

    def work() -> TfdError | None:
        return next((error for error in fed.collect() if error is not None), None)

    return work


def retry_reporter(driver: str, secret: bytes) -> Callable[[], None]:
    """Return what a task calls to report to `driver` that Spark runs it again."""
    return functools.partial(_report_retry, driver, secret)


def _report_retry(driver: str, secret: bytes) -> None:
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is not None and context.attemptNumber():
        _request(
            driver,
            secret,
            say="fed again",
            partition=context.partitionId(),
            attempt=context.attemptNumber(),
        )


def retry_message(said: Mapping[str, Any]) -> str:
    """Return what a report of `retry_reporter` means."""
    return (
        f"Spark runs the task of partition {said['partition']} again (attempt "
        f"{said['attempt'] + 1}): rows that an earlier attempt fed are fed again"
    )


def _request(driver: str, secret: bytes, **said: Any) -> dict[str, Any]:
    """Send a message to the driver and return its answer, empty if it cannot be reached."""
    with contextlib.suppress(OSError, EOFError), secure_channel.connect(driver, secret) as channel:
        channel.send(said)
        return channel.receive(timeout=30.0)[0]
    return {}


def _feed(
    report_retry: Callable[[], None],
    rows: Iterable[Any],
    where: Where,
    qname: str,
    feed_timeout: float,
) -> Iterator[TfdError | None]:
    """Feed a partition; an error of the node's is a result, so that Spark does not try again."""
    report_retry()
    try:
        feed_partition(rows, where, qname, feed_timeout)
    except TfdError as error:
        yield error
    else:
        yield None


def _training_by_arrow(frame: Any, epochs: int, feed: Any) -> Callable[[], TfdError | None]:
    from tfd_notebook.spark.feed import arrow

    fed = frame.mapInArrow(feed, "error binary")

    def work() -> TfdError | None:
        with arrow.small_batches(frame):
            # One action for each: what Spark has shuffled for the first is there for the others.
            for _ in range(epochs):
                if found := fed.collect():
                    # From tasks of one's own application, as everything that Spark collects.
                    error: TfdError = pickle.loads(found[0].error)  # noqa: S301
                    return error
        return None

    return work


def _feed_by_arrow(
    report_retry: Callable[[], None],
    batches: Iterable[Any],
    where: Where,
    qname: str,
    feed_timeout: float,
) -> Iterator[Any]:
    """Feed a partition of record batches; an error of the node's is a result."""
    from tfd_notebook.spark.feed import arrow

    report_retry()
    try:
        arrow.feed_batches(batches, where, qname, feed_timeout)
    except TfdError as error:
        yield arrow.one_value("error", pickle.dumps(error))


def inference(
    data: Any,
    cluster: TFCluster,
    where: Where,
    feed_timeout: float,
    qname: str,
    schema: Any = None,
) -> Any:
    """Return the results for the rows of `data`: an RDD, or a DataFrame where a schema is given."""
    options: dict[str, Any] = {"where": where, "qname": qname, "feed_timeout": feed_timeout}
    giving_up = functools.partial(_giving_up, cluster.server.address, cluster.server.secret)
    if schema is None:
        return _rdd(data).mapPartitions(functools.partial(_infer, giving_up, **options))
    if not _is_frame(data):
        raise UsageError(
            f"schema= is for DataFrames, and the rows are a {type(data).__name__}",
            fix="leave it out, or give a DataFrame: spark.createDataFrame(rdd)",
        )
    from tfd_notebook.spark.feed import arrow

    if misfits := arrow.unsupported_columns(data):
        raise UsageError(
            f"Arrow cannot carry the columns {', '.join(misfits)} of the DataFrame: each needs a "
            "name of its own, and a type that Arrow has",
            fix="select others, such as pyspark.ml.functions.vector_to_array(column); or leave "
            "schema= out, and get an RDD",
        )
    wanted, columns = arrow.schemas(schema)
    return data.mapInArrow(
        functools.partial(_infer_by_arrow, giving_up, schema=columns, **options), wanted
    )


def _infer(
    giving_up: Any, rows: Iterable[Any], where: Where, qname: str, feed_timeout: float
) -> Iterator[Any]:
    """Yield a partition's results."""
    with giving_up():
        yield from infer_partition(rows, where, qname, feed_timeout)


def _infer_by_arrow(
    giving_up: Any,
    batches: Iterable[Any],
    where: Where,
    qname: str,
    feed_timeout: float,
    schema: Any,
) -> Iterator[Any]:
    """Yield a partition's results as record batches."""
    from tfd_notebook.spark.feed import arrow

    with giving_up():
        yield from arrow.infer_batches(batches, where, schema, qname, feed_timeout)


@contextlib.contextmanager
def _giving_up(driver: str, secret: bytes) -> Iterator[None]:
    """Have the driver hear of an error before Spark can try again."""
    from pyspark import TaskContext

    context = TaskContext.get()
    stage = context.stageId() if context is not None else -1

    tell = functools.partial(_request, driver, secret, say="gave up", stage=stage)
    # Where the driver cannot end a stage, Spark does try again.
    if context is not None and context.attemptNumber() and (before := tell().get("gave_up")):
        raise agent_protocol.unpack_error(before)
    try:
        yield
    except TfdError as error:
        tell(error=agent_protocol.pack_error(error))
        raise


def _is_frame(data: Any) -> bool:
    """Whether `data` is a DataFrame."""
    return hasattr(data, "mapInArrow")


def _rdd(data: Any) -> Any:
    """Return the RDD of a DataFrame, or what is one."""
    if not _is_frame(data):
        return data
    if application.is_connect(data):
        raise Unsupported(
            "Spark Connect has no RDDs: it feeds DataFrames whose columns Arrow can carry, and "
            "its results need a schema",
            fix='cluster.inference(df, schema="guess long"); or use a SparkSession of this process',
        )
    return data.rdd


def feed_batches(
    cluster: TFCluster,
    stream: Any,
    feed_timeout: float,
    qname: str,
    trigger: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Have each micro-batch of a streaming DataFrame fed; return the query, which ends with us."""
    feeding = threading.Lock()
    failed = False

    def feed(batch: Any, number: int) -> None:
        nonlocal failed
        with feeding:
            failed = True
            cluster.train(batch, 1, feed_timeout, qname)
            failed = False

    def end_with_cluster() -> None:
        cluster.wait()
        # A batch that is being fed ends the query by its error, which says more than `stop` does.
        with feeding:
            told = failed
        if not told:
            # Not while holding what the next batch waits for: Spark's `stop` waits for that batch.
            with contextlib.suppress(Exception):  # Spark's Java may be gone
                query.stop()

    writer = stream.writeStream.foreachBatch(feed).options(**options)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    query = writer.start()
    jobs.in_background(end_with_cluster, "stream")
    return query


def is_stream(data: Any) -> bool:
    """Whether `data` is a DStream."""
    # A DataFrame of Spark Connect takes any name for a column.
    return hasattr(type(data), "foreachRDD")


def feed_stream(
    cluster: TFCluster, stream: Any, epochs: int, feed_timeout: float, qname: str
) -> Future[None]:
    """Have each RDD of a DStream fed when it comes.

    The future ends when the cluster does, or with the first error of a feed. A batch that arrives
    after `shutdown` was called is dropped: Spark generates batches until its context is stopped.
    """
    warnings.warn(
        "DStreams are deprecated by Spark: use Structured Streaming and cluster.train_stream(df)",
        DeprecationWarning,
        stacklevel=3,
    )

    problems: list[Exception] = []

    def feed(rdd: Any) -> None:
        try:
            cluster.train(rdd, epochs, feed_timeout, qname)
        except Exception as error:
            if isinstance(error, StateError) and cluster.phase in SHUT_DOWN:
                return
            problems.append(error)
            cluster.wake_waiters()
            raise  # Spark tells it to who waits for the StreamingContext

    def follow() -> None:
        cluster.wait_until(lambda: problems or cluster.phase.is_end, None)
        if cluster.error is not None:
            raise cluster.error
        if problems:
            raise problems[0]

    stream.foreachRDD(feed)
    return jobs.in_background(follow, "stream")
