"""Text and HTML views of a cluster on Spark: phase, nodes, feeding and errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfd_notebook.model.snapshot import SPARK_PHASES, NodeRow, SparkRow
from tfd_notebook.views import blocks
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.table import STATE, Cell, Column, urgent_table

_COLUMNS = (
    Column("node"),
    STATE,
    Column("executor", right=True, drop=4),
    Column("host", drop=3),
    Column("pid", right=True, drop=6),
    Column("GPU", lambda node: node.gpu, drop=5),
    Column("rows", lambda node: figures.count(node.rows) if node.rows else "", right=True, drop=1),
    Column("rows/s", lambda node: _rate(node), right=True),
    Column(
        "results",
        lambda node: figures.count(node.results) if node.results else "",
        right=True,
        drop=2,
    ),
    Column("queue", lambda node: _queue(node), right=True),
    Column("last batch", lambda node: _last_batch(node), right=True),
    Column("error", lambda node: _error_line(node.error), note=True),
)
#: Maximum lines of a traceback, and of a node's log.
_MAX_TRACE_LINES = 40
_MAX_LOG_LINES = 10
#: Maximum number of logs.
_MAX_LOGS = 8
_PATH = tuple(phase for phase in SPARK_PHASES if phase not in ("stopped", "failed"))


def spark_sections(row: SparkRow, now: float) -> Iterator[Sequence[blocks.Block]]:
    """Yield the sections of a cluster on Spark.

    Parameters
    ----------
    row : SparkRow
    now : float
        Time of the snapshot, in seconds since the epoch.
    """
    phase = _phase(row, now)
    head = blocks.Head(phase, ((phase, figures.tone(row.phase)),), _facts(row))
    yield [head] if row.reason in row.error else [head, blocks.Sentence(row.reason)]
    yield [urgent_table(_COLUMNS, row.nodes, "nodes on Spark")]
    if row.error:
        yield [blocks.Collapsible("the error", _trace(row.error), "", opened=True, tone="bad")]
    logs = sorted((node for node in row.nodes if node.log), key=lambda node: not _failed(node))
    for node in logs[:_MAX_LOGS]:
        heading = f"the last lines of {node.node}:" if _failed(node) else None
        log = blocks.Code(node.log[-_MAX_LOG_LINES:], "  ")
        yield [blocks.Collapsible(f"log of {node.node}", log, heading, opened=_failed(node))]


def _failed(node: NodeRow) -> bool:
    return node.state in ("failed", "lost")


def _phase(row: SparkRow, now: float) -> str:
    ended = row.phase in ("stopped", "failed")
    lasted = figures.duration(max(now - row.since, 0.0))
    words = f"{figures.signed(row.phase)} {'since' if ended else 'for'} {lasted}"
    if ended:
        return words
    at = _PATH.index(row.phase) + 1 if row.phase in _PATH else 0
    return f"{words} (phase {at} of {len(_PATH)})"


def _facts(row: SparkRow) -> list[str]:
    facts = [f"{row.reserved:,} of {row.needed:,} nodes have reported"]
    if row.rows_per_s:
        facts.append(f"{figures.count(row.rows_per_s)} rows/s")
    rows = sum(node.rows for node in row.nodes)
    if rows:
        facts.append(f"{figures.count(rows)} rows fed")
    facts.append(f"input mode {row.input_mode}")
    if row.application:
        facts.append(f"application {row.application}")
    if row.tensorboard:
        facts.append(f"TensorBoard at {row.tensorboard}")
    return facts


def _has_ended(node: NodeRow) -> bool:
    return node.state in ("finished", "failed", "lost", "stopped")


def _rate(node: NodeRow) -> str:
    return "" if _has_ended(node) or not node.rows else figures.count(node.rows_per_s)


def _last_batch(node: NodeRow) -> str:
    if _has_ended(node) or node.batch_age_s is None:
        return ""
    return f"{figures.brief(node.batch_age_s)} ago"


def _queue(node: NodeRow) -> Cell:
    depth, capacity = node.queue_depth, node.queue_capacity
    if _has_ended(node) or depth is None:
        return Cell()
    if capacity is None:
        return Cell(str(depth))
    return Cell(f"{depth} of {capacity}", "warn" if depth >= capacity else "")


def _error_line(error: str) -> str:
    """Return an error's first line or, if that starts a traceback, its last line."""
    lines = [line for line in error[:50_000].splitlines() if line.strip()]
    if not lines:
        return ""
    if "Traceback" in lines[0]:
        return figures.short_error(lines[-1])
    return figures.short_error(lines[0])


def _trace(error: str) -> blocks.Code:
    lines = error.rstrip().splitlines()
    if len(lines) > _MAX_TRACE_LINES:
        kept = _MAX_TRACE_LINES // 2
        lines = [*lines[:kept], f"… {len(lines) - 2 * kept:,} lines …", *lines[-kept:]]
    return blocks.Code(lines)
