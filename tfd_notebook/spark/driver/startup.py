"""How a cluster on Spark comes up: what is checked, pickled, listened for and launched."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from tfd_notebook import errors
from tfd_notebook.net import ports
from tfd_notebook.spark.driver import launch_plan
from tfd_notebook.spark.driver.application import Application
from tfd_notebook.spark.driver.jobs import Job
from tfd_notebook.spark.driver.launch_plan import Plan
from tfd_notebook.spark.driver.node_registry import Node, NodeServer
from tfd_notebook.spark.executor import executor
from tfd_notebook.spark.executor.barrier_start import Start
from tfd_notebook.spark.executor.driver_link import BEAT_SECONDS
from tfd_notebook.spark.executor.fork_server import ForkServerClient

#: Seconds that the heartbeat limit has to be at least: three beats.
_LEAST_LIMIT = 3 * BEAT_SECONDS
#: Characters of Spark's own words on a job that failed.
_MOST_WORDS = 2000


def pickled(map_fun: Any, tf_args: Any) -> bytes:
    """Return the user's function and its arguments as they travel.

    Raises
    ------
    NotSerializable
    """
    import cloudpickle

    if not callable(map_fun):
        raise errors.UsageError(f"map_fun={map_fun!r} is not callable")
    try:
        return bytes(cloudpickle.dumps((map_fun, tf_args)))
    except Exception as error:
        raise errors.NotSerializable(
            f"map_fun or tf_args cannot be pickled: {type(error).__name__}: {error}",
            fix="make datasets, models and connections inside the function",
        ) from error


def heartbeat_limit(seconds: Any) -> float:
    """Return the limit as it travels.

    Raises
    ------
    UsageError
        It is no number of seconds, or less than three beats.
    """
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not math.isfinite(seconds) or seconds < _LEAST_LIMIT:
        raise errors.UsageError(
            f"heartbeat_limit={seconds!r} must be {_LEAST_LIMIT:g} or more seconds",
            fix="nodes and driver hear of each other once a second; 30 is the default",
        )
    return float(seconds)


class Launch:
    """The job that starts the nodes on executors, and those beside the notebook.

    Parameters
    ----------
    application : Application
    plan : Plan
    steering : Steering

    Attributes
    ----------
    numbers : pyspark.RDD or pyspark.sql.DataFrame
        The nodes' numbers, one in each partition.
    """

    def __init__(self, application: Application, plan: Plan, steering: NodeServer) -> None:
        self._plan = plan
        self._beside = [node for node in plan.nodes if node.on_driver]
        self._held = {node.node: ports.reserve_port() for node in self._beside}
        self._steering = steering
        host = application.addresses()[0]
        elsewhere = {
            number: f"{host}:{held.getsockname()[1]}" for number, held in self._held.items()
        }
        place = executor.of_driver()
        for node in self._beside:
            said = launch_plan.reservation(node, place, elsewhere[node.node], None)
            steering.reserve(steering.nodes[node.node], {**said, "attempt": 0})
        numbers = [node.node for node in plan.nodes if not node.on_driver]
        self.numbers = application.numbers(numbers)
        self._application = application
        self._start = Start(plan, elsewhere)
        self._job: Job | None = None

    @property
    def slots_held(self) -> int:
        """How many slots nodes keep until they have ended."""
        return sum(
            self._plan.holds_slot(node) and not self._steering.nodes[node.node].ended
            for node in self._plan.nodes
        )

    def unfed(self) -> errors.SparkError | None:
        """Return the error for an executor that could get rows, and no node to give them to.

        Rows do not leave their host. To be called when all nodes have their executors.
        """
        if self._plan.input_mode != "SPARK":
            return None
        executors = self._application.executor_slots()
        nodes = [(node, self._steering.nodes[node.node].executor) for node in self._plan.nodes]
        fed = {executors[there][0] for node, there in nodes if node.is_fed and there in executors}
        for name, (host, slots) in executors.items():
            free = slots - sum(
                self._plan.holds_slot(node) and there == name for node, there in nodes
            )
            if free > 0 and host not in fed:
                return errors.SparkError(
                    f"no node that takes rows is on {host}, and executor {name} there has {free} "
                    f"free slot{'s' * (free > 1)}: Spark would give rows to it, which do not leave "
                    "their host",
                    fix="a larger num_executors, so that workers are on each host; or fewer "
                    "executors, or executors of one core, which a parameter server fills",
                )
        return None

    def begin(self) -> Future[Any]:
        """Have Spark start the nodes on executors; returns the future of the barrier stage.

        It lasts as long as a node that holds its slot.
        """
        names = ", ".join(node.name for node in self._plan.nodes)
        nodes = self._application.in_barrier(self.numbers, self._start)
        self._job = Job(self._application, f"nodes {names}", nodes)
        return self._job.future

    def start_beside(self) -> None:
        """Start the nodes beside the notebook, when the addresses of all are known."""
        if not self._held:
            return
        place = executor.of_driver()
        environment = launch_plan.environment_of(self._plan.environment, ())
        nodes = self._steering.nodes
        known = {number: node.address for number, node in nodes.items()}
        zygote = ForkServerClient(place, environment)
        try:
            for assignment in self._beside:
                held = self._held.pop(assignment.node)
                with held:
                    launch_plan.launch(
                        self._plan, assignment, place, zygote, environment, held, known
                    )
        finally:
            zygote.close()

    def close(self) -> None:
        """Give up what was held, and the slots."""
        while self._held:
            self._held.popitem()[1].close()
        if self._job is not None:
            self._job.cancel()


def why_it_failed(error: BaseException) -> errors.TfdError:
    """Return what Spark's error on the starting job means."""
    if isinstance(error, errors.TfdError):
        return error
    text = str(error)
    lost = re.search(r"ExecutorLostFailure \(.*", text)
    if lost:
        return errors.NodeLost(
            f"an executor was lost while the nodes started: {lost[0][:_MOST_WORDS]}",
            fix="look at the executor's log, and call TFCluster.run again",
        )
    if "BarrierJobSlotsNumberCheckFailed" in text or "SPARK-24819" in text:
        return errors.NotEnoughSlots(
            "Spark has not as many slots as the cluster has nodes",
            fix="fewer nodes, or more executors and cores",
        )
    return errors.SparkError(
        f"Spark could not start the nodes: {text[:_MOST_WORDS]}", fix="see the executors' logs"
    )


def why_feeding_failed(error: BaseException, *, cancelled: bool = False) -> errors.TfdError:
    """Return what the error of a job that fed means, and which may have been cancelled here."""
    if isinstance(error, errors.TfdError):
        return error
    if cancelled:
        return errors.SparkError("the feeding was cancelled", fix="call train(...) again")
    return errors.SparkError(
        f"Spark could not make the rows: {str(error)[:_MOST_WORDS]}",
        fix="the cluster lives: mend what makes the rows, and call train(...) again",
    )


def lost(node: Node) -> errors.NodeLost:
    """Return the error for a node that is gone."""
    lines = "\n".join(node.last_lines(20))
    tail = f"; the last lines of its log:\n{lines}" if lines else ""
    return errors.NodeLost(
        f"{node.assignment.name} on executor {node.executor} ({node.host}, pid {node.pid}) is "
        f"gone: {node.reason}{tail}",
        task=node.assignment.name,
        fix="the other nodes were stopped; TFCluster.run(...) starts a new cluster",
    )


def twice(node: Node) -> errors.NodeLost:
    """Return the error for a node that Spark has started a second time."""
    return errors.NodeLost(
        f"Spark has started {node.assignment.name} a second time: an executor was lost while the "
        "nodes started",
        task=node.assignment.name,
        fix="TFCluster.run(...) starts a new cluster",
    )


def failed(node: Node) -> errors.NodeFailed:
    """Return the error for a node whose function raised."""
    return errors.NodeFailed(
        f"{node.error.rstrip()}\n(executor {node.executor}, {node.host}, pid {node.pid})",
        task=node.assignment.name,
        fix="mend the function and call TFCluster.run(...) again: the other nodes were stopped",
    )


def too_late(nodes: Sequence[Node], timeout: float) -> errors.ReservationLimit:
    """Return the error for nodes that did not come up in time."""
    missing = [n.assignment.name for n in nodes if not n.state]
    starting = [n.assignment.name for n in nodes if n.state in ("reserved", "starting")]
    said = f"{len(nodes) - len(missing)} of {len(nodes)} nodes reported within {timeout:g} s"
    if missing:
        said += f"; Spark has not started {', '.join(missing)}"
    elif starting:
        said += f"; {', '.join(starting)} did not come up"
    return errors.ReservationLimit(
        said,
        fix="other jobs may use the executors' cores: see Spark's pages; or give a longer "
        "reservation_timeout",
    )
