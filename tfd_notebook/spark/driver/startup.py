"""Start of a cluster on Spark: argument checks, node server, launch, and the errors of a start."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from tfd_notebook import errors
from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.model.spec import check_seconds
from tfd_notebook.spark.driver.application import Application
from tfd_notebook.spark.driver.jobs import Job, in_background
from tfd_notebook.spark.driver.node_registry import Node, NodeServer
from tfd_notebook.spark.executor import executor, fork_server, launch_plan
from tfd_notebook.spark.executor.barrier_start import Start, start_node
from tfd_notebook.spark.executor.driver_link import HEARTBEAT_SECONDS
from tfd_notebook.spark.executor.launch_plan import Plan

#: Minimum heartbeat limit in seconds: three heartbeats.
_MIN_LIMIT = 3 * HEARTBEAT_SECONDS
#: Maximum length in characters of Spark's error message.
_MAX_CHARS = 2000


def pickled(map_fun: Any, tf_args: Any) -> bytes:
    """Return the user's function and its arguments, pickled.

    Raises
    ------
    NotSerializable
    """
    import cloudpickle

    if not callable(map_fun):
        raise errors.UsageError(f"invalid map_fun {map_fun!r}: expected a callable")
    try:
        return bytes(cloudpickle.dumps((map_fun, tf_args)))
    except Exception as error:
        raise errors.NotSerializable(
            f"map_fun or tf_args cannot be pickled: {type(error).__name__}: {error}",
            fix="create datasets, models and connections inside the function",
        ) from error


def heartbeat_limit(seconds: Any) -> float:
    """Return the heartbeat limit as a float.

    Raises
    ------
    UsageError
        The value is not a finite number, or less than three heartbeats.
    """
    try:
        return float(check_seconds("heartbeat_limit", seconds, _MIN_LIMIT))
    except errors.UsageError as error:
        raise errors.UsageError(
            error.what,
            fix="pass a larger limit; nodes and driver send a heartbeat once a second, and the "
            "default is 30",
        ) from None


class Launch:
    """The Spark job that starts the nodes on executors, and the start of nodes on the driver.

    Parameters
    ----------
    application : Application
    plan : Plan
    node_server : NodeServer

    Attributes
    ----------
    numbers : pyspark.RDD or pyspark.sql.DataFrame
        The nodes' numbers, one in each partition.
    """

    def __init__(self, application: Application, plan: Plan, node_server: NodeServer) -> None:
        self._plan = plan
        self._node_server = node_server
        self._application = application
        self.numbers = application.numbers([node.node for node in plan.nodes if not node.on_driver])
        self._job: Job | None = None

    @property
    def slots_held(self) -> int:
        """Number of slots that nodes hold until they end."""
        return sum(
            self._plan.holds_slot(node) and not self._node_server.nodes[node.node].ended
            for node in self._plan.nodes
        )

    def placement_error(self) -> errors.SparkError | None:
        """Return the error for an executor that can receive rows but has no node on its host.

        Rows do not leave their host. Call this when all nodes have their executors.
        """
        if self._plan.input_mode != "SPARK":
            return None
        executors = self._application.executor_slots()
        nodes = [(node, self._node_server.nodes[node.node].executor) for node in self._plan.nodes]
        fed = {
            executors[executor_name][0]
            for node, executor_name in nodes
            if node.is_fed and executor_name in executors
        }
        for name, (host, slots) in executors.items():
            free = slots - sum(
                self._plan.holds_slot(node) and executor_name == name
                for node, executor_name in nodes
            )
            if free > 0 and host not in fed:
                return errors.SparkError(
                    f"no node that receives rows is on {host}, but executor {name} there has "
                    f"{free} free slot{'s' * (free > 1)}: Spark would send it rows, which do not "
                    "leave their host",
                    fix="use a larger num_executors, so that each host has workers; or fewer "
                    "executors; or executors of one core, which a parameter server fills",
                )
        return None

    def begin(self) -> Future[Any]:
        """Start the nodes, those on executors in a barrier stage; return its future.

        The stage lasts as long as a node that holds its slot.
        """
        host = self._application.addresses()[0]
        for node in self._plan.nodes:
            if node.on_driver:
                start = functools.partial(
                    start_node, self._plan, node, executor.on_driver, host, (), 0
                )
                in_background(start, "start")
        names = ", ".join(node.name for node in self._plan.nodes)
        nodes = self._application.in_barrier(self.numbers, Start(self._plan))
        self._job = Job(self._application, f"nodes {names}", nodes)
        return self._job.future

    def close(self) -> None:
        """Cancel the Spark job, which releases its slots."""
        if self._job is not None:
            self._job.cancel()


def import_tensorflow(sc: Any) -> None:
    """Import TensorFlow on every executor, in the process that nodes are forked from.

    Return at once. Errors are not reported: they occur again in a cluster that needs the import.

    Parameters
    ----------
    sc : pyspark.SparkContext
    """
    if slots := compat_pyspark.slots(sc):
        # A barrier stage: Spark may run single tasks one after another on the same executor.
        application = Application(sc)
        tasks = application.in_barrier(application.numbers(range(slots)), _start_fork_server)
        Job(application, "TensorFlow is imported", tasks)


def _start_fork_server(_: Iterable[int]) -> Iterator[int]:
    with contextlib.suppress(Exception):
        fork_server.start(executor.current(), launch_plan.node_environment({}, None))
    return iter(())


def launch_error(error: BaseException) -> errors.TfdError:
    """Return the error for a failed start, from Spark's error of the job."""
    if isinstance(error, errors.TfdError):
        return error
    text = str(error)
    lost = re.search(r"ExecutorLostFailure \(.*", text)
    if lost:
        return errors.NodeLost(
            f"an executor was lost while the nodes started: {lost[0][:_MAX_CHARS]}",
            fix="see the executor's log, and call TFCluster.run again",
        )
    if "BarrierJobSlotsNumberCheckFailed" in text or "SPARK-24819" in text:
        return errors.NotEnoughSlots(
            "Spark has fewer slots than the cluster has nodes",
            fix="use fewer nodes, or more executors and cores",
        )
    return errors.SparkError(
        f"Spark could not start the nodes: {text[:_MAX_CHARS]}", fix="see the executors' logs"
    )


def feeding_error(error: BaseException, *, cancelled: bool = False) -> errors.TfdError:
    """Return the error for a failed feed, from Spark's error of the job."""
    if isinstance(error, errors.TfdError):
        return error
    if cancelled:
        return errors.SparkError("the feed was cancelled", fix="call train(...) again")
    return errors.SparkError(
        f"Spark could not compute the rows: {str(error)[:_MAX_CHARS]}",
        fix="fix the computation of the rows and call train(...) again; the cluster still runs",
    )


def lost(node: Node) -> errors.NodeLost:
    """Return the error for a lost node."""
    lines = "\n".join(node.last_lines(20))
    tail = f"; the last lines of its log:\n{lines}" if lines else ""
    return errors.NodeLost(
        f"lost {node.assignment.name} on executor {node.executor} ({node.host}, pid {node.pid}): "
        f"{node.reason}{tail}",
        task=node.assignment.name,
        fix="start a new cluster with TFCluster.run(...); the other nodes were stopped",
    )


def started_twice(node: Node) -> errors.NodeLost:
    """Return the error for a node that Spark has started again."""
    return errors.NodeLost(
        f"Spark has started {node.assignment.name} again: an executor was lost while the "
        "nodes started",
        task=node.assignment.name,
        fix="start a new cluster with TFCluster.run(...)",
    )


def failed(node: Node) -> errors.NodeFailed:
    """Return the error for a node whose function raised."""
    return errors.NodeFailed(
        f"{node.error.rstrip()}\n(executor {node.executor}, {node.host}, pid {node.pid})",
        task=node.assignment.name,
        fix="fix the function and call TFCluster.run(...) again; the other nodes were stopped",
    )


def reservation_limit(nodes: Sequence[Node], timeout: float) -> errors.ReservationLimit:
    """Return the error for nodes that did not start in time."""
    missing = [n.assignment.name for n in nodes if not n.state]
    starting = [n.assignment.name for n in nodes if n.state in ("reserved", "starting")]
    message = f"{len(nodes) - len(missing)} of {len(nodes)} nodes registered within {timeout:g} s"
    if missing:
        message += f"; Spark has not started {', '.join(missing)}"
    elif starting:
        message += f"; {', '.join(starting)} did not start"
    return errors.ReservationLimit(
        message,
        fix="check in the Spark UI whether other jobs use the executors' cores, or use a longer "
        "reservation_timeout",
    )
