"""Tables over several clusters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfd_notebook.snapshot import STREAM_COLUMNS, Snapshot
from tfd_notebook.views import _figures as figures
from tfd_notebook.views import _parts as parts
from tfd_notebook.views._table import Cell, Column, Table, state_cell

_CLUSTER_COLUMNS = (
    Column("cluster"),
    Column("state"),
    Column("launcher", drop=1),
    Column("tasks ready", right=True),
    Column("reading", right=True),
    Column("pid", right=True),
)


def brief(snapshot: Snapshot) -> dict[str, Any]:
    """Return a cluster in one line, as JSON values.

    Returns
    -------
    dict
        ``name state launcher planned observed reading``: how many tasks are planned and observed,
        and how many consumers read from the cluster.
    """
    return {
        "name": snapshot.name,
        "state": snapshot.state,
        "launcher": snapshot.launcher,
        "planned": sum(snapshot.planned.values()),
        "observed": sum(snapshot.observed.values()),
        "reading": sum(row.state == "running" for row in snapshot.streams),
    }


def clusters_table(briefs: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of what `brief` gives, each with a ``pid`` where it is known."""
    rows = [
        (
            Cell(str(one["name"])),
            state_cell(str(one["state"])),
            Cell(str(one["launcher"])),
            Cell(f"{one['observed']} of {one['planned']}"),
            Cell(str(one["reading"])),
            Cell(str(one.get("pid", ""))),
        )
        for one in briefs
    ]
    return Table(
        _CLUSTER_COLUMNS,
        rows,
        label="clusters",
        empty="no cluster lives",
        records=[dict(one) for one in briefs],
    )


def streams_table(snapshots: Iterable[Snapshot]) -> Table:
    """Return the table of all consumers of some clusters."""
    seen = [(snapshot.name, row) for snapshot in snapshots for row in snapshot.streams]
    return Table(
        (*parts.STREAM_COLUMNS[:1], Column("cluster", drop=4), *parts.STREAM_COLUMNS[1:]),
        [
            (first, Cell(figures.clean(name)), *rest)
            for name, row in seen
            for first, *rest in (parts.stream_row(row),)
        ],
        label="streams and datasets",
        empty="nothing reads from a cluster",
        records=[
            {"cluster": name, **{column: getattr(row, column) for column in STREAM_COLUMNS}}
            for name, row in seen
        ],
    )


_FORECAST_COLUMNS = (
    Column("data workers", right=True),
    Column("elements/s", right=True),
    Column("low", right=True),
    Column("high", right=True),
    Column("because of"),
)


def forecast_table(forecasts: Sequence[Any]) -> Table:
    """Return the table of estimates, each with the fields of ``data.forecast.Forecast``."""
    rows = [
        (
            Cell(str(one.data_workers)),
            Cell(figures.count(one.elements_per_s)),
            Cell(figures.count(one.low)),
            Cell(figures.count(one.high)),
            Cell(one.because),
        )
        for one in forecasts
    ]
    return Table(
        _FORECAST_COLUMNS,
        rows,
        label="estimates",
        empty="no number of data workers was given",
        records=[dataclasses.asdict(one) for one in forecasts],
    )
