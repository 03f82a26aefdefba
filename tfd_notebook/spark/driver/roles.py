"""Who is what among the nodes: ps first, then chief or master, evaluator, workers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tfd_notebook.errors import UsageError

PS, EVALUATOR, WORKER = "ps", "evaluator", "worker"
#: Who leads, where somebody is named to; `master` is the older word.
LEADERS = ("chief", "master")
#: Roles that serve the others, and end when these have.
SERVING = (PS, EVALUATOR)


@dataclass(frozen=True)
class Assignment:
    """What one node is.

    Parameters
    ----------
    node : int
        Its number in the whole cluster, ``ctx.executor_id``.
    role : {"ps", "chief", "master", "evaluator", "worker"}
    index : int
        Among those of its role.
    on_driver : bool
        Whether it runs beside the notebook and not on an executor.
    """

    node: int
    role: str
    index: int
    on_driver: bool = False

    @property
    def name(self) -> str:
        """Such as ``worker:0``."""
        return f"{self.role}:{self.index}"

    @property
    def is_fed(self) -> bool:
        """Whether it takes rows: workers and who leads them do."""
        return self.role not in SERVING


def assign(
    num_executors: int,
    num_ps: int = 0,
    master_node: str | None = None,
    eval_node: bool = False,
    driver_ps_nodes: bool = False,
) -> tuple[Assignment, ...]:
    """Deal the roles.

    Parameters
    ----------
    num_executors : int
        Nodes in all, those on the driver included.
    num_ps : int
        Parameter servers among them.
    master_node : {"chief", "master"}, optional
        Name of the node that leads; None (default) where the workers are all alike.
    eval_node : bool
        Whether one of them evaluates.
    driver_ps_nodes : bool
        Whether the parameter servers run on the driver.

    Raises
    ------
    UsageError
        The numbers leave no worker, or cannot be meant.
    """
    for name, value, least in (("num_executors", num_executors, 1), ("num_ps", num_ps, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name}={value!r} must be a whole number of at least {least}")
    if master_node is not None and master_node not in LEADERS:
        raise UsageError(f"master_node={master_node!r} is neither of {', '.join(LEADERS)}")
    roles = [PS] * num_ps + ([master_node] if master_node else []) + [EVALUATOR] * bool(eval_node)
    workers = num_executors - len(roles)
    if workers < 0 or (workers == 0 and not master_node):
        raise UsageError(
            f"num_executors={num_executors} leaves no worker beside {', '.join(roles)}",
            fix=f"give num_executors={len(roles) + 1} or more: it counts every node",
        )
    roles += [WORKER] * workers
    return tuple(
        Assignment(node, role, roles[:node].count(role), driver_ps_nodes and role == PS)
        for node, role in enumerate(roles)
    )


def template(nodes: Iterable[Assignment]) -> dict[str, list[int]]:
    """Return the numbers of the nodes by role."""
    found: dict[str, list[int]] = {}
    for node in nodes:
        found.setdefault(node.role, []).append(node.node)
    return found


def cluster_spec(nodes: Iterable[Assignment], addresses: Mapping[int, str]) -> dict[str, list[str]]:
    """Return the addresses by role, in the order of the indices; `addresses` are by node."""
    spec: dict[str, list[str]] = {}
    for node in nodes:
        spec.setdefault(node.role, []).append(addresses[node.node])
    return spec


def tf_config(spec: Mapping[str, list[str]], role: str, index: int) -> str:
    """Return the value of ``TF_CONFIG`` for a node.

    TensorFlow's evaluator stands beside the cluster: only its own configuration names it.
    """
    cluster = {job: tasks for job, tasks in spec.items() if role == EVALUATOR or job != EVALUATOR}
    task: dict[str, Any] = {"type": role, "index": index}
    return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})
