"""The view of a snapshot, as text and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tfd_notebook.model.snapshot import AdaptationRow, Snapshot, StreamRow, TaskRow
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.views import blocks
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.coordinator import coordinator_blocks
from tfd_notebook.views.gpus import GpuStrip
from tfd_notebook.views.spark import spark_sections
from tfd_notebook.views.table import STATE, Cell, Column, Table, urgency, urgent_table

_MAX_NOTICES = 5

_ROLE_COLUMNS = (
    Column("role"),
    Column("planned", right=True),
    Column("requested", right=True),
    Column("observed", right=True),
    Column("why", note=True),
)
_OPEN_TO = Column("open to", lambda row: row.open_to, drop=1)
_TASK_COLUMNS = (
    Column("task"),
    STATE,
    Column("address", drop=2),
    Column("pid", right=True, drop=9),
    Column("CPU", lambda row: figures.percent(row.cpu_percent), right=True, drop=5),
    Column("memory", lambda row: _memory(row), right=True, drop=4),
    Column("sent", lambda row: _sent(row, figures.size(row.bytes_sent)), right=True, drop=6),
    Column("rate", lambda row: _sent(row, _rate(row)), right=True, drop=3),
    Column("GPU", lambda row: row.gpu, drop=7),
    Column("restarts", lambda row: row.restarts or None, right=True, drop=8),
    _OPEN_TO,
    Column("reason", note=True),
)
_RANK_COLUMNS = (
    Column("rank", right=True),
    STATE,
    Column("function"),
    Column("task"),
    Column("host", drop=2),
    Column("attempt", right=True, drop=1),
    Column("reason", lambda row: row.reason.rstrip().rpartition("\n")[2], note=True),
)
STREAM_COLUMNS = (
    Column("data", lambda row: row.name),
    STATE,
    Column("elements", lambda row: figures.count(row.elements), right=True),
    Column("elements/s", lambda row: figures.count(row.elements_per_s), right=True),
    Column(
        "bytes/s",
        lambda row: figures.rate(row.bytes_per_s) if row.bytes else None,
        right=True,
        drop=2,
    ),
    Column("waiting", lambda row: _waiting(row), right=True, drop=1),
    Column("last minute", lambda row: Cell(history=tuple(row.history)), drop=3),
    Column("epoch", note=True),
    Column("limit", note=True),
    Column("error", note=True),
)


def text(snapshot: Snapshot, width: int | None = None) -> str:
    """Return `snapshot` as plain text.

    Parameters
    ----------
    snapshot : Snapshot
    width : int, optional
        Maximum width. Tables drop their least important columns first. Default 110.

    Returns
    -------
    str
        Lines without a trailing newline and without control characters.
    """
    return blocks.text(_sections(snapshot), 110 if width is None else width)


def html(snapshot: Snapshot) -> str:
    """Return `snapshot` as one HTML element with its style sheet.

    All text is escaped. Colors come from the theme of the page. The HTML includes the
    time of the snapshot, because notebooks save it.
    """
    head, *sections = _sections(snapshot)
    note = blocks.Sentence(f"Snapshot of {figures.clock(snapshot.time)}, not updated")
    return blocks.html([[*head, note], *sections])


def _sections(snapshot: Snapshot) -> Iterator[Sequence[blocks.Block]]:
    state = f"{figures.sign(snapshot.state)} {snapshot.state}"
    name = f"{figures.sign(snapshot.state)} {snapshot.name}: {snapshot.state}"
    spans = ((snapshot.name, "name"), (state, figures.tone(snapshot.state)))
    yield [blocks.Head(name, spans, _facts(snapshot))]
    yield [Table(_ROLE_COLUMNS, _role_rows(snapshot), label="tasks by role")]
    columns: Sequence[Column] = _TASK_COLUMNS
    if _open_to(snapshot.tasks) is not None:  # the head has it
        columns = [column for column in columns if column is not _OPEN_TO]
    yield [urgent_table(columns, snapshot.tasks, "tasks")]
    yield [GpuStrip(snapshot.gpus)]
    if snapshot.spark is not None:
        yield from spark_sections(snapshot.spark, snapshot.time)
    if snapshot.adaptation is not None and snapshot.adaptation.workers is not None:
        yield [blocks.Sentence(_adapted(snapshot.adaptation, snapshot.time), "quiet")]
    if snapshot.coordinator is not None:
        yield coordinator_blocks(snapshot.coordinator)
    yield [urgent_table(_RANK_COLUMNS, snapshot.ranks, "ranks")]
    yield [urgent_table(STREAM_COLUMNS, snapshot.streams, "streams and datasets")]
    yield [
        blocks.Sentence(str(notice), figures.tone(notice.severity), figures.signed(notice.severity))
        for notice in snapshot.notices[-_MAX_NOTICES:]
    ]


def _facts(snapshot: Snapshot) -> list[str]:
    """Return short facts for the line with the cluster's name."""
    facts = [f"launcher {snapshot.launcher}"]
    if (clients := _open_to(snapshot.tasks)) is not None:
        facts.append(f"open to {clients}")
    if (adaptation := snapshot.adaptation) is not None:
        facts.append(f"adapts {adaptation.minimum} to {adaptation.maximum} data workers")
    if snapshot.journal_bytes is not None:
        facts.append(f"journal {figures.size(snapshot.journal_bytes)}")
    if snapshot.expires is not None:
        facts.append(f"stops in {figures.duration(snapshot.expires - snapshot.time)}")
    if snapshot.lease is not None:
        left = figures.duration(max(0.0, snapshot.lease - snapshot.time))
        facts.append(f"detached, lease ends in {left}")
    return facts


def _adapted(row: AdaptationRow, now: float) -> str:
    """Return the latest decision in words."""
    age = "" if row.since is None else f" {figures.duration(max(0.0, now - row.since))} ago"
    return f"adapted to {row.workers} data workers{age}: {row.reason}"


def _open_to(tasks: Sequence[TaskRow]) -> str | None:
    """Return which clients can connect, or None if that differs between the tasks."""
    known = {row.open_to for row in tasks if row.open_to}
    return known.pop() if len(known) == 1 else None


def _role_rows(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    """Yield one row per role: planned, requested and observed counts, and why they differ."""
    for role in Role:
        planned, requested, observed = (
            counts.get(role, 0)
            for counts in (snapshot.planned, snapshot.requested, snapshot.observed)
        )
        if planned or requested or observed:
            yield {
                "role": role,
                "planned": planned,
                "requested": requested,
                "observed": observed,
                "why": _difference(snapshot, role, planned, requested, observed),
            }


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
    missing.sort(key=urgency)
    for row in missing[:3]:
        reasons.append(f"{row.task} {row.state}" + (f" ({row.reason})" if row.reason else ""))
    if len(missing) > 3:
        reasons.append(f"and {len(missing) - 3} more")
    return "; ".join(reasons)


def _memory(row: TaskRow) -> str | None:
    memory = row.pss_mb if row.pss_mb is not None else row.rss_mb
    return None if memory is None else figures.size(memory * 1e6)


def _sent(row: TaskRow, value: str) -> str:
    return "" if row.role is Role.DISPATCHER else value


def _rate(row: TaskRow) -> str:
    return "" if row.state.ended else figures.rate(row.bytes_per_s)


def _waiting(row: StreamRow) -> str:
    return "" if row.wait_fraction is None else figures.percent(100 * row.wait_fraction)
