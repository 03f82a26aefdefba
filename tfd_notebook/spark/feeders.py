"""What feeding is to Spark: the functions that its tasks call, and how their errors travel."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tfd_notebook.errors import TfdError
from tfd_notebook.launch import protocol, sealed
from tfd_notebook.spark import jobs
from tfd_notebook.spark.feed import Place, feed_partition, infer_partition

if TYPE_CHECKING:
    from tfd_notebook.spark.TFCluster import TFCluster


def places(cluster: TFCluster) -> tuple[Place, ...]:
    """Return where the nodes that take rows listen."""
    return tuple(
        Place(
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
    data: Any, epochs: int, where: Sequence[Place], feed_timeout: float, qname: str
) -> Callable[[], TfdError | None]:
    """Return the action that feeds `data`; it returns the first error of a node."""
    if hasattr(data, "mapInArrow"):
        from tfd_notebook.spark.feed import arrow

        if arrow.fits(data):
            return arrow.training(data, epochs, where, feed_timeout, qname)
    rdd = data if not hasattr(data, "rdd") else data.rdd
    repeated = rdd if epochs == 1 else rdd.context.union([rdd] * epochs)
    fed = repeated.mapPartitions(
        functools.partial(_feed, where=where, qname=qname, feed_timeout=feed_timeout)
    )

    def work() -> TfdError | None:
        return next((error for error in fed.collect() if error is not None), None)

    return work


def _feed(
    rows: Iterable[Any], where: Sequence[Place], qname: str, feed_timeout: float
) -> Iterator[TfdError | None]:
    """Feed a partition; an error of the node's is a result, so that Spark does not try again."""
    try:
        feed_partition(rows, where, qname, feed_timeout)
    except TfdError as error:
        yield error
    else:
        yield None


def inference(
    data: Any, cluster: TFCluster, where: Sequence[Place], feed_timeout: float, qname: str
) -> Any:
    """Return the RDD of results for the rows of `data`."""
    rdd = data if not hasattr(data, "rdd") else data.rdd
    infer = functools.partial(
        _infer,
        where=where,
        qname=qname,
        feed_timeout=feed_timeout,
        driver=cluster.server.address,
        secret=cluster.server.secret,
    )
    return rdd.mapPartitions(infer)


def _infer(
    rows: Iterable[Any],
    where: Sequence[Place],
    qname: str,
    feed_timeout: float,
    driver: str,
    secret: bytes,
) -> Iterator[Any]:
    """Yield a partition's results; of an error the driver hears before Spark can try again."""
    from pyspark import TaskContext

    try:
        yield from infer_partition(rows, where, qname, feed_timeout)
    except TfdError as error:
        context = TaskContext.get()
        stage = context.stageId() if context is not None else -1
        packed = protocol.pack_error(error)
        with contextlib.suppress(OSError, EOFError), sealed.connect(driver, secret) as channel:
            channel.send({"say": "gave up", "stage": stage, "error": packed})
            channel.receive(timeout=30.0)
        raise


def is_stream(data: Any) -> bool:
    """Whether `data` is a DStream."""
    return hasattr(data, "foreachRDD")


def feed_stream(
    cluster: TFCluster, stream: Any, epochs: int, feed_timeout: float, qname: str
) -> Future[None]:
    """Have each RDD of a DStream fed when it comes.

    The future ends when the cluster does, or with the first error of a feed.
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
            problems.append(error)
            cluster.poke()
            raise  # Spark tells it to who waits for the StreamingContext

    def follow() -> None:
        cluster.wait_until(lambda: problems or cluster.phase.is_end, None)
        if cluster.error is not None:
            raise cluster.error
        if problems:
            raise problems[0]

    stream.foreachRDD(feed)
    return jobs.in_background(follow, "stream")
