"""Roles of the nodes: ps first, then chief or master, evaluator, workers. Their input modes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tfd_notebook.errors import UsageError

PS, EVALUATOR, WORKER = "ps", "evaluator", "worker"
#: Roles of a first worker with a name; `master` is the older name.
LEADERS = ("chief", "master")
#: Roles that serve the others; they are stopped after the others have ended.
SERVING = (PS, EVALUATOR)


class InputMode(IntEnum):
    """Source of the rows: the user's function, or Spark.

    See Also
    --------
    tensorflowonspark.TFCluster.InputMode
    """

    #: The user's function reads its own data.
    TENSORFLOW = 0
    #: Spark feeds the rows of RDDs and DataFrames to the user's function.
    SPARK = 1


@dataclass(frozen=True)
class Assignment:
    """Role of one node.

    Parameters
    ----------
    node : int
        Number of the node in the cluster, ``ctx.executor_id``.
    role : {"ps", "chief", "master", "evaluator", "worker"}
    index : int
        Index among the nodes of this role.
    on_driver : bool
        Whether the node runs on the driver's host instead of an executor.
    """

    node: int
    role: str
    index: int
    on_driver: bool = False

    @property
    def name(self) -> str:
        """Name of the node, such as ``worker:0``."""
        return f"{self.role}:{self.index}"

    @property
    def is_fed(self) -> bool:
        """True if the node receives rows, as workers, chief and master do."""
        return self.role not in SERVING


def assign(
    num_executors: int,
    num_ps: int = 0,
    master_node: str | None = None,
    eval_node: bool = False,
    driver_ps_nodes: bool = False,
) -> tuple[Assignment, ...]:
    """Assign roles to the nodes.

    Parameters
    ----------
    num_executors : int
        Number of nodes, including those on the driver's host.
    num_ps : int
        Number of parameter servers among them.
    master_node : {"chief", "master"}, optional
        Role of the first worker; None (default) for ``worker:0``.
    eval_node : bool
        Whether one of the nodes is an evaluator.
    driver_ps_nodes : bool
        Whether the parameter servers run on the driver's host.

    Raises
    ------
    UsageError
        An argument is invalid, or the numbers leave no worker.
    """
    for name, value, minimum in (("num_executors", num_executors, 1), ("num_ps", num_ps, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise UsageError(f"invalid {name}={value!r}: expected an integer, {minimum} or more")
    if master_node is not None and master_node not in LEADERS:
        raise UsageError(f"invalid master_node {master_node!r}: expected {' or '.join(LEADERS)}")
    roles = [PS] * num_ps + ([master_node] if master_node else []) + [EVALUATOR] * bool(eval_node)
    workers = num_executors - len(roles)
    if workers < 0 or (workers == 0 and not master_node):
        raise UsageError(
            f"num_executors={num_executors} leaves no worker in addition to {', '.join(roles)}",
            fix=f"use num_executors={len(roles) + 1} or more: it counts every node",
        )
    roles += [WORKER] * workers
    return tuple(
        Assignment(node, role, roles[:node].count(role), driver_ps_nodes and role == PS)
        for node, role in enumerate(roles)
    )


def template(nodes: Iterable[Assignment]) -> dict[str, list[int]]:
    """Return the numbers of the nodes by role."""
    numbers: dict[str, list[int]] = {}
    for node in nodes:
        numbers.setdefault(node.role, []).append(node.node)
    return numbers


def cluster_spec(nodes: Iterable[Assignment], addresses: Mapping[int, str]) -> dict[str, list[str]]:
    """Return the addresses by role, in the order of the indices. `addresses` has node numbers."""
    spec: dict[str, list[str]] = {}
    for node in nodes:
        spec.setdefault(node.role, []).append(addresses[node.node])
    return spec


def tf_config(spec: Mapping[str, list[str]], role: str, index: int) -> str:
    """Return the value of ``TF_CONFIG`` for a node.

    TensorFlow's evaluator is not part of the cluster: only its own configuration names it.
    """
    cluster = {job: tasks for job, tasks in spec.items() if role == EVALUATOR or job != EVALUATOR}
    task: dict[str, Any] = {"type": role, "index": index}
    return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})
