"""Text and HTML views of a coordinator and its closures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tfd_notebook.model.snapshot import CoordinatedRow, CoordinatorRow
from tfd_notebook.views import cluster as parts
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.style import wrap
from tfd_notebook.views.table import Cell, Column, Row, Table, html_table, state_cell, text_table

_WORKER_COLUMNS = (
    Column("worker"),
    Column("state"),
    Column("closure", right=True, drop=4),
    Column("function", drop=1),
    Column("for", right=True, drop=3),
    Column("done", right=True),
    Column("failed", right=True),
    Column("lost", right=True, drop=2),
    Column("datasets", right=True, drop=5),
)

_VALUE_COLUMNS = (
    Column("id", right=True),
    Column("function"),
    Column("state"),
    Column("worker", right=True),
    Column("attempts", right=True, drop=2),
    Column("waited", right=True, drop=1),
    Column("ran", right=True, drop=1),
    Column("fetched", right=True, drop=3),
    Column("error", note=True),
)
#: Maximum number of functions or parameter servers that a line names.
_MAX_NAMED = 5


def coordinator_text(row: CoordinatorRow, width: int) -> list[str]:
    """Return the lines of a coordinator."""
    facts = " · ".join([f"coordinator: {_state(row)}", *map(figures.clean, _facts(row))])
    rows, more = _worker_rows(row)
    lines = textwrap.wrap(facts, max(width, 20), subsequent_indent="  ")
    lines += text_table(_WORKER_COLUMNS, rows, width)
    lines += [more] if more else []
    for words in _sentences(row):
        lines += textwrap.wrap(figures.clean(words), max(width, 20), subsequent_indent="  ")
    return lines


def coordinator_html(row: CoordinatorRow) -> str:
    """Return the elements of a coordinator."""
    facts = "".join(f'<span class="tfd-quiet">{escape(fact)}</span>' for fact in _facts(row))
    rows, more = _worker_rows(row)
    below = [more] if more else []
    return (
        '<div class="tfd-head"><span>coordinator</span>'
        f'<span class="tfd-{figures.tone(row.state)}">{escape(_state(row))}</span>{facts}</div>'
        + html_table(_WORKER_COLUMNS, rows, "workers of the coordinator")
        + "".join(
            f'<div class="tfd-quiet">{escape(words)}</div>' for words in (*below, *_sentences(row))
        )
    )


def coordinator_bundle(row: CoordinatorRow) -> dict[str, str]:
    """Return the text and the HTML view of a coordinator by MIME type."""
    return {
        "text/plain": "\n".join(coordinator_text(row, 110)),
        "text/html": wrap(coordinator_html(row)),
    }


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


def _worker_rows(row: CoordinatorRow) -> tuple[list[Row], str]:
    shown, rest = parts.cut(row.workers)
    return [_worker_row(worker) for worker in shown], rest


def _worker_row(row: CoordinatedRow) -> Row:
    built = figures.count(row.built) if row.built else ""
    return [
        Cell(f"worker:{row.index}"),
        state_cell(row.state),
        Cell("" if row.id is None else str(row.id)),
        Cell(row.function),
        Cell("" if row.seconds is None else figures.brief(row.seconds)),
        Cell(figures.count(row.done)),
        Cell(figures.count(row.failed) if row.failed else "", "bad"),
        Cell(figures.count(row.lost) if row.lost else "", "warn"),
        Cell(f"{built or 0}, {row.unbuilt} failed" if row.unbuilt else built),
    ]


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
        [_value_row(record) for record in records],
        label="closures",
        empty="no matching closure" if total else "no closure scheduled yet",
        records=[dict(record) for record in records],
        foot=f"{shown}{total:,}: {counted(counts)}" if total else "",
    )


def _value_row(record: Mapping[str, Any]) -> Row:
    def span(name: str) -> Cell:
        return Cell("" if record[name] is None else figures.brief(record[name] / 1e3))

    return [
        Cell(str(record["id"])),
        Cell(record["function"]),
        state_cell(record["state"]),
        Cell(str(record["worker"]) if record["worker"] >= 0 else ""),
        Cell(str(record["attempts"]) if record["attempts"] > 1 else ""),
        span("queue_ms"),
        span("run_ms"),
        span("fetch_ms"),
        Cell(figures.short_error(record["error"])),
    ]
