"""``launcher="spark"``: tasks on the hosts of the executors of a Spark application."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tfd_notebook._compat import pyspark as private
from tfd_notebook.agent.bridges import spark_bootstrap, stdio
from tfd_notebook.errors import (
    LaunchError,
    NotEnoughSlots,
    StateError,
    UsageError,
)
from tfd_notebook.launchers import spark_slots
from tfd_notebook.launchers.client.engine_workers import (
    HANDSHAKE_SECONDS,
    START_SECONDS,
    CallTimeout,
    hosts_of_workers,
    in_thread,
)
from tfd_notebook.launchers.remote import RemoteHost, RemoteLauncher


class Spark(RemoteLauncher):
    """Executors of Spark: a short job starts an agent on each, which connects back to the driver.

    The agents take no Spark slot. An agent ends with its executor, with the cluster, or after the
    grace time without a connection to this process. Agents and this process communicate over an
    encrypted channel. Needs the extra ``spark``.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession or pyspark.SparkContext, optional
        Default: the active one of this process.
    executors : int, optional
        The number of executors to use, in the order of their hosts. Default: all.
    grace, place, secure, host, allow
        See `RemoteLauncher` and `Launcher`.
    """

    name: ClassVar[str] = "spark"
    summary: ClassVar[str] = "next to the executors of a Spark application (extra: spark)"
    ends_with: ClassVar[str] = "its Spark application"

    def __init__(
        self,
        spark: Any = None,
        *,
        executors: int | None = None,
        grace: float = 600.0,
        place: Mapping[str, str | Sequence[str]] | None = None,
        secure: bool = False,
        host: str | Mapping[str, str] = "",
        allow: Iterable[str] = (),
    ) -> None:
        super().__init__(grace=grace, place=place, secure=secure, host=host, allow=allow)
        if executors is not None and (
            isinstance(executors, bool) or not isinstance(executors, int) or executors < 1
        ):
            raise UsageError(f"invalid executors {executors!r}: expected 1 or more")
        self._spark = spark
        self._executors = executors

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "executors": self._executors}

    def hosts(self) -> list[RemoteHost]:
        context = self._context()
        settings = context.getConf()
        bound = settings.get("spark.driver.bindAddress") or settings.get("spark.driver.host")

        def start(arguments: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
            started = self._start(context, arguments)
            started.sort(key=lambda executor: (executor["host"], executor["executor"]))
            if self._executors is not None and len(started) < self._executors:
                raise LaunchError(
                    f"Spark has {len(started)} executors, but executors={self._executors}",
                    fix="start Spark with more executors; tfd.spark.check shows the settings",
                )
            for executor in started[: self._executors]:
                yield executor["executor"], executor

        return hosts_of_workers(
            start,
            bound=bound or "127.0.0.1",
            advertised=settings.get("spark.driver.host") or "",
            grace=self._grace,
            end_reason="its executor has ended",
        )

    def _enough_executors(self, context: Any) -> Callable[[], bool]:
        most = self._executors
        if most is None:
            return spark_slots.AllExecutorsRegistered(context)
        return lambda: len(private.executors(context)) >= most

    def _context(self) -> Any:
        spark = self._spark if self._spark is not None else private.active_context()
        if spark is None:
            raise StateError(
                "no Spark application in this process", fix="tfd.spark.session(), or spark=session"
            )
        context = spark if hasattr(spark, "parallelize") else getattr(spark, "sparkContext", None)
        if context is None:
            raise UsageError(f"invalid spark {spark!r}: expected a SparkSession or a SparkContext")
        if private.is_stopped(context):
            raise StateError("the SparkContext was stopped", fix="start another one")
        return context

    def _start(self, context: Any, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Start a process next to each executor, and return the replies."""
        from pyspark import cloudpickle

        if holding := spark_slots.slots_held():
            raise NotEnoughSlots(
                "a task in each slot starts the agents, and "
                + spark_slots.report(private.slots(context), holding),
                fix="start this cluster before those that hold slots (their nodes can use it), or "
                "shut those down",
            )
        spark_slots.wait_for_executors(context, self._enough_executors(context))
        count = private.slots(context)
        if not count:
            raise LaunchError(
                "Spark has no executor, and none registered in time",
                fix="check that a Spark worker has room for one; tfd.spark.check shows details",
            )
        group = f"tfd-launch-{uuid.uuid4().hex[:8]}"

        def run() -> list[dict[str, Any]]:
            context.setJobGroup(group, "agents of a cluster", interruptOnCancel=True)
            code = stdio.bootstrap("rendezvous")
            start = spark_bootstrap.starter(code, arguments, HANDSHAKE_SECONDS)
            tasks = context.parallelize(range(count), count).barrier()
            replies: list[dict[str, Any]] = tasks.mapPartitions(start).collect()
            return replies

        # Pickle by value: an executor may not have this package, which the reply then reports.
        cloudpickle.register_pickle_by_value(spark_bootstrap)
        try:
            return in_thread(run, "tfd-spark-launch", START_SECONDS)
        except CallTimeout:
            context.cancelJobGroup(group)
            raise LaunchError(
                "Spark's executors cannot be reached or are busy: not all of them ran a "
                f"task within {START_SECONDS:g} s",
                fix="check that no other job uses the slots, and that the hosts are up",
            ) from None
        except Exception as error:
            raise launch_error(error) from error
        except BaseException:
            context.cancelJobGroup(group)
            raise
        finally:
            cloudpickle.unregister_pickle_by_value(spark_bootstrap)


def launch_error(error: Exception) -> LaunchError:
    """Return an error with the essential line of Spark's error, whose text fills a page."""
    if lost := private.lost_executor(error):
        return LaunchError(
            f"a Spark executor cannot be reached: {lost}",
            fix="check that its host is up; Spark replaces an executor if it can",
        )
    return LaunchError(
        f"running a task on each Spark executor failed: {private.error_summary(error)}",
        fix="run tfd.spark.check(spark) for details",
    )
