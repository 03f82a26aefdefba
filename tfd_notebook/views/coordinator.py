"""Text and HTML views of a coordinator and its closures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfd_notebook.model.snapshot import CoordinatedRow, CoordinatorRow
from tfd_notebook.views import blocks
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.table import STATE, Cell, Column, Table, urgent_table

_WORKER_COLUMNS = (
    Column("worker", lambda row: f"worker:{row.index}"),
    STATE,
    Column("closure", lambda row: row.id, right=True, drop=4),
    Column("function", drop=1),
    Column("for", lambda row: _span(row.seconds), right=True, drop=3),
    Column("done", lambda row: figures.count(row.done), right=True),
    Column("failed", lambda row: Cell(_number(row.failed), "bad"), right=True),
    Column("lost", lambda row: Cell(_number(row.lost), "warn"), right=True, drop=2),
    Column("datasets", lambda row: _datasets(row), right=True, drop=5),
)

_VALUE_COLUMNS = (
    Column("id", right=True),
    Column("function"),
    STATE,
    Column("worker", lambda record: _at_least(0, record["worker"]), right=True),
    Column("attempts", lambda record: _at_least(2, record["attempts"]), right=True, drop=2),
    Column("waited", lambda record: _span(record["queue_ms"], 1e-3), right=True, drop=1),
    Column("ran", lambda record: _span(record["run_ms"], 1e-3), right=True, drop=1),
    Column("fetched", lambda record: _span(record["fetch_ms"], 1e-3), right=True, drop=3),
    Column("error", lambda record: figures.short_error(record["error"]), note=True),
)
#: Maximum number of functions or parameter servers that a line names.
_MAX_NAMED = 5


def coordinator_blocks(row: CoordinatorRow) -> list[blocks.Block]:
    """Return the blocks of a coordinator."""
    state = _state(row)
    spans = (("coordinator", "quiet"), (state, figures.tone(row.state)))
    return [
        blocks.Head(f"coordinator: {state}", spans, _facts(row)),
        urgent_table(_WORKER_COLUMNS, row.workers, "workers of the coordinator"),
        *map(blocks.Sentence, _sentences(row)),
    ]


def coordinator_bundle(row: CoordinatorRow) -> dict[str, str]:
    """Return the text and the HTML view of a coordinator by MIME type."""
    return blocks.bundle([coordinator_blocks(row)])


def _state(row: CoordinatorRow) -> str:
    return figures.signed(row.state) + (f" ({figures.clean(row.reason)})" if row.reason else "")


def _facts(row: CoordinatorRow) -> list[str]:
    facts = [counted(row.counts) or "no closure yet"]
    if row.closures_per_s:
        facts.append(f"{figures.count(row.closures_per_s)} closures/s")
    if row.left_s is not None:
        middle, low, high = map(figures.brief, row.left_s)
        facts.append(f"about {middle} left ({low} to {high})")
    for word, spans in (("waited", row.queue_ms), ("ran", row.run_ms)):
        if spans is not None:
            p50, p90, p99 = (figures.brief(ms / 1e3) for ms in spans)
            facts.append(f"{word} p50 {p50}, p90 {p90}, p99 {p99}")
    if row.ps_bytes:
        facts.append(_listed("variables", {t: figures.size(b) for t, b in row.ps_bytes.items()}))
    if row.traces:
        facts.append(_listed("traces", {name: str(n) for name, n in row.traces.items()}))
    if row.break_on_failure:
        facts.append("breaks on failure")
    return facts


def _listed(title: str, named: Mapping[str, str]) -> str:
    items = [f"{name} {words}" for name, words in list(named.items())[:_MAX_NAMED]]
    if len(named) > _MAX_NAMED:
        items.append(f"and {len(named) - _MAX_NAMED} more")
    return f"{title}: {', '.join(items)}"


def _sentences(row: CoordinatorRow) -> list[str]:
    sentences = [row.limit] if row.limit else []
    if row.reduced:
        sentences.append(
            "This version of TensorFlow is untested: only scheduled closures and their results are "
            "recorded, and pausing is not possible."
        )
    return sentences


def _number(number: int) -> str:
    return figures.count(number) if number else ""


def _datasets(row: CoordinatedRow) -> str:
    built = _number(row.built)
    return f"{built or 0}, {row.unbuilt} failed" if row.unbuilt else built


def _span(value: float | None, unit: float = 1.0) -> str | None:
    return None if value is None else figures.brief(value * unit)


def _at_least(least: int, number: int) -> int | None:
    return number if number >= least else None


def counted(counts: Mapping[str, int]) -> str:
    """Return the numbers of closures by state as text, without zeros."""
    return ", ".join(f"{number:,} {state}" for state, number in counts.items() if number)


def values_table(records: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> Table:
    """Return the table of some closures.

    Parameters
    ----------
    records : sequence of mapping
        The result of ``coordinator.values.records()``.
    counts : mapping of str to int
        Number of closures in each state.
    """
    total = sum(counts.values())
    shown = "" if len(records) == total else f"{len(records):,} shown of "
    return Table(
        _VALUE_COLUMNS,
        records,
        label="closures",
        empty="no matching closure" if total else "no closure scheduled yet",
        records=[dict(record) for record in records],
        foot=f"{shown}{total:,}: {counted(counts)}" if total else "",
    )
