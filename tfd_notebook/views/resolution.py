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
MOST_ROWS = 100
_MOST_CHANGES = 10

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


def sightings_table(look: ResolutionSnapshot, most: int | None = None) -> Table:
    """Return the tasks as a table with at most `most` rows. Its records contain all tasks."""
    shown = look.tasks
    if most is not None and len(shown) > most:
        urgent = [task for task in shown if task.state != "alive"]
        fine = [task for task in shown if task.state == "alive"]
        shown = (*urgent, *fine)[:most]
    left = len(look.tasks) - len(shown)
    return Table(
        _TASKS,
        [_row(task) for task in shown],
        label="tasks",
        empty="no tasks",
        records=records(look.tasks),
        foot=f"and {left:,} more tasks; to_frame() has all of them" if left else "",
        names=COLUMNS,
    )


def rules_table(considered: Sequence[RuleResult]) -> Table:
    """Return the outcomes of the rules as a table."""
    rows = [
        (Cell(result.rule), Cell(result.outcome, _tone(result)), Cell(result.why))
        for result in considered
    ]
    return Table(_RULES, rows, label="rules", empty="no rule")


def changes_table(look: ResolutionSnapshot, most: int | None = None) -> Table:
    """Return the changes of tasks as a table, the latest first."""
    rows = [
        (
            Cell(time.strftime("%H:%M:%S", time.localtime(change.time))),
            Cell(change.task),
            state_cell(change.before) if change.before else Cell("new", "quiet"),
            state_cell(change.after) if change.after else Cell("gone", "quiet"),
            Cell(change.reason),
        )
        for change in look.changes[::-1][:most]
    ]
    data = [vars(change) for change in look.changes]
    names = ("time", "task", "before", "after", "reason")
    return Table(
        _CHANGES, rows, label="changes", empty="nothing changed", records=data, names=names
    )


def look_text(look: ResolutionSnapshot, width: int = 110) -> str:
    """Return the text view of `look`, at most `width` columns wide if possible."""
    lines = textwrap.wrap(_head(look), width)
    lines += [
        line for why in _close(look) for line in textwrap.wrap(why, width, subsequent_indent="  ")
    ]
    if look.trouble:
        lines += textwrap.wrap(f"{figures.sign('error')} {figures.clean(look.trouble)}", width)
    if look.tasks:
        lines += sightings_table(look, MOST_ROWS).text(width).splitlines()
    if look.changes:
        table = changes_table(look, _MOST_CHANGES)
        lines += ["", "changes, the latest first", *text_table(table.columns, table.rows, width)]
    if look.cell:
        lines += ["", "the next cell:", *map(_code, look.cell.splitlines())]
    return "\n".join(lines)


def look_html(look: ResolutionSnapshot) -> str:
    """Return the HTML view of `look`."""
    parts = [
        f'<div class="tfd-head"><span class="tfd-name">{escape(_what(look))}</span>'
        f"<span>{escape(_counts(look))}</span></div>"
    ]
    if look.considered:
        fired = look.considered[-1]
        table = rules_table(look.considered)
        parts.append(
            f'<details><summary class="tfd-quiet">rule {escape(fired.rule)}: {escape(fired.why)}'
            f"</summary>{html_table(table.columns, table.rows, table.label)}</details>"
        )
    parts += [f'<div class="tfd-quiet">{escape(why)}</div>' for why in _close(look)]
    if look.trouble:
        parts.append(f'<div class="tfd-bad">{escape(look.trouble)}</div>')
    tasks = sightings_table(look, MOST_ROWS)
    parts.append(html_table(tasks.columns, tasks.rows, tasks.label))
    if tasks.foot:
        parts.append(f'<div class="tfd-quiet">{escape(tasks.foot)}</div>')
    if look.changes:
        changed = changes_table(look, _MOST_CHANGES)
        parts.append('<div class="tfd-quiet">changes, the latest first</div>')
        parts.append(html_table(changed.columns, changed.rows, changed.label))
    if look.cell:
        parts.append(
            '<div class="tfd-quiet">the next cell:</div>'
            f"<pre><code>{escape(look.cell)}</code></pre>"
        )
    return wrap("".join(parts))


def look_bundle(look: ResolutionSnapshot) -> dict[str, str]:
    """Return both views by MIME type."""
    return {"text/plain": look_text(look), "text/html": look_html(look)}


def look_gist(look: ResolutionSnapshot) -> object:
    """Return the parts of `look` whose changes trigger a new display."""
    return look.trouble, [(task.name, task.address, task.state) for task in look.tasks]


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
    return {"fired": "good", "close": "warn"}.get(result.outcome, "quiet")


def _what(look: ResolutionSnapshot) -> str:
    return look.place or "no cluster yet"


def _counts(look: ResolutionSnapshot) -> str:
    if not look.place:
        return ""
    if not look.tasks:
        return "no tasks"
    states = ", ".join(f"{count:,} {state}" for state, count in look.counts.items())
    noun = "task" if len(look.tasks) == 1 else "tasks"
    return f"{len(look.tasks):,} {noun}: {states}; seen in {figures.brief(look.seconds)}"


def _head(look: ResolutionSnapshot) -> str:
    fired = look.considered[-1] if look.considered else RuleResult(look.rule, "fired", "")
    what = f"{_what(look)}, {_counts(look)}" if look.place else _what(look)
    return figures.clean(f"{what} (rule {fired.rule}: {fired.why})")


def _code(line: str) -> str:
    """Return a line of source code, indented and without control characters."""
    return "    " + "".join(char if char.isprintable() else "\ufffd" for char in line)


def _close(look: ResolutionSnapshot) -> list[str]:
    partial = [result for result in look.considered if result.outcome == "close"]
    return [figures.clean(f"close: {result.rule}: {result.why}") for result in partial]
