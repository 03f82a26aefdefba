"""The same function on several executors at once, each on its own: no TensorFlow cluster.

The counterpart is ``tensorflowonspark.TFParallel``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.errors import NodeFailed, SparkError, UsageError
from tfd_notebook.net import secure_channel
from tfd_notebook.net.runtime_dir import variables
from tfd_notebook.spark.driver import application, messages
from tfd_notebook.spark.driver.jobs import Job, in_background
from tfd_notebook.spark.executor.context import TFNodeContext
from tfd_notebook.spark.preflight import check

__all__ = ["run"]

#: Seconds for telling the driver of an error.
_TELL_SECONDS = 10.0
#: Characters of a traceback that travel, the end of it.
_MOST_SAID = 100_000


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
        It runs in Spark's Python worker. ``ctx.worker_num`` and ``ctx.executor_id`` are its number,
        0 and up, ``ctx.num_workers`` how many there are; with a barrier, ``ctx.nodes`` are the
        hosts of all by number.
    tf_args : object
        Anything that can be pickled, such as an ``argparse.Namespace``.
    num_executors : int
        How many.
    use_barrier : bool
        Start all at the same time or none (default). Without, Spark starts each as it has a slot,
        and ``ctx.nodes`` is empty.
    wait : bool
        Whether to wait (default), or return the future of it.

    Raises
    ------
    NodeFailed
        The function raised; with its number and its traceback. The other tasks are ended, and Spark
        does not try again.
    NotEnoughSlots
        With a barrier: Spark has fewer free slots than that; nothing was started.
    SparkError
        Spark could not do it, as where executors were lost.

    Notes
    -----
    The counterpart is ``tensorflowonspark.TFParallel.run``. What the function returns is dropped.
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
        raise UsageError(f"num_executors={num_executors} is no number of executors")
    sc = application.context_of(sc, "TFParallel.run")
    if use_barrier:
        check.needed(sc, num_executors)
    secret = secure_channel.Secret.new()
    on = application.of(sc)
    host, listen_at = on.addresses()
    root = compat_pyspark.default_fs(sc)
    collector = TaskErrorCollector()
    with secure_channel.serve(secret, collector.collect, host=listen_at) as server:
        driver = f"{host}:{server.address.rpartition(':')[2]}"
        task = PartitionTask(map_fn, tf_args, num_executors, use_barrier, root, driver, secret)
        numbers = sc.parallelize(range(num_executors), num_executors)
        ready = numbers.barrier() if use_barrier else numbers
        job = Job(on, f"TFParallel: {num_executors} times", ready.mapPartitions(task).collect)
        collector.end(job)
        try:
            job.future.result()
        except BaseException as error:
            job.cancel()
            if not isinstance(error, Exception):
                raise  # Ctrl-C
            if collector.first is None:
                said = str(error).strip().splitlines()
                raise SparkError(
                    f"Spark could not run all {num_executors} tasks: "
                    f"{said[-1] if said else type(error).__name__}",
                    fix="the log of the driver and the pages of Spark tell more",
                ) from error
        if collector.first is not None:
            raise collector.first


class TaskErrorCollector:
    """What tasks say of their functions' errors; the first one ends the job."""

    def __init__(self) -> None:
        self.first: NodeFailed | None = None
        self._job: Job | None = None
        self._lock = threading.Lock()

    def end(self, job: Job) -> None:
        """End `job` with the first of them, which may have come already."""
        with self._lock:
            self._job = job
        if self.first is not None:
            job.cancel()

    def collect(self, channel: secure_channel.AuthenticatedChannel) -> None:
        """Take the one message of a channel, and answer it."""
        said = messages.function_error(channel.receive(timeout=_TELL_SECONDS)[0], "message")
        name = f"worker:{said['number']}"
        with self._lock:
            if self.first is None:
                self.first = NodeFailed(
                    f"{name} on {said['host']}: the function raised {said['what']}\n"
                    f"{said['traceback']}",
                    task=name,
                )
            job = self._job
        channel.send({"noted": True})
        if job is not None:
            job.cancel()


@dataclass(frozen=True)
class PartitionTask:
    """What runs in each partition."""

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
                with contextlib.suppress(OSError, EOFError):  # Spark reports the error instead
                    self._tell(number, error)
                raise  # ends the others at once
        return ()

    def _tell(self, number: int, error: Exception) -> None:
        # From the user's function on; this frame says nothing to them.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, trace))
        with secure_channel.connect(self.driver, self.secret, _TELL_SECONDS) as channel:
            channel.send(
                {
                    "number": number,
                    "host": socket.gethostname(),
                    "what": f"{type(error).__name__}: {error}"[:_MOST_SAID],
                    "traceback": text[-_MOST_SAID:],
                }
            )
            channel.receive(timeout=_TELL_SECONDS)
