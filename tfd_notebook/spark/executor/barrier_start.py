"""Function of the barrier stage: reserve a port, get the other addresses, launch the node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tfd_notebook.net import agent_protocol, ports, runtime_dir, secure_channel
from tfd_notebook.spark.executor import executor, fork_server, launch_plan
from tfd_notebook.spark.executor.launch_plan import Plan
from tfd_notebook.spark.roles import Assignment

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext


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
        node = self._plan.nodes[number]
        try:
            pid = self._start(node, BarrierTaskContext.get())
        except Exception as error:
            if not report_failure(self._plan, node, error):
                raise
            return  # Spark would retry after an exception
        if pid is None:
            return
        started = runtime_dir.process_start(pid)
        if self._plan.holds_slot(node) and started is not None:
            runtime_dir.wait_for_end(pid, started)
        yield pid

    def _start(self, node: Assignment, context: BarrierTaskContext) -> int | None:
        owner = executor.current()
        gpus = _gpus(context)
        environment = launch_plan.node_environment(self._plan.environment, gpus)
        # The fork server imports TensorFlow while this task waits for the others.
        fork_server.start(owner, environment)
        with ports.reserve_port() as reserved_port:
            host = context.getTaskInfos()[context.partitionId()].address.rpartition(":")[0]
            reservation = launch_plan.reservation(
                node, owner, f"{host}:{reserved_port.getsockname()[1]}", gpus
            )
            # Not by Spark's allGather, which takes a second longer than the last task.
            addresses = reserve(self._plan, {**reservation, "attempt": context.taskAttemptId()})
            if addresses is None:
                return None
            return launch_plan.launch(
                self._plan, node, owner, environment, reserved_port, addresses
            )


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


def report_failure(plan: Plan, node: Assignment, error: Exception) -> bool:
    """Report a failed start to the driver; return False if the driver is unreachable."""
    with contextlib.suppress(OSError), secure_channel.connect(plan.driver, plan.secret) as channel:
        channel.send(
            {"type": "start_failed", "node": node.node, "error": agent_protocol.pack_error(error)}
        )
        return True
    return False


def _gpus(context: BarrierTaskContext) -> tuple[str, ...] | None:
    """Return the GPUs that Spark assigned to this task, or None if it assigns none."""
    gpus = context.resources().get("gpu")
    return tuple(gpus.addresses) if gpus is not None else None
