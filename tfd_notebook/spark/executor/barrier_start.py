"""What Spark's tasks do in the barrier stage: reserve, gather, launch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tfd_notebook.net import agent_protocol, ports, runtime_dir, secure_channel
from tfd_notebook.spark.driver import launch_plan
from tfd_notebook.spark.driver.launch_plan import Plan
from tfd_notebook.spark.driver.roles import Assignment
from tfd_notebook.spark.executor import executor
from tfd_notebook.spark.executor.executor import Watch
from tfd_notebook.spark.executor.fork_server import ForkServerClient

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext


class Start:
    """The function of the barrier stage: starts a node for each partition.

    Parameters
    ----------
    plan : Plan
    elsewhere : dict of int to str
        Addresses of nodes that run beside the notebook.
    """

    def __init__(self, plan: Plan, elsewhere: dict[int, str]) -> None:
        self._plan = plan
        self._elsewhere = elsewhere

    def __call__(self, partition: Iterable[int]) -> Iterator[int]:
        """Start the node whose number `partition` has; yields the pid of its supervisor."""
        from pyspark import BarrierTaskContext

        (number,) = partition
        node = self._plan.nodes[number]
        try:
            pid = self._start(node, BarrierTaskContext.get())
        except Exception as error:
            if not tell_failure(self._plan, node, error):
                raise
            return  # an exception would have Spark try again
        if pid is None:
            return
        if self._plan.holds_slot(node):
            _await_end(pid)
        yield pid

    def _start(self, node: Assignment, context: BarrierTaskContext) -> int | None:
        place = executor.here()
        gpus = _gpus(context)
        environment = launch_plan.node_environment(self._plan.environment, gpus)
        # TensorFlow is imported there while this task waits for the others.
        zygote = ForkServerClient(place, environment)
        try:
            with ports.reserve_port() as held:
                host = context.getTaskInfos()[context.partitionId()].address.rpartition(":")[0]
                mine = launch_plan.reservation(node, place, f"{host}:{held.getsockname()[1]}", gpus)
                if not report(self._plan, {**mine, "attempt": context.taskAttemptId()}):
                    return None
                gathered = [json.loads(text) for text in context.allGather(json.dumps(mine))]
                addresses = {said["node"]: said["address"] for said in gathered}
                addresses.update(self._elsewhere)
                return launch_plan.launch(
                    self._plan, node, place, zygote, environment, held, addresses
                )
        finally:
            zygote.close()


def report(plan: Plan, mine: dict[str, Any]) -> bool:
    """Tell the driver of a reservation; False where it wants none, because it has one already."""
    with secure_channel.connect(plan.driver, plan.secret) as channel:
        channel.send({"say": "reserved", **mine})
        header, _ = channel.receive(timeout=60.0)
    return bool(header.get("go"))


def tell_failure(plan: Plan, node: Assignment, error: Exception) -> bool:
    """Tell the driver why a node cannot be started; False where it does not hear."""
    with contextlib.suppress(OSError), secure_channel.connect(plan.driver, plan.secret) as channel:
        channel.send(
            {"say": "unable", "node": node.node, "error": agent_protocol.pack_error(error)}
        )
        return True
    return False


def _await_end(pid: int) -> None:
    started = runtime_dir.process_start(pid)
    if started is not None:
        Watch(pid, started).wait()


def _gpus(context: BarrierTaskContext) -> tuple[str, ...] | None:
    """Return the GPUs that Spark gave to this task; None where it gives none."""
    found = context.resources().get("gpu")
    return tuple(found.addresses) if found is not None else None
