"""Text and HTML views of snapshots. Pure functions: equal snapshots have equal views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfd_notebook.model.snapshot import Snapshot
from tfd_notebook.views.cluster import html as html
from tfd_notebook.views.cluster import text as text
from tfd_notebook.views.cluster_lists import brief as brief
from tfd_notebook.views.cluster_lists import clusters_table as clusters_table
from tfd_notebook.views.cluster_lists import forecast_table as forecast_table
from tfd_notebook.views.cluster_lists import jobs_table as jobs_table
from tfd_notebook.views.cluster_lists import kept_text as kept_text
from tfd_notebook.views.cluster_lists import stacks_table as stacks_table
from tfd_notebook.views.cluster_lists import streams_table as streams_table
from tfd_notebook.views.coordinator import coordinator_bundle as coordinator_bundle
from tfd_notebook.views.coordinator import counted as counted
from tfd_notebook.views.coordinator import values_table as values_table
from tfd_notebook.views.diagnostics import findings_table as findings_table
from tfd_notebook.views.formatting import clean_lines as clean_lines
from tfd_notebook.views.formatting import short_error as short_error
from tfd_notebook.views.gpus import gpus_table as gpus_table
from tfd_notebook.views.resolution import changes_table as changes_table
from tfd_notebook.views.resolution import resolution_bundle as resolution_bundle
from tfd_notebook.views.resolution import resolution_change_key as resolution_change_key
from tfd_notebook.views.resolution import resolution_html as resolution_html
from tfd_notebook.views.resolution import resolution_text as resolution_text
from tfd_notebook.views.resolution import task_status_table as task_status_table
from tfd_notebook.views.table import Column as Column
from tfd_notebook.views.table import Table as Table

if TYPE_CHECKING:
    import pandas as pd


def mimebundle(snapshot: Snapshot) -> dict[str, str]:
    """Return the text and the HTML view of `snapshot` by MIME type."""
    return {"text/plain": text(snapshot), "text/html": html(snapshot)}


@dataclass(frozen=True, repr=False)
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

    snapshot: Snapshot

    def to_frame(self) -> pd.DataFrame:
        """Return the tasks as a DataFrame, see `Snapshot.to_frame`. On Spark, return the nodes."""
        if self.snapshot.spark is not None:
            return self.snapshot.nodes_frame()
        return self.snapshot.to_frame()

    def __repr__(self) -> str:
        return text(self.snapshot)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return mimebundle(self.snapshot)
