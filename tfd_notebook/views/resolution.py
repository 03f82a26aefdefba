"""Text and HTML views of a resolution: its rules, tasks, changes, and a suggested cell."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from html import escape

from tfd_notebook.model.resolution import (
    COLUMNS,
    ResolutionSnapshot,
    RuleResult,
    TaskStatus,
    records,
)
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.style import wrap
from tfd_notebook.views.table import Cell, Column, Table, html_table, state_cell, text_table

#: Maximum number of rows. Tasks that are not alive come first.
MAX_ROWS = 100
_MAX_CHANGES = 10

_TASKS = (
    Column("task"),
    Column("state"),
    Column("address", drop=1),
    Column("identity", drop=3),
    Column("accelerators", drop=2),
    Column("latency", right=True, drop=4),
    Column("reason", note=True),
)
_RULES = (Column("rule"), Column("outcome"), Column("why", note=True))
_CHANGES = (
    Column("time"),
    Column("task"),
    Column("before"),
    Column("after"),
    Column("reason", note=True),
)


def task_status_table(snapshot: ResolutionSnapshot, most: int | None = None) -> Table:
    """Return the tasks as a table with at most `most` rows. Its records contain all tasks."""
    rows = snapshot.tasks
    if most is not None and len(rows) > most:
        urgent = [task for task in rows if task.state != "alive"]
        fine = [task for task in rows if task.state == "alive"]
        rows = (*urgent, *fine)[:most]
    omitted = len(snapshot.tasks) - len(rows)
    return Table(
        _TASKS,
        [_row(task) for task in rows],
        label="tasks",
        empty="no tasks",
        records=records(snapshot.tasks),
        foot=f"and {omitted:,} more tasks; to_frame() has all of them" if omitted else "",
        names=COLUMNS,
    )


def rules_table(considered: Sequence[RuleResult]) -> Table:
    """Return the outcomes of the rules as a table."""
    rows = [
        (Cell(result.rule), Cell(result.outcome, _tone(result)), Cell(result.why))
        for result in considered
    ]
    return Table(_RULES, rows, label="rules", empty="no rule")


def changes_table(snapshot: ResolutionSnapshot, most: int | None = None) -> Table:
    """Return the changes of tasks as a table, the latest first."""
    rows = [
        (
            Cell(time.strftime("%H:%M:%S", time.localtime(change.time))),
            Cell(change.task),
            state_cell(change.before) if change.before else Cell("new", "quiet"),
            state_cell(change.after) if change.after else Cell("gone", "quiet"),
            Cell(change.reason),
        )
        for change in snapshot.changes[::-1][:most]
    ]
    data = [vars(change) for change in snapshot.changes]
    names = ("time", "task", "before", "after", "reason")
    return Table(
        _CHANGES, rows, label="changes", empty="nothing changed", records=data, names=names
    )


def resolution_text(snapshot: ResolutionSnapshot, width: int = 110) -> str:
    """Return the text view of `snapshot`, at most `width` columns wide if possible."""
    lines = textwrap.wrap(_head(snapshot), width)
    lines += [
        line
        for why in _partial_results(snapshot)
        for line in textwrap.wrap(why, width, subsequent_indent="  ")
    ]
    if snapshot.trouble:
        lines += textwrap.wrap(f"{figures.sign('error')} {figures.clean(snapshot.trouble)}", width)
    if snapshot.tasks:
        lines += task_status_table(snapshot, MAX_ROWS).text(width).splitlines()
    if snapshot.changes:
        table = changes_table(snapshot, _MAX_CHANGES)
        lines += ["", "changes, the latest first", *text_table(table.columns, table.rows, width)]
    if snapshot.cell:
        lines += ["", "the next cell:", *map(_code, snapshot.cell.splitlines())]
    return "\n".join(lines)


def resolution_html(snapshot: ResolutionSnapshot) -> str:
    """Return the HTML view of `snapshot`."""
    parts = [
        f'<div class="tfd-head"><span class="tfd-name">{escape(_what(snapshot))}</span>'
        f"<span>{escape(_counts(snapshot))}</span></div>"
    ]
    if snapshot.considered:
        fired = snapshot.considered[-1]
        table = rules_table(snapshot.considered)
        parts.append(
            f'<details><summary class="tfd-quiet">rule {escape(fired.rule)}: {escape(fired.why)}'
            f"</summary>{html_table(table.columns, table.rows, table.label)}</details>"
        )
    parts += [f'<div class="tfd-quiet">{escape(why)}</div>' for why in _partial_results(snapshot)]
    if snapshot.trouble:
        parts.append(f'<div class="tfd-bad">{escape(snapshot.trouble)}</div>')
    tasks = task_status_table(snapshot, MAX_ROWS)
    parts.append(html_table(tasks.columns, tasks.rows, tasks.label))
    if tasks.foot:
        parts.append(f'<div class="tfd-quiet">{escape(tasks.foot)}</div>')
    if snapshot.changes:
        changed = changes_table(snapshot, _MAX_CHANGES)
        parts.append('<div class="tfd-quiet">changes, the latest first</div>')
        parts.append(html_table(changed.columns, changed.rows, changed.label))
    if snapshot.cell:
        parts.append(
            '<div class="tfd-quiet">the next cell:</div>'
            f"<pre><code>{escape(snapshot.cell)}</code></pre>"
        )
    return wrap("".join(parts))


def resolution_bundle(snapshot: ResolutionSnapshot) -> dict[str, str]:
    """Return both views by MIME type."""
    return {"text/plain": resolution_text(snapshot), "text/html": resolution_html(snapshot)}


def resolution_change_key(snapshot: ResolutionSnapshot) -> object:
    """Return the parts of `snapshot` whose changes trigger a new display."""
    return snapshot.trouble, [(task.name, task.address, task.state) for task in snapshot.tasks]


def _row(task: TaskStatus) -> tuple[Cell, ...]:
    expected = task.identity in ("", task.name, task.job)
    return (
        Cell(task.name),
        state_cell(task.state),
        Cell(task.address),
        Cell(task.identity, "" if expected else "bad"),
        Cell(task.accelerators),
        Cell(figures.brief(task.latency_ms / 1e3)),
        Cell(task.reason),
    )


def _tone(result: RuleResult) -> str:
    return {"fired": "good", "partial": "warn"}.get(result.outcome, "quiet")


def _what(snapshot: ResolutionSnapshot) -> str:
    return snapshot.place or "no cluster yet"


def _counts(snapshot: ResolutionSnapshot) -> str:
    if not snapshot.place:
        return ""
    if not snapshot.tasks:
        return "no tasks"
    states = ", ".join(f"{count:,} {state}" for state, count in snapshot.counts.items())
    noun = "task" if len(snapshot.tasks) == 1 else "tasks"
    return f"{len(snapshot.tasks):,} {noun}: {states}; probed in {figures.brief(snapshot.seconds)}"


def _head(snapshot: ResolutionSnapshot) -> str:
    fired = (
        snapshot.considered[-1] if snapshot.considered else RuleResult(snapshot.rule, "fired", "")
    )
    what = f"{_what(snapshot)}, {_counts(snapshot)}" if snapshot.place else _what(snapshot)
    return figures.clean(f"{what} (rule {fired.rule}: {fired.why})")


def _code(line: str) -> str:
    """Return a line of source code, indented and without control characters."""
    return "    " + "".join(char if char.isprintable() else "\ufffd" for char in line)


def _partial_results(snapshot: ResolutionSnapshot) -> list[str]:
    partial = [result for result in snapshot.considered if result.outcome == "partial"]
    return [figures.clean(f"partial: {result.rule}: {result.why}") for result in partial]
