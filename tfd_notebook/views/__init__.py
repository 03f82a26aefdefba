"""Text and HTML views of snapshots. Pure functions: equal snapshots have equal views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfd_notebook.model.snapshot import Snapshot
from tfd_notebook.views.cluster import html, text
from tfd_notebook.views.cluster_lists import (
    brief,
    clusters_table,
    forecast_table,
    jobs_table,
    streams_table,
)
from tfd_notebook.views.coordinator import coordinator_bundle, counted, values_table
from tfd_notebook.views.diagnostics import findings_table
from tfd_notebook.views.formatting import clean_lines, short_error
from tfd_notebook.views.gpus import gpus_table
from tfd_notebook.views.resolution import (
    changes_table,
    resolution_bundle,
    resolution_change_key,
    resolution_html,
    resolution_text,
    task_status_table,
)
from tfd_notebook.views.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Column",
    "Table",
    "View",
    "brief",
    "changes_table",
    "clean_lines",
    "clusters_table",
    "coordinator_bundle",
    "counted",
    "findings_table",
    "forecast_table",
    "gpus_table",
    "html",
    "jobs_table",
    "mimebundle",
    "resolution_bundle",
    "resolution_change_key",
    "resolution_html",
    "resolution_text",
    "short_error",
    "streams_table",
    "task_status_table",
    "text",
    "values_table",
]


def mimebundle(snapshot: Snapshot) -> dict[str, str]:
    """Return the text and the HTML view of `snapshot` by MIME type."""
    return {"text/plain": text(snapshot), "text/html": html(snapshot)}


class View:
    """A snapshot that displays itself in a front end.

    Parameters
    ----------
    snapshot : Snapshot

    Attributes
    ----------
    snapshot : Snapshot
        The displayed snapshot. It is immutable.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def to_frame(self) -> pd.DataFrame:
        """Return the tasks as a DataFrame, see `Snapshot.to_frame`. On Spark, return the nodes."""
        if self.snapshot.spark is not None:
            return self.snapshot.nodes_frame()
        return self.snapshot.to_frame()

    def __repr__(self) -> str:
        return text(self.snapshot)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return mimebundle(self.snapshot)
