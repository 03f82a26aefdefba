"""Tables over several clusters."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfd_notebook.model.snapshot import STREAM_COLUMNS, Snapshot
from tfd_notebook.views import cluster as parts
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.table import Cell, Column, Table, state_cell

_CLUSTER_COLUMNS = (
    Column("cluster"),
    Column("state"),
    Column("launcher", drop=1),
    Column("tasks ready", right=True),
    Column("reading", right=True),
    Column("detached", drop=2),
    Column("pid", right=True),
)


def brief(snapshot: Snapshot) -> dict[str, Any]:
    """Return a cluster in one line, as JSON values.

    Returns
    -------
    dict
        ``name state launcher planned observed reading lease``: how many tasks are planned and
        observed, how many consumers read from the cluster, and until when it stays without a
        kernel (seconds since the epoch, None: not at all).
    """
    spark = snapshot.spark
    nodes = spark.nodes if spark is not None else ()
    return {
        "name": snapshot.name,
        "state": snapshot.state,
        "launcher": snapshot.launcher,
        "planned": sum(snapshot.planned.values()) + (spark.needed if spark else 0),
        "observed": sum(snapshot.observed.values())
        + sum(node.state == "running" for node in nodes),
        "reading": sum(row.state == "running" for row in snapshot.streams)
        + sum(node.rows_per_s > 0 for node in nodes),
        "lease": snapshot.lease,
    }


def clusters_table(briefs: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of what `brief` gives, each with its ``pid`` or ``agent``."""
    rows = [
        (
            Cell(str(one["name"])),
            state_cell(str(one["state"])),
            Cell(str(one["launcher"])),
            Cell(f"{'?' if one['observed'] is None else one['observed']} of {one['planned']}"),
            Cell(str(one["reading"])),
            Cell(_stays(one.get("lease"))),
            Cell(f"agent {one['agent']}" if one.get("agent") else str(one.get("pid") or "")),
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


def _stays(lease: float | None) -> str:
    return "" if lease is None else f"for {figures.duration(max(0.0, lease - time.time()))}"


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


_JOB_COLUMNS = (
    Column("job"),
    Column("mode"),
    Column("pass", right=True),
    Column("state"),
    Column("readers", right=True),
    Column("read here by", drop=2),
    Column("splits", right=True, drop=3),
    Column("workers done", right=True, drop=1),
)


def jobs_table(
    state: Any, readers: Mapping[str, Sequence[str]], split_counts: Mapping[str, int]
) -> Table:
    """Return the table of what a dispatcher's journal knows of its jobs, a row for each pass.

    Parameters
    ----------
    state : JournalState
    readers : mapping of str to sequence of str
        Names of the consumers of this process, by the name of the job.
    split_counts : mapping of str to int
        How many splits the source of a dataset has, by the dataset's id, where that is known.
    """
    jobs = {job.id: job for job in state.jobs}
    tasks: dict[int, list[Any]] = {}
    for task in state.tasks:
        tasks.setdefault(task.iteration_id, []).append(task)
    records = []
    for one in state.iterations:
        job = jobs.get(one.job_id)
        own = tasks.get(one.id, [])
        done = sum(task.finished for task in own)
        records.append(
            {
                "job": job.name if job else "",
                "mode": job.mode.lower() if job else "",
                "pass": one.repetition,
                "state": "finished" if one.finished else "running" if one.clients else "left",
                "readers": one.clients,
                "read_here_by": ", ".join(readers.get(job.name, ())) if job else "",
                "splits": one.splits,
                "splits_total": split_counts.get(job.dataset_id) if job else None,
                "workers_done": f"{done} of {len(own)}",
            }
        )
    rows = [
        (
            Cell(figures.clean(r["job"])),
            Cell(r["mode"]),
            Cell(str(r["pass"])),
            state_cell(r["state"]),
            Cell(str(r["readers"])),
            Cell(r["read_here_by"]),
            Cell(_progress(r["splits"], r["splits_total"])),
            Cell(r["workers_done"]),
        )
        for r in records
    ]
    return Table(
        _JOB_COLUMNS, rows, label="jobs", empty="nothing has been read yet", records=records
    )


def _progress(done: int, total: int | None) -> str:
    """Return the splits in words; modes that hand out none have nothing to tell."""
    if not done:
        return ""
    if not total:
        return figures.count(done)
    return f"{figures.count(done)} of {figures.count(total)} ({done / total:.0%})"


_FORECAST_COLUMNS = (
    Column("data workers", right=True),
    Column("elements/s", right=True),
    Column("low", right=True),
    Column("high", right=True),
    Column("because of"),
)


def forecast_table(forecasts: Sequence[Any], foot: str = "") -> Table:
    """Return the table of estimates, each with the fields of ``data.forecast.Forecast``.

    Parameters
    ----------
    forecasts : sequence of Forecast
    foot : str
        A sentence below the rows.
    """
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
        foot=foot,
    )
