"""Text and HTML views of a resolution: its rules, tasks, changes, and a suggested cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfd_notebook.model.resolution import (
    COLUMNS,
    ResolutionSnapshot,
    RuleResult,
    TaskStatus,
)
from tfd_notebook.views import blocks
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.table import STATE, Cell, Column, Table, state_cell

#: Maximum number of rows. Tasks that are not alive come first.
MAX_ROWS = 100
_MAX_CHANGES = 10

_TASKS = (
    Column("task", lambda task: task.name),
    STATE,
    Column("address", drop=1),
    Column("identity", lambda task: _identity(task), drop=3),
    Column("accelerators", drop=2),
    Column("latency", lambda task: figures.brief(task.latency_ms / 1e3), right=True, drop=4),
    Column("reason", note=True),
)
_RULES = (
    Column("rule"),
    Column("outcome", lambda result: Cell(result.outcome, _tone(result))),
    Column("why", note=True),
)
_CHANGES = (
    Column("time", lambda change: figures.clock(change.time)),
    Column("task"),
    Column("before", lambda change: _state(change.before, "new")),
    Column("after", lambda change: _state(change.after, "gone")),
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
        rows,
        label="tasks",
        empty="no tasks",
        records=[dict(vars(task)) for task in snapshot.tasks],
        foot=f"and {omitted:,} more tasks; to_frame() has all of them" if omitted else "",
        names=COLUMNS,
    )


def rules_table(considered: Sequence[RuleResult]) -> Table:
    """Return the outcomes of the rules as a table."""
    return Table(_RULES, considered, label="rules", empty="no rule")


def changes_table(snapshot: ResolutionSnapshot, most: int | None = None) -> Table:
    """Return the changes of tasks as a table, the latest first."""
    return Table(
        _CHANGES,
        snapshot.changes[::-1][:most],
        label="changes",
        empty="nothing changed",
        records=[dict(vars(change)) for change in snapshot.changes],
        names=("time", "task", "before", "after", "reason"),
    )


def resolution_text(snapshot: ResolutionSnapshot, width: int = 110) -> str:
    """Return the text view of `snapshot`, at most `width` columns wide if possible."""
    return blocks.text(_sections(snapshot), width)


def resolution_html(snapshot: ResolutionSnapshot) -> str:
    """Return the HTML view of `snapshot`."""
    return blocks.html(_sections(snapshot))


def resolution_bundle(snapshot: ResolutionSnapshot) -> dict[str, str]:
    """Return both views by MIME type."""
    return blocks.bundle(_sections(snapshot))


def _sections(snapshot: ResolutionSnapshot) -> Iterator[list[blocks.Block]]:
    what, counts, fired = snapshot.place or "no cluster yet", _counts(snapshot), ""
    head: list[blocks.Block] = []
    if snapshot.considered:
        fired = f"rule {snapshot.considered[-1].rule}: {snapshot.considered[-1].why}"
        head = [blocks.Collapsible(fired, rules_table(snapshot.considered))]
    words = ", ".join(filter(None, (what, counts)))
    head.insert(0, blocks.Head(f"{words} ({fired})", ((what, "name"), (counts, "quiet"))))
    head += [
        blocks.Sentence(f"partial: {result.rule}: {result.why}")
        for result in snapshot.considered
        if result.outcome == "partial"
    ]
    if snapshot.trouble:
        head.append(blocks.Sentence(f"{figures.sign('error')} {snapshot.trouble}", "bad"))
    if snapshot.tasks:
        head.append(task_status_table(snapshot, MAX_ROWS))
    yield head
    if snapshot.changes:
        changes = changes_table(snapshot, _MAX_CHANGES)
        yield [blocks.Sentence("changes, the latest first"), changes]
    if snapshot.cell:
        cell = blocks.Code(snapshot.cell.splitlines(), "    ", truncate=False)
        yield [blocks.Sentence("the next cell:"), cell]


def resolution_change_key(snapshot: ResolutionSnapshot) -> object:
    """Return the parts of `snapshot` whose changes trigger a new display."""
    return snapshot.trouble, [(task.name, task.address, task.state) for task in snapshot.tasks]


def _identity(task: TaskStatus) -> Cell:
    expected = task.identity in ("", task.name, task.job)
    return Cell(task.identity, "" if expected else "bad")


def _state(state: str, absent: str) -> Cell:
    return state_cell(state) if state else Cell(absent, "quiet")


def _tone(result: RuleResult) -> str:
    return {"fired": "good", "partial": "warn"}.get(result.outcome, "quiet")


def _counts(snapshot: ResolutionSnapshot) -> str:
    if not snapshot.place:
        return ""
    if not snapshot.tasks:
        return "no tasks"
    states = ", ".join(f"{count:,} {state}" for state, count in snapshot.counts.items())
    count = figures.plural(len(snapshot.tasks), "task")
    return f"{count}: {states}; probed in {figures.brief(snapshot.seconds)}"
