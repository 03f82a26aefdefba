"""Run the same function on several executors at the same time, without a TensorFlow cluster.

The counterpart is ``tensorflowonspark.TFParallel``.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.errors import NodeFailed, SparkError, TfdError, UsageError
from tfd_notebook.net import secure_channel
from tfd_notebook.net.runtime_dir import variables
from tfd_notebook.spark.driver import application, messages
from tfd_notebook.spark.driver.jobs import Job, in_background
from tfd_notebook.spark.executor import barrier_start, node_process
from tfd_notebook.spark.executor.context import TFNodeContext
from tfd_notebook.spark.preflight import check

__all__ = ["run"]

#: Timeout in seconds for the error of a task.
_REPORT_SECONDS = 10.0


def run(
    sc: Any,
    map_fn: Callable[[Any, TFNodeContext], Any],
    tf_args: Any,
    num_executors: int,
    use_barrier: bool = True,
    *,
    wait: bool = True,
) -> Future[None] | None:
    """Run ``map_fn(tf_args, ctx)`` in `num_executors` tasks and wait for all of them.

    Parameters
    ----------
    sc : pyspark.SparkContext or pyspark.sql.SparkSession
    map_fn : callable
        Runs in Spark's Python worker. ``ctx.worker_num`` and ``ctx.executor_id`` are its number,
        from 0; ``ctx.num_workers`` is the number of tasks. With a barrier, ``ctx.nodes`` lists
        the hosts of all tasks by number.
    tf_args : object
        Any object that can be pickled, such as an ``argparse.Namespace``.
    num_executors : int
        Number of tasks.
    use_barrier : bool
        If true (default), start all tasks at the same time or none. Otherwise Spark starts each
        task when a slot is free, and ``ctx.nodes`` is empty.
    wait : bool
        If true (default), wait; otherwise return a future.

    Raises
    ------
    NodeFailed
        The function raised. The error has the number of the task and its traceback. The other
        tasks are stopped, and Spark does not retry.
    NotEnoughSlots
        With a barrier, Spark has fewer free slots than tasks. Nothing was started.
    SparkError
        The Spark job failed, for example because executors were lost.

    Notes
    -----
    The counterpart is ``tensorflowonspark.TFParallel.run``. Return values of `map_fn` are dropped.
    """
    if not wait:
        return in_background(
            lambda: _run(sc, map_fn, tf_args, num_executors, use_barrier), "parallel"
        )
    _run(sc, map_fn, tf_args, num_executors, use_barrier)
    return None


def _run(
    sc: Any,
    map_fn: Callable[[Any, TFNodeContext], Any],
    tf_args: Any,
    num_executors: int,
    use_barrier: bool,
) -> None:
    if num_executors < 1:
        raise UsageError(f"invalid num_executors {num_executors}: expected 1 or more")
    sc = application.context_of(sc, "TFParallel.run")
    if use_barrier:
        check.require_slots(sc, num_executors)
    secret = secure_channel.Secret.new()
    spark_application = application.of(sc)
    host, listen_at = spark_application.addresses()
    root = compat_pyspark.default_fs(sc)
    collector = TaskErrorCollector()
    with secure_channel.serve(secret, collector.collect, host=listen_at) as server:
        driver = f"{host}:{server.address.rpartition(':')[2]}"
        task = PartitionTask(map_fn, tf_args, num_executors, use_barrier, root, driver, secret)
        numbers = sc.parallelize(range(num_executors), num_executors)
        ready = numbers.barrier() if use_barrier else numbers
        job = Job(
            spark_application,
            f"TFParallel: {num_executors} times",
            ready.mapPartitions(task).collect,
        )
        collector.end(job)
        try:
            job.future.result()
        except BaseException as error:
            job.cancel()
            if not isinstance(error, Exception):
                raise  # Ctrl-C
            if collector.first is None:
                raise SparkError(
                    f"Spark could not run all {num_executors} tasks: "
                    f"{compat_pyspark.error_summary(error)}",
                    fix="see the driver's log and the Spark UI",
                ) from error
        if collector.first is not None:
            raise collector.first


class TaskErrorCollector:
    """Receiver of the errors of the tasks' functions; the first error ends the job."""

    def __init__(self) -> None:
        self.first: TfdError | None = None
        self._job: Job | None = None
        self._lock = threading.Lock()

    def end(self, job: Job) -> None:
        """Cancel `job` at the first error, or now if there was one."""
        with self._lock:
            self._job = job
        if self.first is not None:
            job.cancel()

    def collect(self, channel: secure_channel.AuthenticatedChannel) -> None:
        """Receive the only message of a channel."""
        header, _ = channel.receive(timeout=_REPORT_SECONDS)
        error = messages.start_error(header, f"worker:{header.get('node')}")
        with self._lock:
            self.first = self.first or error
            job = self._job
        if job is not None:
            job.cancel()


@dataclass(frozen=True)
class PartitionTask:
    """The function that Spark runs in each partition."""

    function: Callable[[Any, TFNodeContext], Any]
    args: Any
    count: int
    use_barrier: bool
    root: str
    driver: str
    secret: bytes = field(repr=False)

    def __call__(self, partition: Iterable[int]) -> Iterable[Any]:
        from pyspark import BarrierTaskContext, TaskContext

        (number,) = partition
        nodes: list[str] = []
        task = TaskContext.get()
        if self.use_barrier:
            task = BarrierTaskContext.get()
            nodes = [info.address.rpartition(":")[0] for info in task.getTaskInfos()]
        context = TFNodeContext(
            executor_id=number,
            job_name="worker",
            task_index=number,
            default_fs=self.root,
            working_dir=os.getcwd(),
        )
        context.num_workers = self.count
        context.nodes = nodes  # type: ignore[attr-defined]
        given = task.resources().get("gpu") if task is not None else None
        gpus = {} if given is None else {"CUDA_VISIBLE_DEVICES": ",".join(given.addresses)}
        with variables(gpus):
            try:
                self.function(self.args, context)
            except Exception as error:
                # Spark also reports the error, later and without a name.
                name = f"worker:{number}"
                what, text = node_process.failure(
                    f"{name} on {socket.gethostname()}", error, __file__
                )
                failed = NodeFailed(node_process.shortened(what, text), task=name)
                barrier_start.report_failure(self.driver, self.secret, number, failed)
                raise  # fails the Spark task, so that Spark stops the others
        return ()
