"""TensorFlow's nodes on the executors of Spark: start them, feed them, end them."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from tfd_notebook import errors
from tfd_notebook.spark.driver import application, feeding, jobs, roles, startup
from tfd_notebook.spark.driver import shutdown as driver_shutdown
from tfd_notebook.spark.driver.coordinator import CoordinatedSparkCluster, serve
from tfd_notebook.spark.driver.jobs import Job
from tfd_notebook.spark.driver.launch_plan import Plan
from tfd_notebook.spark.driver.phases import SHUT_DOWN, Phase
from tfd_notebook.spark.modes import InputMode
from tfd_notebook.spark.preflight import check

__all__ = ["InputMode", "TFCluster", "run", "serve"]

#: How often the rows are repeated where nobody says.
_EPOCHS = 10
#: Held from looking for free slots until the cluster that takes them is known.
_one_at_a_time = threading.Lock()


class TFCluster(CoordinatedSparkCluster):
    """A running cluster; `run` makes it.

    Attributes
    ----------
    name : str
        Unlike that of any other living cluster of this process.
    cluster_id : int
    cluster_info : list of dict
        A node each: ``executor_id`` (its number), ``host``, ``job_name``, ``task_index``,
        ``port``, ``pid``, ``executor`` (Spark's name), ``state``, ``addr`` (path of the Unix
        socket that it is fed through), ``authkey`` (always empty: no secret is shown), ``tb_pid``
        and ``tb_port`` (process and port of its TensorBoard; 0 where it has none).
    cluster_meta : dict
        ``id``, ``cluster_template``, ``num_executors``, ``default_fs``, ``working_dir``,
        ``server_addr``, ``release_port``.
    defaultFS, working_dir : str
    input_mode : InputMode
    nodeRDD : pyspark.RDD or pyspark.sql.DataFrame
        The nodes' numbers.
    num_executors : int
        Nodes, those beside the notebook included.
    queues : list of str
    sc : pyspark.SparkContext or None
        Never stopped from here. None with Spark Connect.
    server
        The driver's end of the channels to the nodes. ``done`` is true when no more rows are
        wanted. ``stop()`` sets it, and `shutdown` then stops its StreamingContext.
    error : TfdError or None
        Why it failed.

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
        """Feed the rows of an RDD or DataFrame to the nodes, until they have taken all.

        Ctrl-C ends the feeding, and nothing else.

        Parameters
        ----------
        dataRDD : pyspark.RDD or pyspark.sql.DataFrame
            A DStream as well, which is deprecated: see `train_stream`. Its rows are fed as they
            come, and nothing is waited for.
        num_epochs : int
            How often the rows are repeated. 0 (default) means 10, with a warning.
        feed_timeout : float
            Seconds that a node may take without having taken anything. Default 600.
        qname : str
        wait : bool
            Whether to wait (default), or return the future of it. The future of a DStream ends
            with the cluster, or with the first error of a feed. Batches that arrive during or
            after `shutdown` are dropped.

        Raises
        ------
        StateError
            The cluster reads its data itself, or has ended.
        NodeFailed, NodeLost, FeedTimeout
            What became of a node.

        See Also
        --------
        tensorflowonspark.TFCluster.TFCluster.train
        """
        self._must_feed()
        if isinstance(num_epochs, bool) or num_epochs < 0:
            raise errors.UsageError(f"num_epochs={num_epochs!r} must be 0 or more")
        if num_epochs == 0:
            num_epochs = _EPOCHS
            warnings.warn(
                f"num_epochs=0 means {_EPOCHS} epochs; say how many you want", stacklevel=2
            )
        places = feeding.places(self)
        if feeding.is_stream(dataRDD):
            fed = feeding.feed_stream(self, dataRDD, num_epochs, feed_timeout, qname)
            return None if wait else fed
        report_retry = feeding.retry_reporter(self.server.address, self.server.secret)
        work = feeding.training(dataRDD, num_epochs, places, feed_timeout, qname, report_retry)
        return self._feed(work, wait)

    def _feed(self, work: Any, wait: bool) -> Future[None] | None:
        """Run a job that feeds; `work` returns the first error that it met, or None."""
        job = Job(self._application, f"{self.name}: feeding", work)
        self._jobs.add(job)
        self._phases.feed_began()
        if self.phase.is_end:  # it failed meanwhile
            job.cancel()

        def follow() -> None:
            try:
                self._judge(job)
            finally:
                self._trained = time.monotonic()
                self._jobs.discard(job)
                self._phases.feed_ended()

        future = jobs.in_background(follow, "feed")
        return jobs.wait(future, job.cancel) if wait else future

    def _judge(self, job: Job) -> None:
        try:
            problem = job.future.result()
        except Exception as error:
            # The driver hears of a node's error by itself, and that says more.
            self._phases.wait(lambda phase: phase.is_end, 2.0)
            if self.error is not None:
                raise self.error from None
            if job.cancelled and self.phase in SHUT_DOWN:
                raise self._takes_no_rows() from error
            raise startup.why_feeding_failed(error, cancelled=job.cancelled) from error
        if problem is not None:
            if isinstance(problem, (errors.NodeFailed, errors.NodeLost)):
                self._phases.wait(lambda phase: phase.is_end, 5.0)
            if isinstance(problem, errors.NodeLost) and self.phase in SHUT_DOWN:
                raise self._takes_no_rows() from problem
            raise self.error or problem

    def train_stream(
        self,
        stream: Any,
        feed_timeout: float = 600,
        qname: str = "input",
        **options: Any,
    ) -> Any:
        """Feed each micro-batch of a streaming DataFrame as it comes.

        Parameters
        ----------
        stream : pyspark.sql.DataFrame
            Of Structured Streaming: ``isStreaming`` is true.
        feed_timeout : float
            Seconds that a node may take without having taken anything. Default 600.
        qname : str
        **options
            Of Spark's ``writeStream``, such as ``checkpointLocation="..."``; ``trigger`` is a dict
            with the arguments of its method of that name.

        Returns
        -------
        pyspark.sql.streaming.StreamingQuery
            It runs in the background: ``stop()`` it before `shutdown`, which raises what a node
            has failed of. That ends the query, too: with ``query.exception()`` where the node was
            being fed.

        Raises
        ------
        StateError
            The cluster reads its data itself, or has ended.
        UsageError
            `stream` is no streaming DataFrame.
        Unsupported
            The cluster is reached by Spark Connect.
        """
        self._must_feed()
        if self.sc is None:
            raise errors.Unsupported(
                "with Spark Connect the micro-batches of a stream do not come to this process",
                fix="use a SparkSession of this process",
            )
        if not getattr(stream, "isStreaming", False):
            raise errors.UsageError(
                f"{type(stream).__name__} is no streaming DataFrame",
                fix="spark.readStream makes one; train(...) takes what is there already",
            )

        return feeding.feed_batches(self, stream, feed_timeout, qname, **options)

    def inference(
        self,
        dataRDD: Any,
        feed_timeout: float = 600,
        qname: str = "input",
        *,
        schema: Any = None,
    ) -> Any:
        """Return the nodes' results for the rows of `dataRDD`, one for each, in order.

        Nothing is computed before an action is called on what is returned.

        Parameters
        ----------
        dataRDD : pyspark.RDD or pyspark.sql.DataFrame
        feed_timeout : float
            Seconds that a node may take without any progress. Default 600.
        qname : str
        schema : pyspark.sql.types.StructType or str, optional
            Columns of the results of a DataFrame, such as ``"guess long, scores array<float>"``:
            they are then a DataFrame, and rows and results go by Arrow. With one column a result
            is its value; with more it is a tuple or list in their order, a dict or a Row. Default:
            the results are an RDD of what the nodes gave.

        Returns
        -------
        pyspark.RDD or pyspark.sql.DataFrame

        Raises
        ------
        StateError
            The cluster reads its data itself, or has ended.
        UsageError
            A schema for what is no DataFrame, or one with columns that Arrow cannot carry.

        See Also
        --------
        tensorflowonspark.TFCluster.TFCluster.inference
        """
        self._must_feed()
        places = feeding.places(self)
        return feeding.inference(dataRDD, self, places, feed_timeout, qname, schema)

    def shutdown(
        self,
        ssc: Any = None,
        grace_secs: float = 0,
        timeout: float = 259200,
        *,
        stop_spark: bool = False,
        wait: bool = True,
    ) -> Future[None] | None:
        """Let the nodes come to their end, and end them.

        With ``InputMode.SPARK`` nodes are told that no rows will come any more; with
        ``InputMode.TENSORFLOW`` they are waited for. When the workers' functions have returned,
        parameter servers and evaluator are ended. The SparkContext keeps running, unless
        `stop_spark` is set and `timeout` passes.

        Parameters
        ----------
        ssc : StreamingContext, optional
            Of DStreams: waited for, and stopped when the nodes want no more rows.
        grace_secs : float
            Seconds that an evaluator has, once the workers are through; less where it ends before.
        timeout : float
            Seconds for all of it; -1 for no limit. Default: three days.
        stop_spark : bool
            Whether the Spark application is ended when `timeout` has passed. Default false.
            TensorFlowOnSpark always ends it, and leaves Python.
        wait : bool
            Whether to wait (default), or return the future of it. Ctrl-C ends the wait at once;
            a cluster that waits for its workers goes on.

        Raises
        ------
        TimeLimit
            Nodes still ran after `timeout` seconds; they were ended.
        NodeFailed, NodeLost
            What the cluster has failed of.
        Unsupported
            `stop_spark` with Spark Connect.
        SparkError
            A batch of `ssc` failed; the nodes have come to their end all the same.

        See Also
        --------
        tensorflowonspark.TFCluster.TFCluster.shutdown
        """
        drain = driver_shutdown.GracefulShutdown(self, ssc, grace_secs, timeout, stop_spark)
        future = jobs.in_background(drain.run, "shutdown")
        return jobs.wait(future, drain.abandon) if wait else future

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the cluster has ended; False after `timeout` seconds. Answers Ctrl-C."""
        return self._phases.wait(lambda phase: phase.is_end, timeout)

    def _must_feed(self) -> None:
        if self.input_mode is not InputMode.SPARK:
            raise errors.StateError(
                "this cluster reads its data itself",
                fix="run(..., input_mode=InputMode.SPARK) to feed it",
            )
        if self.error is not None:
            raise self.error
        if self.phase not in (Phase.RUNNING, Phase.FEEDING):
            raise self._takes_no_rows()

    def _takes_no_rows(self) -> errors.StateError:
        return errors.StateError(
            f"the cluster {self.name!r} is {self.phase} and takes no rows",
            fix="TFCluster.run(...) starts a new one",
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
        With a session of Spark Connect, only DataFrames are fed.
    map_fun : callable
        Takes `tf_args` and a `TFNodeContext`.
    tf_args
        Arguments of an argparse, or a list, which becomes ``sys.argv`` in the nodes.
    num_executors : int
        Nodes in all.
    num_ps : int
        Parameter servers among them. Default 0.
    tensorboard : bool
        Whether TensorBoard runs beside the chief, or the first worker.
    input_mode : InputMode
        Default: the function reads its data itself.
    log_dir : str, optional
        Event files that TensorBoard shows. Default: ``tensorboard`` in the executor's directory.
    driver_ps_nodes : bool
        Whether parameter servers run beside the notebook; they count in `num_executors`.
    master_node : {"chief", "master"}, optional
        Name of a node that leads.
    reservation_timeout : float
        Seconds for all nodes to come up. Default 600.
    queues : sequence of str
    eval_node : bool
        Whether one node is an evaluator.
    release_port : bool
        Whether the node's port is free when the function is called (default). If not,
        ``ctx.tmp_socket`` holds it until the function calls ``ctx.release_port()``, and no other
        program can take it meanwhile.
    wait : bool
        Whether to wait until all nodes run (default), or return the future of the cluster.
    name : str, optional
        For views. Default ``"spark"``, with a number where that is taken.
    heartbeat_limit : float
        Seconds after which nodes end that do not hear of the driver, and count as lost of which
        the driver does not hear; 3 or more. A connection that breaks is made again until then.
        Default 30.

    Returns
    -------
    TFCluster or concurrent.futures.Future of TFCluster

    Raises
    ------
    NotEnoughSlots
        Spark cannot run so many nodes at the same time, or other clusters hold slots; nothing was
        started.
    ReservationLimit
        Not all nodes came up in time.
    NodeFailed, NodeLost
        What became of a node before all ran.
    Unsupported
        Dynamic allocation. With ``InputMode.SPARK`` also ``spark.speculation=true``, which would
        feed rows twice.
    UsageError, NotSerializable
        An argument that cannot be meant, or cannot travel.

    See Also
    --------
    tensorflowonspark.TFCluster.run
    """
    on = application.of(sc)
    mode = InputMode(input_mode)
    assignments = roles.assign(num_executors, num_ps, master_node, eval_node, driver_ps_nodes)
    closure = startup.pickled(map_fun, tf_args)
    limit = startup.heartbeat_limit(heartbeat_limit)

    def plan_of(cluster: TFCluster) -> Plan:
        return Plan(
            cluster=cluster.cluster_id,
            nodes=assignments,
            driver=cluster.server.address,
            secret=cluster.server.secret,
            closure=closure,
            input_mode=mode.name,
            queues=tuple(queues),
            default_fs=cluster.defaultFS,
            release_port=release_port,
            heartbeat_limit=limit,
            tensorboard=(log_dir or "tensorboard") if tensorboard else "",
        )

    def start() -> TFCluster:
        with _one_at_a_time:
            on_executors = sum(not each.on_driver for each in assignments)
            check.needed(sc, on_executors, is_fed=mode is InputMode.SPARK)
            if interrupted.is_set():
                raise errors.SparkError("the start was interrupted")
            cluster = TFCluster(on, plan_of, assignments, mode, name, limit)
        cluster.serves = map_fun is serve
        begun.append(cluster)
        if interrupted.is_set():
            give_up()
        reached = cluster._phases.wait(
            lambda phase: phase not in (Phase.RESERVING, Phase.STARTING), reservation_timeout
        )
        if not reached:
            cluster.fail(startup.too_late(cluster.nodes, reservation_timeout))
        if cluster.error is not None:
            raise cluster.error
        return cluster

    def give_up() -> None:
        interrupted.set()
        for cluster in begun:
            cluster.fail(errors.SparkError("the start was interrupted"))

    begun: list[TFCluster] = []
    interrupted = threading.Event()
    future = jobs.in_background(start, "start")
    return jobs.wait(future, give_up) if wait else future
