"""Text and HTML views of a cluster on Spark: phase, nodes, feeding and errors."""

from __future__ import annotations

import textwrap
from html import escape

from tfd_notebook.model.snapshot import SPARK_PHASES, NodeRow, SparkRow
from tfd_notebook.views import cluster as parts
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.table import Cell, Column, Row, html_table, state_cell, text_table

_COLUMNS = (
    Column("node"),
    Column("state"),
    Column("executor", right=True, drop=4),
    Column("host", drop=3),
    Column("pid", right=True, drop=6),
    Column("GPU", drop=5),
    Column("rows", right=True, drop=1),
    Column("rows/s", right=True),
    Column("results", right=True, drop=2),
    Column("queue", right=True),
    Column("last batch", right=True),
    Column("error", note=True),
)
#: Maximum lines of a traceback, and of a node's log.
_MAX_TRACE_LINES = 40
_MAX_LOG_LINES = 10
#: Maximum number of logs.
_MAX_LOGS = 8
_PATH = tuple(phase for phase in SPARK_PHASES if phase not in ("stopped", "failed"))


def spark_text(row: SparkRow, now: float, width: int) -> list[str]:
    """Return the lines of a cluster on Spark.

    Parameters
    ----------
    row : SparkRow
    now : float
        Time of the snapshot, in seconds since the epoch.
    width : int
        Maximum width in columns.
    """
    width = max(width, 20)
    facts = " · ".join(map(figures.clean, [_phase(row, now), *_facts(row)]))
    lines = textwrap.wrap(facts, width, subsequent_indent="  ")
    if row.reason not in row.error:
        lines += textwrap.wrap(figures.clean(row.reason), width, subsequent_indent="  ")
    rows, more = _rows(row)
    if rows:
        lines += ["", *text_table(_COLUMNS, rows, width)]
    lines += [more] if more else []
    if row.error:
        lines += ["", *(figures.fit(line, width) for line in _trace(row.error))]
    for node in _failed_nodes(row):
        lines += ["", f"the last lines of {node.node}:"]
        lines += [figures.fit(f"  {_line(line)}", width) for line in node.log[-_MAX_LOG_LINES:]]
    return lines


def spark_html(row: SparkRow, now: float) -> str:
    """Return the elements of a cluster on Spark."""
    facts = "".join(f'<span class="tfd-quiet">{escape(fact)}</span>' for fact in _facts(row))
    elements = [
        f'<div class="tfd-head"><span class="tfd-{figures.tone(row.phase)}">'
        f"{escape(_phase(row, now))}</span>{facts}</div>"
    ]
    if row.reason not in row.error:
        elements.append(f'<div class="tfd-quiet">{escape(figures.clean(row.reason))}</div>')
    rows, more = _rows(row)
    elements.append(html_table(_COLUMNS, rows, "nodes on Spark"))
    if more:
        elements.append(f'<div class="tfd-quiet">{escape(more)}</div>')
    if row.error:
        elements.append(_folded("the error", _trace(row.error), opened=True, tone="bad"))
    failed = [node.node for node in _failed_nodes(row)]
    for node in row.nodes[:_MAX_LOGS]:
        if node.log:
            lines = [_line(line) for line in node.log[-_MAX_LOG_LINES:]]
            elements.append(_folded(f"log of {node.node}", lines, opened=node.node in failed))
    return "".join(elements)


def _folded(title: str, lines: list[str], *, opened: bool, tone: str = "quiet") -> str:
    return (
        f'<details{" open" if opened else ""}><summary class="tfd-{tone}">{escape(title)}'
        f'</summary><pre class="tfd-log">{escape(chr(10).join(lines))}</pre></details>'
    )


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


def _rows(row: SparkRow) -> tuple[list[Row], str]:
    shown, rest = parts.cut(row.nodes)
    return [_row(node) for node in shown], rest


def _row(node: NodeRow) -> Row:
    ended = node.state in ("finished", "failed", "lost", "stopped")
    return [
        Cell(node.node),
        state_cell(node.state),
        Cell(node.executor),
        Cell(node.host),
        Cell("" if node.pid is None else str(node.pid)),
        Cell(node.gpu),
        Cell(figures.count(node.rows) if node.rows else ""),
        Cell("" if ended or not node.rows else figures.count(node.rows_per_s)),
        Cell(figures.count(node.results) if node.results else ""),
        Cell("" if ended else _queue(node), "warn" if _is_full(node) and not ended else ""),
        Cell("" if ended or node.batch_age_s is None else f"{figures.brief(node.batch_age_s)} ago"),
        Cell(_error_line(node.error)),
    ]


def _queue(node: NodeRow) -> str:
    if node.queue_depth is None:
        return ""
    if node.queue_capacity is None:
        return str(node.queue_depth)
    return f"{node.queue_depth} of {node.queue_capacity}"


def _is_full(node: NodeRow) -> bool:
    return node.queue_capacity is not None and (node.queue_depth or 0) >= node.queue_capacity


def _error_line(error: str) -> str:
    """Return an error's first line or, if that starts a traceback, its last line."""
    lines = [line for line in error[:50_000].splitlines() if line.strip()]
    if not lines:
        return ""
    if "Traceback" in lines[0]:
        return figures.short_error(lines[-1])
    return figures.short_error(lines[0])


def _trace(error: str) -> list[str]:
    lines = [_line(line) for line in error.rstrip().splitlines()]
    if len(lines) <= _MAX_TRACE_LINES:
        return lines
    kept = _MAX_TRACE_LINES // 2
    return [*lines[:kept], f"… {len(lines) - 2 * kept:,} lines …", *lines[-kept:]]


def _line(line: str) -> str:
    """Return a line with its spaces, without control characters such as terminal escapes."""
    return "".join(char if char.isprintable() else "\ufffd" for char in line.expandtabs(4))


def _failed_nodes(row: SparkRow) -> list[NodeRow]:
    """Return the failed or lost nodes that have a log."""
    return [node for node in row.nodes if node.state in ("failed", "lost") and node.log][:_MAX_LOGS]


__all__ = ["spark_html", "spark_text"]
