"""Shutdown of a cluster on Spark: the workers finish first, then the nodes that serve them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfd_notebook import errors
from tfd_notebook.model.spec import check_seconds
from tfd_notebook.spark import roles
from tfd_notebook.spark.driver.node_registry import Node
from tfd_notebook.spark.driver.phases import Phase
from tfd_notebook.spark.roles import InputMode

if TYPE_CHECKING:
    from tfd_notebook.spark.driver.cluster import SparkClusterBase

#: Timeout in seconds for nodes to end after the order to stop. They are killed after 3 s.
_STOP_SECONDS = 15.0
_NO_LIMIT = float("inf")
#: Maximum length in characters of Java's error message.
_MAX_CHARS = 4000


class GracefulShutdown:
    """A call of ``shutdown``.

    Parameters
    ----------
    cluster : TFCluster
    ssc : StreamingContext or None
    grace_secs, timeout : float
        Seconds; a timeout of -1 means no limit.
    stop_spark : bool
        Whether to stop the Spark application when `timeout` has passed.

    Raises
    ------
    UsageError
        The number of seconds is invalid.
    Unsupported
        `stop_spark` with Spark Connect.
    """

    def __init__(
        self,
        cluster: SparkClusterBase,
        ssc: Any,
        grace_secs: float,
        timeout: float,
        stop_spark: bool,
    ) -> None:
        check_seconds("grace_secs", grace_secs, 0)
        if timeout != -1:  # no limit
            check_seconds("timeout", timeout, 0)
        if stop_spark and cluster.sc is None:
            raise errors.Unsupported(
                "shutdown(stop_spark=True) failed: Spark Connect has no SparkContext to stop",
                fix="call shutdown(...) without stop_spark, then session.stop()",
            )
        self._cluster = cluster
        self._stop_spark = stop_spark
        self._ssc = ssc
        self._grace = grace_secs
        self._timeout = timeout
        self._deadline = _NO_LIMIT if timeout == -1 else time.monotonic() + timeout
        self._wait_cancelled = threading.Event()

    def cancel_wait(self) -> None:
        """Stop waiting for the workers; the cluster keeps running."""
        self._wait_cancelled.set()
        self._cluster.phases.wake_waiters()

    def run(self) -> None:
        """Wait for the nodes' functions, then stop the nodes."""
        if self._cluster.phase is Phase.STOPPED:
            return
        problem = self._await_stream() if self._ssc is not None else None
        self._drain()
        if problem is not None:
            raise errors.SparkError(
                f"a batch of the stream failed: {str(problem)[:_MAX_CHARS]}",
                fix="fix the computation of its rows; the nodes have ended",
            ) from problem

    def _drain(self) -> None:
        cluster = self._cluster
        if cluster.serves:
            cluster.stop_coordinator()
        elif cluster.input_mode is InputMode.SPARK:
            self._await(lambda: cluster.phase is not Phase.FEEDING, cluster.fed)
        else:
            self._await(self._have_ended(cluster.fed), cluster.fed)
        if self._wait_cancelled.is_set():
            return
        moved = cluster.phases.move(Phase.DRAINING, "waiting for the nodes' functions to return")
        if not moved and cluster.phase not in (Phase.DRAINING, Phase.FAILED):
            return
        self._raise_failure()
        if cluster.serves:
            self._stop()
            return
        cluster.server.order("finish", cluster.fed)
        self._await(self._have_ended(cluster.fed), cluster.fed)
        if self._wait_cancelled.is_set():
            return
        evaluators = [n for n in cluster.nodes if n.assignment.role == roles.EVALUATOR]
        cluster.phases.wait_until(self._have_ended(evaluators), min(self._grace, self._remaining()))
        self._raise_failure()
        self._stop()

    def _stop(self) -> None:
        cluster = self._cluster
        ended = cluster.end(_STOP_SECONDS, "the cluster is shut down")
        ended.result()
        cluster.phases.move(Phase.STOPPED, "")
        self._raise_failure()

    def _await(self, reached: Callable[[], bool], nodes: Sequence[Node]) -> None:
        cluster = self._cluster
        cluster.phases.wait_until(
            lambda: reached() or cluster.phase.is_end or self._wait_cancelled.is_set(),
            self._remaining(),
        )
        self._raise_failure()
        if not reached() and not self._wait_cancelled.is_set() and not cluster.phase.is_end:
            names = ", ".join(n.assignment.name for n in nodes if not n.function_ended)
            error = errors.TimeLimit(
                f"{names} did not end within {self._timeout:g} s; the nodes were stopped",
                fix="use a longer timeout=, or see their output with cluster.logs()",
            )
            cluster.fail(error)
            if self._stop_spark:
                cluster.sc.cancelAllJobs()
                cluster.sc.stop()
            raise error

    def _await_stream(self) -> Exception | None:
        """Wait for the StreamingContext, and stop it when the nodes need no more rows.

        Return the error of a failed batch.
        """
        try:
            while not self._wait_cancelled.is_set() and not self._ssc.awaitTerminationOrTimeout(
                1.0
            ):
                cluster = self._cluster
                if cluster.server.done or cluster.phase.is_end or self._remaining() <= 0:
                    self._ssc.stop(False, False)  # do not process the waiting batches
        except Exception as error:  # raised by Java
            self._ssc.stop(False, False)
            return error
        return None

    def _have_ended(self, nodes: Sequence[Node]) -> Callable[[], bool]:
        return lambda: all(node.function_ended for node in nodes)

    def _remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _raise_failure(self) -> None:
        if self._cluster.error is not None:
            raise self._cluster.error
