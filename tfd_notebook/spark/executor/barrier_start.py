"""Function of the barrier stage: reserve a port, exchange the addresses, launch the node."""

from __future__ import annotations

import contextlib
import json
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
    driver_addresses : dict of int to str
        Addresses of the nodes on the driver's host.
    """

    def __init__(self, plan: Plan, driver_addresses: dict[int, str]) -> None:
        self._plan = plan
        self._driver_addresses = driver_addresses

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
            if not report(self._plan, {**reservation, "attempt": context.taskAttemptId()}):
                return None
            gathered = [json.loads(text) for text in context.allGather(json.dumps(reservation))]
            addresses = {message["node"]: message["address"] for message in gathered}
            addresses.update(self._driver_addresses)
            return launch_plan.launch(
                self._plan, node, owner, environment, reserved_port, addresses
            )


def report(plan: Plan, reservation: dict[str, Any]) -> bool:
    """Report a reservation to the driver; return False if the driver rejects it as a duplicate."""
    with secure_channel.connect(plan.driver, plan.secret) as channel:
        channel.send({"type": "reserved", **reservation})
        header, _ = channel.receive(timeout=60.0)
    return bool(header.get("accepted"))


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
