"""How a cluster on Spark ends: workers come to their end, then those that serve them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfd_notebook import errors
from tfd_notebook.spark.driver import roles
from tfd_notebook.spark.driver.node_registry import Node
from tfd_notebook.spark.driver.phases import Phase
from tfd_notebook.spark.modes import InputMode

if TYPE_CHECKING:
    from tfd_notebook.spark.TFCluster import TFCluster

#: Seconds for nodes to end when they are told to; they are killed after three.
_STOP_SECONDS = 15.0
_FOR_EVER = float("inf")
#: Characters of what Java says.
_MOST_WORDS = 4000


class GracefulShutdown:
    """One call of ``shutdown``.

    Parameters
    ----------
    cluster : TFCluster
    ssc : StreamingContext or None
    grace_secs, timeout : float
        Seconds; a timeout of -1 is none.
    stop_spark : bool
        Whether the Spark application is ended when `timeout` has passed.

    Raises
    ------
    UsageError
        An invalid number of seconds.
    Unsupported
        `stop_spark` with Spark Connect.
    """

    def __init__(
        self, cluster: TFCluster, ssc: Any, grace_secs: float, timeout: float, stop_spark: bool
    ) -> None:
        if grace_secs < 0:
            raise errors.UsageError(f"grace_secs={grace_secs!r} must be 0 or more seconds")
        if timeout < 0 and timeout != -1:
            raise errors.UsageError(f"timeout={timeout!r} must be 0 or more, or -1 for no limit")
        if stop_spark and cluster.sc is None:
            raise errors.Unsupported(
                "shutdown(stop_spark=True) failed: Spark Connect has no SparkContext to stop",
                fix="shutdown(...) without it, and session.stop()",
            )
        self._cluster = cluster
        self._stop_spark = stop_spark
        self._ssc = ssc
        self._grace = grace_secs
        self._timeout = timeout
        self._deadline = _FOR_EVER if timeout == -1 else time.monotonic() + timeout
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """Wait for the workers no more; the cluster goes on."""
        self._abandoned.set()
        self._cluster.wake_waiters()

    def run(self) -> None:
        """Do it."""
        if self._cluster.phase is Phase.STOPPED:
            return
        problem = self._await_stream() if self._ssc is not None else None
        self._drain()
        if problem is not None:
            raise errors.SparkError(
                f"a batch of the stream failed: {str(problem)[:_MOST_WORDS]}",
                fix="mend what makes its rows; the nodes had no others, and have ended",
            ) from problem

    def _drain(self) -> None:
        cluster = self._cluster
        if cluster.serves:
            cluster.let_go()
        elif cluster.input_mode is InputMode.SPARK:
            self._await("feeding", lambda: cluster.phase is not Phase.FEEDING, cluster.fed)
        else:
            self._await("their functions", self._are_over(cluster.fed), cluster.fed)
        if self._abandoned.is_set():
            return
        if cluster.move(Phase.DRAINING, "waiting for the nodes' functions to return"):
            pass
        elif cluster.phase not in (Phase.DRAINING, Phase.FAILED):
            return
        self._raise_failure()
        if cluster.serves:
            self._stop()
            return
        cluster.server.order("finish", cluster.fed)
        self._await("their functions", self._are_over(cluster.fed), cluster.fed)
        if self._abandoned.is_set():
            return
        evaluators = [n for n in cluster.nodes if n.assignment.role == roles.EVALUATOR]
        cluster.wait_until(self._are_over(evaluators), min(self._grace, self._left()))
        self._raise_failure()
        self._stop()

    def _stop(self) -> None:
        cluster = self._cluster
        ended = cluster.end(_STOP_SECONDS, "the cluster is shut down")
        ended.result()
        cluster.move(Phase.STOPPED, "")
        self._raise_failure()

    def _await(self, what: str, reached: Callable[[], bool], nodes: Sequence[Node]) -> None:
        cluster = self._cluster
        cluster.wait_until(
            lambda: reached() or cluster.phase.is_end or self._abandoned.is_set(), self._left()
        )
        self._raise_failure()
        if not reached() and not self._abandoned.is_set() and not cluster.phase.is_end:
            names = ", ".join(n.assignment.name for n in nodes if not n.is_over)
            error = errors.TimeLimit(
                f"{names} did not end within {self._timeout:g} s; the nodes were ended",
                fix="a longer timeout=, or see cluster.logs() for what they are doing",
            )
            cluster.fail(error)
            if self._stop_spark:
                cluster.sc.cancelAllJobs()
                cluster.sc.stop()
            raise error

    def _await_stream(self) -> Exception | None:
        """Wait for the StreamingContext, which is stopped when nobody wants rows any more.

        Returns what a batch has failed of.
        """
        try:
            while not self._abandoned.is_set() and not self._ssc.awaitTerminationOrTimeout(1.0):
                cluster = self._cluster
                if cluster.server.done or cluster.phase.is_end or self._left() <= 0:
                    self._ssc.stop(False, False)  # batches that wait would not be taken
        except Exception as error:  # Java's
            self._ssc.stop(False, False)
            return error
        return None

    def _are_over(self, nodes: Sequence[Node]) -> Callable[[], bool]:
        return lambda: all(node.is_over for node in nodes)

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _raise_failure(self) -> None:
        if self._cluster.error is not None:
            raise self._cluster.error
