"""Tables of several clusters, their consumers, data jobs and estimates."""

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
    """Return the summary of a cluster as JSON values.

    Returns
    -------
    dict
        ``name state launcher planned observed reading lease``. ``planned`` and ``observed`` are
        numbers of tasks, ``reading`` is the number of active consumers. ``lease`` is the end of the
        lease in seconds since the epoch, or None if the cluster is not detached.
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
    """Return the table of summaries from `brief`, each with its ``pid`` or ``agent``."""
    rows = [
        (
            Cell(str(summary["name"])),
            state_cell(str(summary["state"])),
            Cell(str(summary["launcher"])),
            Cell(_ready(summary["observed"], summary["planned"])),
            Cell(str(summary["reading"])),
            Cell(_lease_text(summary.get("lease"))),
            Cell(
                f"agent {summary['agent']}"
                if summary.get("agent")
                else str(summary.get("pid") or "")
            ),
        )
        for summary in briefs
    ]
    return Table(
        _CLUSTER_COLUMNS,
        rows,
        label="clusters",
        empty="no running cluster",
        records=[dict(summary) for summary in briefs],
    )


def _ready(observed: int | None, planned: int) -> str:
    return f"{'?' if observed is None else observed} of {planned}"


def _lease_text(lease: float | None) -> str:
    return "" if lease is None else f"for {figures.duration(max(0.0, lease - time.time()))}"


def streams_table(snapshots: Iterable[Snapshot]) -> Table:
    """Return the table of all consumers of some clusters."""
    rows = [(snapshot.name, row) for snapshot in snapshots for row in snapshot.streams]
    return Table(
        (*parts.STREAM_COLUMNS[:1], Column("cluster", drop=4), *parts.STREAM_COLUMNS[1:]),
        [
            (first, Cell(figures.clean(name)), *rest)
            for name, row in rows
            for first, *rest in (parts.stream_row(row),)
        ],
        label="streams and datasets",
        empty="no consumer reads from a cluster",
        records=[
            {"cluster": name, **{column: getattr(row, column) for column in STREAM_COLUMNS}}
            for name, row in rows
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
    """Return the table of the data jobs in a dispatcher's journal, a row for each iteration.

    Parameters
    ----------
    state : JournalState
    readers : mapping of str to sequence of str
        Names of the consumers of this process by the name of the job.
    split_counts : mapping of str to int
        Number of splits of a dataset's source by the dataset's id, if known.
    """
    jobs = {job.id: job for job in state.jobs}
    tasks: dict[int, list[Any]] = {}
    for task in state.tasks:
        tasks.setdefault(task.iteration_id, []).append(task)
    records = []
    for iteration in state.iterations:
        job = jobs.get(iteration.job_id)
        iteration_tasks = tasks.get(iteration.id, [])
        finished = sum(task.finished for task in iteration_tasks)
        records.append(
            {
                "job": job.name if job else "",
                "mode": job.mode.lower() if job else "",
                "pass": iteration.repetition,
                "state": "finished"
                if iteration.finished
                else "running"
                if iteration.clients
                else "left",
                "readers": iteration.clients,
                "read_here_by": ", ".join(readers.get(job.name, ())) if job else "",
                "splits": iteration.splits,
                "splits_total": split_counts.get(job.dataset_id) if job else None,
                "workers_done": f"{finished} of {len(iteration_tasks)}",
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
    return Table(_JOB_COLUMNS, rows, label="jobs", empty="no data job yet", records=records)


def _progress(finished: int, total: int | None) -> str:
    """Return the number of assigned splits as text. Empty for modes without splits."""
    if not finished:
        return ""
    if not total:
        return figures.count(finished)
    return f"{figures.count(finished)} of {figures.count(total)} ({finished / total:.0%})"


_FORECAST_COLUMNS = (
    Column("data workers", right=True),
    Column("elements/s", right=True),
    Column("low", right=True),
    Column("high", right=True),
    Column("because of"),
)


def forecast_table(forecasts: Sequence[Any], foot: str = "") -> Table:
    """Return the table of estimates, each a ``data.bottleneck.scaling_estimate.Forecast``.

    Parameters
    ----------
    forecasts : sequence of Forecast
    foot : str
        A sentence below the rows.
    """
    rows = [
        (
            Cell(str(forecast.data_workers)),
            Cell(figures.count(forecast.elements_per_s)),
            Cell(figures.count(forecast.low)),
            Cell(figures.count(forecast.high)),
            Cell(forecast.because),
        )
        for forecast in forecasts
    ]
    return Table(
        _FORECAST_COLUMNS,
        rows,
        label="estimates",
        empty="no numbers of data workers given",
        records=[dataclasses.asdict(forecast) for forecast in forecasts],
        foot=foot,
    )
