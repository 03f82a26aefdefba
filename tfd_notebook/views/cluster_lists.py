"""Tables of several clusters, their consumers, data jobs and estimates."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tfd_notebook.model.snapshot import STREAM_COLUMNS, Snapshot
from tfd_notebook.model.stacks import FIELDS
from tfd_notebook.views import cluster as parts
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.table import STATE, Cell, Column, Table

_CLUSTER_COLUMNS = (
    Column("cluster", lambda summary: summary["name"]),
    STATE,
    Column("launcher", drop=1),
    Column("tasks ready", lambda summary: _ready(summary["observed"], summary["planned"]), True),
    Column("reading", right=True),
    Column("detached", lambda summary: _lease_text(summary.get("lease")), drop=2),
    Column("pid", lambda summary: _process(summary), right=True),
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
    return Table(
        _CLUSTER_COLUMNS,
        briefs,
        label="clusters",
        empty="no running cluster",
        records=[dict(summary) for summary in briefs],
    )


def _ready(observed: int | None, planned: int) -> str:
    return f"{'?' if observed is None else observed} of {planned}"


def _process(summary: Mapping[str, Any]) -> str:
    return f"agent {summary['agent']}" if summary.get("agent") else str(summary.get("pid") or "")


def _lease_text(lease: float | None) -> str:
    return "" if lease is None else f"for {figures.duration(max(0.0, lease - time.time()))}"


def streams_table(snapshots: Iterable[Snapshot]) -> Table:
    """Return the table of all consumers of some clusters."""
    rows = [
        SimpleNamespace(cluster=snapshot.name, **vars(row))
        for snapshot in snapshots
        for row in snapshot.streams
    ]
    first, *others = parts.STREAM_COLUMNS
    return Table(
        (first, Column("cluster", drop=4), *others),
        rows,
        label="streams and datasets",
        empty="no consumer reads from a cluster",
        names=("cluster", *STREAM_COLUMNS),
    )


_JOB_COLUMNS = (
    Column("job"),
    Column("mode"),
    Column("pass", right=True),
    STATE,
    Column("readers", right=True),
    Column("read here by", lambda record: record["read_here_by"], drop=2),
    Column(
        "splits",
        lambda record: _progress(record["splits"], record["splits_total"]),
        right=True,
        drop=3,
    ),
    Column("workers done", lambda record: record["workers_done"], right=True, drop=1),
    Column("note", lambda record: Cell(record["note"], tone="warn"), note=True),
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
                else "discarded"
                if iteration.discarded
                else "left",
                "readers": iteration.clients,
                "read_here_by": ", ".join(readers.get(job.name, ())) if job else "",
                "splits": iteration.splits,
                "splits_total": split_counts.get(job.dataset_id) if job else None,
                "workers_done": f"{finished} of {len(iteration_tasks)}",
                "note": _not_once(job, iteration, len(iteration_tasks)),
            }
        )
    omitted = f", {state.omitted:,} older finished passes" if state.omitted else ""
    return Table(
        _JOB_COLUMNS,
        records,
        label="jobs",
        empty="no data job yet",
        records=records,
        foot=f"{kept_text(state)}{omitted}",
    )


def kept_text(state: Any) -> str:
    """Return what a service keeps: the number of open passes, and the size of the journal."""
    passes = state.open_iterations
    return (
        f"{figures.count(passes)} open pass{'' if passes == 1 else 'es'}, "
        f"journal {figures.size(state.size_bytes)}"
    )


def _not_once(job: Any, iteration: Any, data_workers: int) -> str:
    """Return why a pass does not deliver each element once, or an empty text."""
    mode = job.mode.lower() if job else ""
    reasons = []
    if mode == "off" and data_workers > 1:
        reasons.append(f"each of {data_workers} data workers delivers all elements")
    if iteration.interrupted:
        effect = "elements may be missing" if mode == "dynamic" else "elements are repeated"
        reasons.append(f"{', '.join(iteration.interrupted)} stopped or restarted: {effect}")
    return "; ".join(reasons)


def _progress(finished: int, total: int | None) -> str:
    """Return the number of assigned splits as text. Empty for modes without splits."""
    if not finished:
        return ""
    if not total:
        return figures.count(finished)
    return f"{figures.count(finished)} of {figures.count(total)} ({finished / total:.0%})"


_FORECAST_COLUMNS = (
    Column("data workers", lambda forecast: forecast.data_workers, right=True),
    Column("elements/s", lambda forecast: figures.count(forecast.elements_per_s), right=True),
    Column("low", lambda forecast: figures.count(forecast.low), right=True),
    Column("high", lambda forecast: figures.count(forecast.high), right=True),
    Column("because of", lambda forecast: forecast.because),
)


def forecast_table(forecasts: Sequence[Any], foot: str = "") -> Table:
    """Return the table of estimates, each a ``data.bottleneck.scaling_estimate.Forecast``.

    Parameters
    ----------
    forecasts : sequence of Forecast
    foot : str
        A sentence below the rows.
    """
    return Table(
        _FORECAST_COLUMNS,
        forecasts,
        label="estimates",
        empty="no numbers of data workers given",
        records=[dataclasses.asdict(forecast) for forecast in forecasts],
        foot=foot,
    )


_STACK_COLUMNS = (
    Column("task"),
    Column("thread", drop=2),
    Column("function"),
    Column("file", lambda record: os.path.basename(record["file"])),
    Column("line", right=True),
    Column("seconds", lambda record: _seconds(record["seconds"]), right=True),
    Column("note", lambda record: Cell(record["note"], tone="quiet"), note=True),
)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else figures.count(seconds)


def stacks_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of Python stacks, each record with the fields `model.stacks.FIELDS`."""
    return Table(
        _STACK_COLUMNS,
        records,
        label="stacks",
        empty="no tasks",
        foot="to_frame() and --json have the whole stacks" if records else "",
        names=FIELDS,
    )
