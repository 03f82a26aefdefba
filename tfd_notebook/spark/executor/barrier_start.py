"""Function of the barrier stage: reserve a port, get the other addresses, launch the node."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfd_notebook.net import agent_protocol, runtime_dir, secure_channel
from tfd_notebook.spark.executor import executor, fork_server, launch_plan
from tfd_notebook.spark.executor.executor import Executor
from tfd_notebook.spark.executor.launch_plan import Plan
from tfd_notebook.spark.roles import Assignment

#: Timeout in seconds for the driver to receive an error.
_REPORT_SECONDS = 10.0


class Start:
    """Function of the barrier stage, which starts one node per partition.

    Parameters
    ----------
    plan : Plan
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __call__(self, partition: Iterable[int]) -> Iterator[int]:
        """Start the node whose number `partition` holds; yield the pid of its supervisor."""
        from pyspark import BarrierTaskContext

        (number,) = partition
        node, context = self._plan.nodes[number], BarrierTaskContext.get()
        host = context.getTaskInfos()[context.partitionId()].address.rpartition(":")[0]
        given = context.resources().get("gpu")
        gpus = tuple(given.addresses) if given is not None else None
        attempt = context.taskAttemptId()
        pid = start_node(self._plan, node, executor.current, host, gpus, attempt)
        if pid is None:
            return  # Spark would retry after an exception
        started = runtime_dir.process_start(pid)
        if self._plan.holds_slot(node) and started is not None:
            runtime_dir.wait_for_end(pid, started)
        yield pid


def start_node(
    plan: Plan,
    node: Assignment,
    find_owner: Callable[[], Executor],
    host: str,
    gpus: tuple[str, ...] | None,
    attempt: int,
) -> int | None:
    """Start a node on this host, after all nodes have reserved their ports.

    Parameters
    ----------
    plan : Plan
    node : Assignment
    find_owner : callable
        Returns the process with which the node ends.
    host : str
        Name or address of this host for the other nodes.
    gpus : tuple of str, optional
        The GPUs that Spark assigned to the node; None if it assigns none.
    attempt : int
        Identifies this attempt.

    Returns
    -------
    int or None
        Pid of its supervisor. None if the start failed, which the driver has been notified of, or
        is no longer necessary.
    """
    environment = launch_plan.node_environment(plan.environment, gpus)
    try:
        fork_server.check_platform()
        owner = find_owner()
        # The fork server imports TensorFlow while this task waits for the others.
        fork_server.start(owner, environment)
        # Import time: it imports grpc, which need not delay the fork server.
        from tfd_notebook.net import ports

        with ports.reserve_port() as reserved_port:
            reservation = {
                "node": node.node,
                "address": f"{host}:{reserved_port.getsockname()[1]}",
                "executor": owner.id,
                "host": owner.host,
                "jvm": owner.pid,
                "gpu": ",".join(gpus or ()),
                "attempt": attempt,
            }
            # Not by Spark's allGather, which takes a second longer than the last task.
            addresses = reserve(plan, reservation)
            if addresses is None:
                return None
            return launch_plan.launch(plan, node, owner, environment, reserved_port, addresses)
    except Exception as error:
        if not report_failure(plan.driver, plan.secret, node.node, error):
            raise
        return None


def reserve(plan: Plan, reservation: dict[str, Any]) -> dict[int, str] | None:
    """Report a reservation to the driver; return the addresses of all nodes when it has them.

    Return None if the node is already reserved, or the cluster ends meanwhile.
    """
    with secure_channel.connect(plan.driver, plan.secret) as channel:
        channel.send({"type": "reserved", **reservation})
        try:
            answer, _ = channel.receive()
        except (EOFError, OSError):
            return None
    addresses = {int(number): address for number, address in answer.get("addresses", {}).items()}
    return addresses or None


def report_failure(driver: str, secret: bytes, node: int, error: Exception) -> bool:
    """Report a failure to the driver; return False if the driver is unreachable."""
    with contextlib.suppress(OSError), secure_channel.connect(driver, secret) as channel:
        channel.send(
            {"type": "start_failed", "node": node, "error": agent_protocol.pack_error(error)}
        )
        with contextlib.suppress(EOFError):  # the driver closes it when it has the error
            channel.receive(timeout=_REPORT_SECONDS)
        return True
    return False
