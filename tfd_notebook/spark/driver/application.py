"""Access to Spark through a SparkContext or Spark Connect."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tfd_notebook import errors
from tfd_notebook._compat import pyspark as compat_pyspark

#: A function of a barrier stage: from the numbers of a partition to its results.
Stage: TypeAlias = Callable[[Iterable[int]], Iterable[int]]


class Application:
    """A Spark application with a SparkContext in this process.

    Parameters
    ----------
    sc : pyspark.SparkContext

    Attributes
    ----------
    sc : pyspark.SparkContext or None
        None with Spark Connect.
    id : str
    default_fs : str
        The default file system, for paths without a scheme.
    """

    def __init__(self, sc: Any) -> None:
        self.sc = sc
        self.id = str(sc.applicationId)
        self.default_fs = compat_pyspark.default_fs(sc)

    def addresses(self) -> tuple[str, str]:
        """Return the name of this process for executors, and the local address to listen on."""
        conf = self.sc.getConf()
        host = conf.get("spark.driver.host") or "127.0.0.1"
        return str(host), str(conf.get("spark.driver.bindAddress") or host)

    def executor_slots(self) -> dict[str, tuple[str, int]]:
        """Return host and number of slots of each executor, empty if Spark does not report them."""
        return compat_pyspark.executor_slots(self.sc)

    def numbers(self, numbers: Sequence[int]) -> Any:
        """Return consecutive numbers, one per partition."""
        return self.sc.parallelize(numbers, len(numbers))

    def in_barrier(self, numbers: Any, stage: Stage) -> Callable[[], Any]:
        """Return the action that runs all partitions of `numbers` at the same time."""
        action: Callable[[], Any] = numbers.barrier().mapPartitions(stage).collect
        return action

    def begin_group(self, group: str, description: str) -> None:
        """Add all later jobs of this thread to a job group."""
        self.sc.setJobGroup(group, description, interruptOnCancel=True)

    def cancel_group(self, group: str) -> None:
        """Cancel the jobs of a group, including later ones."""
        compat_pyspark.cancel_group(self.sc, group)

    def cancel_stage(self, stage: int, reason: str) -> None:
        """Cancel the jobs that need a stage. Their callers get an error with `reason`."""
        compat_pyspark.cancel_stage(self.sc, stage, reason)


class Connected(Application):
    """A Spark application accessed through Spark Connect.

    Parameters
    ----------
    session : pyspark.sql.connect.session.SparkSession
    """

    def __init__(self, session: Any) -> None:
        self.sc = None
        self._session = session
        self.id = str(session.conf.get("spark.app.id"))
        # Without the trailing slash, which belongs to the path.
        local = Path("/").as_uri()[:-1]
        self.default_fs = str(session.conf.get("spark.hadoop.fs.defaultFS", local))

    def addresses(self) -> tuple[str, str]:
        # Address of the interface towards the server. Connecting a UDP socket sends no packet.
        server = self._session.client.host
        family, kind, protocol, _, address = socket.getaddrinfo(server, 9, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            host = str(probe.getsockname()[0])
        return host, host

    def executor_slots(self) -> dict[str, tuple[str, int]]:
        return {}

    def numbers(self, numbers: Sequence[int]) -> Any:
        return self._session.range(numbers[0], numbers[-1] + 1, 1, len(numbers))

    def in_barrier(self, numbers: Any, stage: Stage) -> Callable[[], Any]:
        answers = functools.partial(_by_arrow, stage)
        action: Callable[[], Any] = numbers.mapInArrow(answers, "answer long", barrier=True).collect
        return action

    def begin_group(self, group: str, description: str) -> None:
        self._session.addTag(group)

    def cancel_group(self, group: str) -> None:
        self._session.interruptTag(group)

    def cancel_stage(self, stage: int, reason: str) -> None:
        """Do nothing: Spark Connect cannot cancel a stage. The retried task receives the error."""


def of(spark: Any) -> Application:
    """Return the application of a SparkSession, classic or connected, or of a SparkContext."""
    return Connected(spark) if is_connect(spark) else Application(context_of(spark))


def is_connect(spark: Any) -> bool:
    """Return True if a session or DataFrame uses Spark Connect, which has no SparkContext."""
    return any(kind.__module__.startswith("pyspark.sql.connect") for kind in type(spark).__mro__)


def context_of(spark: Any, what: str = "this") -> Any:
    """Return the SparkContext of a session, or `spark` itself if it is one.

    Raises
    ------
    Unsupported
        The session uses Spark Connect. `what` names the caller in the error.
    """
    if is_connect(spark):
        raise errors.Unsupported(
            f"{what} requires a SparkContext, which Spark Connect does not have",
            fix="use a SparkSession of this process",
        )
    return spark if hasattr(spark, "parallelize") else spark.sparkContext


def _by_arrow(stage: Stage, batches: Iterator[Any]) -> Iterator[Any]:
    import pyarrow as pa

    numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
    yield pa.RecordBatch.from_pydict({"answer": pa.array(stage(numbers), pa.int64())})
