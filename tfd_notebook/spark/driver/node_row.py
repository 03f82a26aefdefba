"""A cluster on Spark as views see it."""

from __future__ import annotations

from tfd_notebook.model.snapshot import NodeRow
from tfd_notebook.spark.driver.node_registry import Node

#: Lines of a node's log in its row.
_LINES = 20


def row(node: Node) -> NodeRow:
    """Return a node's row; to be called while `node` cannot change."""
    numbers = node.numbers
    return NodeRow(
        role=node.assignment.role,
        index=node.assignment.index,
        executor=node.executor,
        host=node.host,
        address=node.address,
        pid=node.pid,
        state=node.state,
        gpu=node.gpu,
        rows=int(numbers.get("rows", 0)),
        results=int(numbers.get("results", 0)),
        rows_per_s=0.0 if node.is_over else node.rows_per_s,
        queue_depth=numbers.get("queue_depth"),
        queue_capacity=numbers.get("queue_capacity"),
        batch_age_s=numbers.get("batch_age_s"),
        log=node.last_lines(_LINES),
        error=node.error or node.reason,
    )
