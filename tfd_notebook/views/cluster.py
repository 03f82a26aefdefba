"""The tables and lines of a snapshot, shared by the text and HTML views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from tfd_notebook.model.events import Notice
from tfd_notebook.model.snapshot import CoordinatedRow, NodeRow, Snapshot, StreamRow, TaskRow
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.table import Cell, Column, Row, state_cell

_AnyRow = TypeVar("_AnyRow", TaskRow, StreamRow, CoordinatedRow, NodeRow)

#: Maximum number of rows. The most urgent states come first.
MAX_ROWS = 50
_MAX_NOTICES = 5

_URGENCY = (
    "failed",
    "lost",
    "hung",
    "restarting",
    "starting",
    "planned",
    "reserved",
    "paused",
    "new",
    "running",
    "idle",
    "ready",
    "finished",
    "stopped",
)

ROLE_COLUMNS = (
    Column("role"),
    Column("planned", right=True),
    Column("requested", right=True),
    Column("observed", right=True),
    Column("why", note=True),
)

TASK_COLUMNS = (
    Column("task"),
    Column("state"),
    Column("address", drop=2),
    Column("pid", right=True, drop=9),
    Column("CPU", right=True, drop=5),
    Column("memory", right=True, drop=4),
    Column("sent", right=True, drop=6),
    Column("rate", right=True, drop=3),
    Column("GPU", drop=7),
    Column("restarts", right=True, drop=8),
    Column("open to", drop=1),
    Column("reason", note=True),
)

STREAM_COLUMNS = (
    Column("data"),
    Column("state"),
    Column("elements", right=True),
    Column("elements/s", right=True),
    Column("bytes/s", right=True, drop=2),
    Column("waiting", right=True, drop=1),
    Column("last minute", drop=3),
    Column("epoch", note=True),
    Column("limit", note=True),
    Column("error", note=True),
)


def facts(snapshot: Snapshot) -> list[str]:
    """Return short facts for the line with the cluster's name."""
    facts = [f"launcher {snapshot.launcher}"]
    if (clients := _open_to(snapshot.tasks)) is not None:
        facts.append(f"open to {clients}")
    if snapshot.journal_bytes is not None:
        facts.append(f"journal {figures.size(snapshot.journal_bytes)}")
    if snapshot.expires is not None:
        facts.append(f"stops in {figures.duration(snapshot.expires - snapshot.time)}")
    if snapshot.lease is not None:
        left = figures.duration(max(0.0, snapshot.lease - snapshot.time))
        facts.append(f"detached, lease ends in {left}")
    return facts


def _open_to(tasks: Sequence[TaskRow]) -> str | None:
    """Return which clients can connect, or None if that differs between the tasks."""
    known = {row.open_to for row in tasks if row.open_to}
    return known.pop() if len(known) == 1 else None


def role_rows(snapshot: Snapshot) -> list[Row]:
    """Return one row per role: planned, requested and observed counts, and why they differ."""
    tables = (snapshot.planned, snapshot.requested, snapshot.observed)
    rows: list[Row] = []
    for role in Role:
        numbers = [table.get(role, 0) for table in tables]
        if any(numbers):
            why = _difference(snapshot, role, *numbers)
            rows.append([Cell(str(role)), *(Cell(str(n)) for n in numbers), Cell(why)])
    return rows


def _difference(snapshot: Snapshot, role: Role, planned: int, requested: int, observed: int) -> str:
    if planned == requested == observed:
        return ""
    reasons = []
    if planned > requested:
        reasons.append(f"{planned - requested} not requested yet")
    elif planned < requested:
        reasons.append(f"{requested - planned} to be removed")
    missing = [
        row for row in snapshot.tasks if row.role is role and row.state is not TaskState.READY
    ]
    missing.sort(key=lambda row: _urgency(row.state))
    for row in missing[:3]:
        reasons.append(f"{row.task} {row.state}" + (f" ({row.reason})" if row.reason else ""))
    if len(missing) > 3:
        reasons.append(f"and {len(missing) - 3} more")
    return "; ".join(reasons)


def task_rows(snapshot: Snapshot) -> tuple[list[Row], str]:
    """Return the rows of the tasks, and a sentence about omitted rows."""
    shown, rest = cut(snapshot.tasks)
    same = _open_to(snapshot.tasks) is not None
    return [_task_row(row, "" if same else row.open_to) for row in shown], rest


def _task_row(row: TaskRow, opened: str) -> Row:
    serves = row.role is not Role.DISPATCHER
    memory = row.pss_mb if row.pss_mb is not None else row.rss_mb
    return [
        Cell(row.task),
        state_cell(str(row.state)),
        Cell(row.address),
        Cell("" if row.pid is None else str(row.pid)),
        Cell(figures.percent(row.cpu_percent)),
        Cell("" if memory is None else figures.size(memory * 1e6)),
        Cell(figures.size(row.bytes_sent) if serves else ""),
        Cell(figures.rate(row.bytes_per_s) if serves and not row.state.ended else ""),
        Cell(row.gpu),
        Cell(str(row.restarts) if row.restarts else ""),
        Cell(opened),
        Cell(row.reason),
    ]


def stream_rows(snapshot: Snapshot) -> tuple[list[Row], str]:
    """Return the rows of the consumers, and a sentence about omitted rows."""
    shown, rest = cut(snapshot.streams)
    return [stream_row(row) for row in shown], rest


def stream_row(row: StreamRow) -> Row:
    """Return the row of one consumer."""
    share = row.wait_fraction
    return [
        Cell(row.name),
        state_cell(row.state),
        Cell(figures.count(row.elements)),
        Cell(figures.count(row.elements_per_s)),
        Cell(figures.rate(row.bytes_per_s) if row.bytes else ""),
        Cell("" if share is None else figures.percent(100 * share)),
        Cell(history=tuple(row.history)),
        Cell(row.epoch),
        Cell(row.limit),
        Cell(row.error),
    ]


def _urgency(state: object) -> int:
    word = str(state)
    return _URGENCY.index(word) if word in _URGENCY else 0


def cut(rows: Sequence[_AnyRow]) -> tuple[list[_AnyRow], str]:
    """Return the most urgent rows, and a sentence about omitted rows."""
    if len(rows) <= MAX_ROWS:
        return list(rows), ""
    ordered = sorted(rows, key=lambda row: _urgency(row.state))
    left = Counter(str(row.state) for row in ordered[MAX_ROWS:])
    kinds = ", ".join(f"{number:,} {state}" for state, number in left.items())
    return ordered[:MAX_ROWS], f"… and {len(rows) - MAX_ROWS:,} more ({kinds})"


def notices(snapshot: Snapshot) -> tuple[Notice, ...]:
    """Return the latest notices, oldest first."""
    return snapshot.notices[-_MAX_NOTICES:]
