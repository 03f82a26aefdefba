"""HTML view of a snapshot."""

from __future__ import annotations

from html import escape

from tfd_notebook.model.snapshot import Snapshot
from tfd_notebook.views import cluster as parts
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.coordinator import coordinator_html
from tfd_notebook.views.gpus import strip_html
from tfd_notebook.views.spark import spark_html
from tfd_notebook.views.style import wrap
from tfd_notebook.views.table import html_table


def html(snapshot: Snapshot) -> str:
    """Return `snapshot` as one HTML element with its style sheet.

    All text is escaped. Colors come from the theme of the page.
    """
    tasks, more_tasks = parts.task_rows(snapshot)
    streams, more_streams = parts.stream_rows(snapshot)
    return wrap(
        _head(snapshot)
        + html_table(parts.ROLE_COLUMNS, parts.role_rows(snapshot), "tasks by role")
        + html_table(parts.TASK_COLUMNS, tasks, "tasks")
        + _quiet(more_tasks)
        + strip_html(snapshot.gpus)
        + (spark_html(snapshot.spark, snapshot.time) if snapshot.spark else "")
        + (coordinator_html(snapshot.coordinator) if snapshot.coordinator else "")
        + html_table(parts.STREAM_COLUMNS, streams, "streams and datasets")
        + _quiet(more_streams)
        + _notices(snapshot)
    )


def _head(snapshot: Snapshot) -> str:
    name, state = escape(snapshot.name), escape(snapshot.state)
    facts = "".join(
        f'<span class="tfd-quiet">{escape(fact)}</span>' for fact in parts.facts(snapshot)
    )
    return (
        f'<div class="tfd-head"><span class="tfd-name" title="{name}">{name}</span>'
        f'<span class="tfd-{figures.tone(snapshot.state)}">{figures.sign(snapshot.state)} {state}'
        f"</span>{facts}</div>"
    )


def _quiet(words: str) -> str:
    return f'<div class="tfd-quiet">{escape(words)}</div>' if words else ""


def _notices(snapshot: Snapshot) -> str:
    items = "".join(
        f'<li><span class="tfd-{figures.tone(notice.severity)}">'
        f"{escape(figures.signed(notice.severity))}</span>: {escape(str(notice))}</li>"
        for notice in parts.notices(snapshot)
    )
    return f"<ul>{items}</ul>" if items else ""
