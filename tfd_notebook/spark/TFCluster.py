"""TensorFlow clusters on Spark executors: start, feed and shut them down."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from tfd_notebook import errors
from tfd_notebook.model.spec import check_seconds, check_timeout
from tfd_notebook.net.secure_channel import Secret
from tfd_notebook.spark import roles
from tfd_notebook.spark.driver import application, feeding, jobs, startup
from tfd_notebook.spark.driver import shutdown as driver_shutdown
from tfd_notebook.spark.driver.coordinator import CoordinatedSparkCluster, serve
from tfd_notebook.spark.driver.jobs import Job
from tfd_notebook.spark.driver.phases import SHUT_DOWN, Phase
from tfd_notebook.spark.executor.launch_plan import Plan
from tfd_notebook.spark.preflight import check
from tfd_notebook.spark.roles import InputMode

__all__ = ["InputMode", "TFCluster", "run", "serve"]

#: Epochs if `TFCluster.train` gets ``num_epochs=0``, as in TensorFlowOnSpark.
_EPOCHS = 10
#: Held while free slots are counted, until the cluster that takes them is registered.
_start_lock = threading.Lock()


class TFCluster(CoordinatedSparkCluster):
    """A running cluster, as `run` returns it.

    Attributes
    ----------
    name : str
        Unique among the running clusters of this process.
    cluster_id : int
    cluster_info : list of dict
        One dict per node. ``executor_id`` is its number and ``executor`` the name that Spark
        uses. ``addr`` is the path of the Unix socket that receives the rows. ``authkey`` is always
        empty, because secrets are not shown. ``tb_pid`` and ``tb_port`` are process and port of
        its TensorBoard, or 0. The other keys are ``host``, ``job_name``, ``task_index``,
        ``port``, ``pid`` and ``state``.
    cluster_meta : dict
        ``id``, ``cluster_template``, ``num_executors``, ``default_fs``, ``working_dir``,
        ``server_addr``, ``release_port``.
    defaultFS, working_dir : str
    input_mode : InputMode
    nodeRDD : pyspark.RDD or pyspark.sql.DataFrame
        The nodes' numbers.
    num_executors : int
        Number of nodes, including parameter servers on the host of the driver.
    queues : list of str
    sc : pyspark.SparkContext or None
        The cluster never stops it, except `shutdown` with ``stop_spark=True``. None with Spark
        Connect.
    server
        The driver's end of the channels to the nodes. ``done`` is true when the nodes need no
        more rows. ``stop()`` sets it, and `shutdown` then stops its StreamingContext.
    error : TfdError or None
        The error that the cluster failed with.

    Notes
    -----
    On the class these attributes are None.

    See Also
    --------
    tensorflowonspark.TFCluster.TFCluster
    """

    def train(
        self,
        dataRDD: Any,
        num_epochs: int = 0,
        feed_timeout: float = 600,
        qname: str = "input",
        *,
        wait: bool = True,
    ) -> Future[None] | None:
        """Feed the rows of an RDD or DataFrame to the nodes, and wait until they are consumed.

        Ctrl-C stops the feed. The cluster keeps running.

        Parameters
        ----------
        dataRDD : pyspark.RDD or pyspark.sql.DataFrame
            A DStream also works, but is deprecated: see `train_stream`. Its rows are fed as they
            arrive, and the call does not wait for them.
        num_epochs : int
            Number of times the rows are repeated. 0 (default) means 10, with a warning.
        feed_timeout : float
            Seconds without progress of a node until the feed fails. Default 600.
        qname : str
        wait : bool
            If true (default), wait; otherwise return a future. The future of a DStream is done
            when the cluster ends, or at the first error of a feed. Batches that arrive during or
            after `shutdown` are dropped.

        Raises
        ------
        StateError
            The cluster reads its own data, or has ended.
        NodeFailed, NodeLost, FeedTimeout
            A node failed, was lost, or made no progress.

        See Also
        --------
        tensorflowonspark.TFCluster.TFCluster.train
        """
        self._require_feeding()
        check_seconds("feed_timeout", feed_timeout)
        if isinstance(num_epochs, bool) or num_epochs < 0:
            raise errors.UsageError(f"invalid num_epochs {num_epochs!r}: expected 0 or more")
        if num_epochs == 0:
            num_epochs = _EPOCHS
            warnings.warn(
                f"num_epochs=0 means {_EPOCHS} epochs; pass the number of epochs", stacklevel=2
            )
        inbox_addresses = feeding.inbox_addresses(self)
        if feeding.is_stream(dataRDD):
            fed = feeding.feed_stream(
                self, dataRDD, lambda rdd: self.train(rdd, num_epochs, feed_timeout, qname)
            )
            return None if wait else fed
        report_retry = feeding.retry_reporter(self.server.address, self.server.secret)
        work = feeding.training(
            dataRDD, num_epochs, inbox_addresses, feed_timeout, qname, report_retry
        )
        return self._feed(work, wait)

    def _feed(self, work: Any, wait: bool) -> Future[None] | None:
        """Run `work` as a Spark job; it returns the first error of the feed, or None."""
        job = Job(self._application, f"{self.name}: feeding", work)
        self._jobs.add(job)
        self.phases.feed_began()
        if self.phase.is_end:  # failed after the check in `_require_feeding`
            job.cancel()

        def follow() -> None:
            try:
                self._raise_errors(job)
            finally:
                self._trained = time.monotonic()
                self._jobs.discard(job)
                self.phases.feed_ended()

        future = jobs.in_background(follow, "feed")
        return jobs.wait(future, job.cancel) if wait else future

    def _raise_errors(self, job: Job) -> None:
        try:
            problem = job.future.result()
        except Exception as error:
            # The node also reports its error to the driver, with more detail: wait for that.
            self.phases.wait(lambda phase: phase.is_end, 2.0)
            if self.error is not None:
                raise self.error from None
            if job.cancelled and self.phase in SHUT_DOWN:
                raise self._not_feedable() from error
            raise startup.feeding_error(error, cancelled=job.cancelled) from error
        if problem is not None:
            if isinstance(problem, (errors.NodeFailed, errors.NodeLost)):
                self.phases.wait(lambda phase: phase.is_end, 5.0)
            if isinstance(problem, errors.NodeLost) and self.phase in SHUT_DOWN:
                raise self._not_feedable() from problem
            raise self.error or problem

    def train_stream(
        self,
        stream: Any,
        feed_timeout: float = 600,
        qname: str = "input",
        **options: Any,
    ) -> Any:
        """Feed each micro-batch of a streaming DataFrame as it arrives.

        Parameters
        ----------
        stream : pyspark.sql.DataFrame
            A DataFrame of Structured Streaming: ``isStreaming`` is true.
        feed_timeout : float
            Seconds without progress of a node until the feed fails. Default 600.
        qname : str
        **options
            Options of Spark's ``writeStream``, such as ``checkpointLocation="..."``. ``trigger``
            is a dict with the arguments of its ``trigger`` method.

        Returns
        -------
        pyspark.sql.streaming.StreamingQuery
            The query runs in the background. ``stop()`` it before `shutdown`. If a node fails,
            `shutdown` raises the error and the query ends. ``query.exception()`` has the error
            if the query was feeding that node.

        Raises
        ------
        StateError
            The cluster reads its own data, or has ended.
        UsageError
            `stream` is not a streaming DataFrame.
        Unsupported
            The session uses Spark Connect.
        """
        self._require_feeding()
        check_seconds("feed_timeout", feed_timeout)
        if self.sc is None:
            raise errors.Unsupported(
                "train_stream does not support Spark Connect",
                fix="use a classic session, such as tfd.spark.session()",
            )
        if not getattr(stream, "isStreaming", False):
            raise errors.UsageError(
                f"invalid stream: expected a streaming DataFrame, got {type(stream).__name__}",
                fix="create one with spark.readStream; for an RDD or DataFrame use train(...)",
            )

        return feeding.feed_batches(self.train, self.wait, stream, feed_timeout, qname, **options)

    def inference(
        self,
        dataRDD: Any,
        feed_timeout: float = 600,
        qname: str = "input",
        *,
        schema: Any = None,
    ) -> Any:
        """Return the nodes' results for the rows of `dataRDD`, one per row, in order.

        The result is lazy: nothing is computed until an action is called on it.

        Parameters
        ----------
        dataRDD : pyspark.RDD or pyspark.sql.DataFrame
        feed_timeout : float
            Seconds without progress of a node until the feed fails. Default 600.
        qname : str
        schema : pyspark.sql.types.StructType or str, optional
            Columns of the result, such as ``"guess long, scores array<float>"``. Requires a
            DataFrame. The result is then a DataFrame, and Arrow carries rows and results. For one
            column a node returns values. For several it returns tuples or lists in their order,
            dicts, or Rows. Default: an RDD of the nodes' results.

        Returns
        -------
        pyspark.RDD or pyspark.sql.DataFrame

        Raises
        ------
        StateError
            The cluster reads its own data, or has ended.
        UsageError
            `schema` was passed without a DataFrame, or Arrow does not support one of its columns.

        See Also
        --------
        tensorflowonspark.TFCluster.TFCluster.inference
        """
        self._require_feeding()
        check_seconds("feed_timeout", feed_timeout)
        inbox_addresses = feeding.inbox_addresses(self)
        return feeding.inference(dataRDD, self, inbox_addresses, feed_timeout, qname, schema)

    def shutdown(
        self,
        ssc: Any = None,
        grace_secs: float = 0,
        timeout: float = 259200,
        *,
        stop_spark: bool = False,
        wait: bool = True,
    ) -> Future[None] | None:
        """Wait until the nodes finish, then stop them.

        With ``InputMode.SPARK`` the nodes are notified that no more rows follow. With
        ``InputMode.TENSORFLOW`` the call waits for them. When the workers' functions have
        returned, parameter servers and evaluator are stopped. The SparkContext keeps running,
        unless `stop_spark` is set and `timeout` passes.

        Parameters
        ----------
        ssc : StreamingContext, optional
            The context of DStreams. It is stopped when the nodes need no more rows.
        grace_secs : float
            Seconds for which the evaluator may run on after the workers; it may end earlier.
        timeout : float
            Seconds for the whole shutdown; -1 for no limit. Default: three days.
        stop_spark : bool
            Whether to stop the Spark application when `timeout` has passed. Default false.
            TensorFlowOnSpark always stops it, and exits Python.
        wait : bool
            If true (default), wait; otherwise return a future. Ctrl-C ends the wait at once. A
            cluster that waits for its workers then keeps running.

        Raises
        ------
        TimeLimit
            Nodes still ran after `timeout` seconds and were stopped.
        NodeFailed, NodeLost
            The error that the cluster failed with.
        Unsupported
            `stop_spark` with Spark Connect.
        SparkError
            A batch of `ssc` failed. The nodes have finished anyway.

        See Also
        --------
        tensorflowonspark.TFCluster.TFCluster.shutdown
        """
        drain = driver_shutdown.GracefulShutdown(self, ssc, grace_secs, timeout, stop_spark)
        future = jobs.in_background(drain.run, "shutdown")
        return jobs.wait(future, drain.cancel_wait) if wait else future

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the cluster has ended; return False after `timeout` seconds.

        Ctrl-C interrupts the wait.
        """
        check_timeout(timeout)
        return self.phases.wait(lambda phase: phase.is_end, timeout)

    def _require_feeding(self) -> None:
        if self.input_mode is not InputMode.SPARK:
            raise errors.StateError(
                "this cluster reads its own data and cannot be fed",
                fix="start it with run(..., input_mode=InputMode.SPARK)",
            )
        if self.error is not None:
            raise self.error
        if self.phase not in (Phase.RUNNING, Phase.FEEDING):
            raise self._not_feedable()

    def _not_feedable(self) -> errors.StateError:
        return errors.StateError(
            f"cluster {self.name!r} is {self.phase} and accepts no rows",
            fix="start a new cluster with TFCluster.run(...)",
        )


def run(
    sc: Any,
    map_fun: Any,
    tf_args: Any,
    num_executors: int,
    num_ps: int = 0,
    tensorboard: bool = False,
    input_mode: int = InputMode.TENSORFLOW,
    log_dir: str | None = None,
    driver_ps_nodes: bool = False,
    master_node: str | None = None,
    reservation_timeout: float = 600,
    queues: Sequence[str] = ("input", "output", "error"),
    eval_node: bool = False,
    release_port: bool = True,
    *,
    wait: bool = True,
    name: str | None = None,
    heartbeat_limit: float = 30.0,
) -> Any:
    """Start a cluster on Spark's executors and call ``map_fun(tf_args, ctx)`` in each node.

    Parameters
    ----------
    sc : pyspark.SparkContext or pyspark.sql.SparkSession
        With a Spark Connect session only DataFrames can be fed.
    map_fun : callable
        Takes `tf_args` and a `TFNodeContext`.
    tf_args
        Arguments parsed by argparse, or a list, which becomes ``sys.argv`` in the nodes.
    num_executors : int
        Number of nodes, of all roles.
    num_ps : int
        Number of parameter servers among them. Default 0.
    tensorboard : bool
        Whether to run TensorBoard next to the chief, or the first worker.
    input_mode : InputMode
        Default: ``InputMode.TENSORFLOW``, the function reads its own data.
    log_dir : str, optional
        Event files that TensorBoard shows. Default: ``tensorboard`` in the executor's directory.
    driver_ps_nodes : bool
        Whether parameter servers run on the host of the notebook. They count in `num_executors`.
    master_node : {"chief", "master"}, optional
        Role of the first worker.
    reservation_timeout : float
        Seconds until all nodes must have started. Default 600.
    queues : sequence of str
    eval_node : bool
        Whether one node is an evaluator.
    release_port : bool
        Whether the node's port is free when the function is called (default). If false,
        ``ctx.tmp_socket`` reserves the port until the function calls ``ctx.release_port()``.
    wait : bool
        If true (default), wait until all nodes run; otherwise return a future of the cluster.
    name : str, optional
        Name in views. Default ``"spark"``, with a number if that name is taken.
    heartbeat_limit : float
        Seconds without a heartbeat, 3 or more. A node that receives no message from the driver for
        this time stops. A node that sends none counts as lost. Until then, broken connections are
        opened again. Default 30.

    Returns
    -------
    TFCluster or concurrent.futures.Future of TFCluster

    Raises
    ------
    NotEnoughSlots
        Spark cannot run all nodes at the same time, or other clusters hold slots. Nothing was
        started.
    ReservationLimit
        Not all nodes started in time.
    NodeFailed, NodeLost
        A node failed or was lost before all nodes ran.
    Unsupported
        Dynamic allocation is enabled. With ``InputMode.SPARK`` also ``spark.speculation=true``,
        which would feed rows twice.
    UsageError, NotSerializable
        An argument is invalid, or cannot be serialized.

    See Also
    --------
    tensorflowonspark.TFCluster.run
    """
    check_seconds("reservation_timeout", reservation_timeout)
    spark_application = application.of(sc)
    mode = InputMode(input_mode)
    assignments = roles.assign(num_executors, num_ps, master_node, eval_node, driver_ps_nodes)
    pickled_function = startup.pickled(map_fun, tf_args)
    limit = startup.heartbeat_limit(heartbeat_limit)

    def plan_of(cluster: TFCluster) -> Plan:
        return Plan(
            cluster=cluster.cluster_id,
            nodes=assignments,
            driver=cluster.server.address,
            secret=cluster.server.secret,
            closure=pickled_function,
            input_mode=mode.name,
            queues=tuple(queues),
            default_fs=cluster.defaultFS,
            release_port=release_port,
            heartbeat_limit=limit,
            tensorboard=(log_dir or "tensorboard") if tensorboard else "",
        )

    def start() -> TFCluster:
        with _start_lock:
            on_executors = sum(not each.on_driver for each in assignments)
            check.require_slots(sc, on_executors, is_fed=mode is InputMode.SPARK)
            if interrupted.is_set():
                raise errors.SparkError("the start was interrupted")
            cluster = TFCluster(
                spark_application, plan_of, assignments, mode, name, limit, secret.result()
            )
        cluster.serves = map_fun is serve
        clusters.append(cluster)
        if interrupted.is_set():
            interrupt()
        reached = cluster.phases.wait(
            lambda phase: phase not in (Phase.RESERVING, Phase.STARTING), reservation_timeout
        )
        if not reached:
            cluster.fail(startup.reservation_limit(cluster.nodes, reservation_timeout))
        if cluster.error is not None:
            raise cluster.error
        return cluster

    def interrupt() -> None:
        interrupted.set()
        for cluster in clusters:
            cluster.fail(errors.SparkError("the start was interrupted"))

    # The package cryptography is imported while Spark is checked.
    secret = jobs.in_background(Secret.new, "secret")
    clusters: list[TFCluster] = []
    interrupted = threading.Event()
    future = jobs.in_background(start, "start")
    return jobs.wait(future, interrupt) if wait else future
