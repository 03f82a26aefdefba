"""Text view of a snapshot."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tfd_notebook.model.snapshot import Snapshot
from tfd_notebook.views import cluster as parts
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.coordinator import coordinator_text
from tfd_notebook.views.gpus import strip_text
from tfd_notebook.views.spark import spark_text
from tfd_notebook.views.table import Column, Row, text_table


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
    width = 110 if width is None else width
    head = [
        f"{figures.sign(snapshot.state)} {figures.clean(snapshot.name)}: {snapshot.state}",
        *map(figures.clean, parts.facts(snapshot)),
    ]
    lines = textwrap.wrap(" · ".join(head), max(width, 20), subsequent_indent="  ")
    tasks, more_tasks = parts.task_rows(snapshot)
    streams, more_streams = parts.stream_rows(snapshot)
    lines += _table(parts.ROLE_COLUMNS, parts.role_rows(snapshot), "", width)
    lines += _table(parts.TASK_COLUMNS, tasks, more_tasks, width)
    if snapshot.gpus:
        lines += ["", *strip_text(snapshot.gpus, width)]
    if snapshot.spark is not None:
        lines += ["", *spark_text(snapshot.spark, snapshot.time, width)]
    if snapshot.coordinator is not None:
        lines += ["", *coordinator_text(snapshot.coordinator, width)]
    lines += _table(parts.STREAM_COLUMNS, streams, more_streams, width)
    if notices := parts.notices(snapshot):
        lines.append("")
    for notice in notices:
        words = f"{figures.signed(notice.severity)}: {figures.clean(str(notice))}"
        lines += textwrap.wrap(words, max(width, 20), subsequent_indent="  ")
    return "\n".join(lines)


def _table(columns: Sequence[Column], rows: Sequence[Row], more: str, width: int) -> list[str]:
    lines = ["", *text_table(columns, rows, width)] if rows else []
    return [*lines, more] if more else lines
