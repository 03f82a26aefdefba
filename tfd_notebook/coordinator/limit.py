"""Bottleneck of a coordinator, derived from its closures and tasks."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tfd_notebook.data.bottleneck.classification import is_busy
from tfd_notebook.data.bottleneck.usage import processors
from tfd_notebook.data.variable_names import variable_of
from tfd_notebook.model.closure_store import READY, Columns, Store
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role

#: Number of latest closures that are evaluated.
_LATEST_CLOSURES = 5_000
#: Minimum closures for an evaluation.
_MIN_CLOSURES = 5
#: Share of the time that workers have a closure. Below it, they lack closures.
_BUSY_SHARE = 0.6
#: Run time in seconds below which dispatching is most of a closure's cost.
_SHORT_SECONDS = 2e-3
#: Share of a function's closures that were retraced. Above it, tracing is the bottleneck.
_RETRACED_SHARE = 0.2
#: Share of the variables' bytes on one of several parameter servers that makes it a bottleneck.
_ONE_PS_SHARE = 0.7
#: Used processor cores of a worker below which it waits for something else.
_IDLE_CORES = 0.5
#: Seconds without a closure that count as a pause by the user, between two cells or two steps.
_BREAK_SECONDS = 3.0
_NETWORK_BYTES_PER_S = 30e6
#: Measurements of tasks arrive once a second and cover the previous second. The latest one covers
#: closures that ran for the first time or longer. They must have ended at most the second time ago.
_MEASURED_SECONDS = 2.0
_FRESH_SECONDS = 0.2
#: Seconds without a closure that separate two such runs.
_GAP_SECONDS = 0.5
#: Ratio of run times of closures with and without input. Above it, input may be the bottleneck.
_LONGER_FACTOR = 1.5
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_NO_FREE_CORES = (
    "all cores of this host are in use, so more workers on it would not help: add workers on "
    "other hosts"
)
#: The latest measurements of the tasks while closures ran.
_tasks_while_running: weakref.WeakKeyDictionary[Store, Sequence[TaskRow]] = (
    weakref.WeakKeyDictionary()
)

NOTHING = Limit("none", figures={"closures_per_s": 0.0})


def judge(
    store: Store,
    workers: int,
    fetches: int,
    fetch_seconds: float,
    tasks: Sequence[TaskRow] = (),
    ps_bytes: Mapping[str, int] | None = None,
    reads_input: bool | Collection[str] = False,
    paused: bool = False,
    cluster: object = None,
    coordinator: object = None,
) -> Limit:
    """Return the bottleneck of a coordinator.

    Parameters
    ----------
    store : Store
    workers : int
    fetches : int
        Number of calls that waited for a single result.
    fetch_seconds : float
        Total duration of these waits.
    tasks : sequence of TaskRow
        The tasks of the cluster. While closures run, their current CPU and network usage counts.
        Otherwise it is the usage from the last call while closures ran.
    ps_bytes : mapping of str to int, optional
        Bytes of the variables on each parameter server.
    reads_input : bool or collection of str
        Whether closures read from datasets on the workers, or the names of functions that do.
    paused : bool
        Whether the coordinator is paused. Default false.
    cluster, coordinator : object, optional
        Advice names the user's variables that hold them. Default ``cluster`` and ``coordinator``.
    """
    # With `ended`, queued closures do not displace those that have run.
    columns = store.columns(_LATEST_CLOSURES, ended=True)
    ended = _Ended(columns)
    if len(ended.finished) < _MIN_CLOSURES:
        return NOTHING
    figures = _figures(ended, workers)
    busy, run = figures["workers_busy"], figures["run_ms_median"] / 1e3
    tasks = _while_running(store, tasks, ended, run)
    traced = {name: count for name, count in store.traces().items() if count > 3}
    counted = store.functions()
    for name, count in traced.items():
        if counted[name] and count / counted[name] >= _RETRACED_SHARE:
            return Limit(
                "retracing",
                name,
                min(1.0, count / counted[name]),
                {**figures, "traces": float(count)},
                "pass tensors of constant shapes instead of Python numbers, or give the function "
                "an input_signature",
            )
    if busy < _BUSY_SHARE:
        waiting, _ = store.unfinished()
        total = len(store)
        if total and fetches >= 0.5 * total and fetch_seconds > 0:
            return Limit(
                "fetch_in_loop",
                "",
                1 - busy,
                figures,
                "schedule many closures first and fetch their results afterwards",
                expected_gain=_expected_gain(workers, busy),
            )
        if run < _SHORT_SECONDS and figures["queue_ms_median"] > figures["run_ms_median"]:
            return _short_closures(figures)
        if not waiting:
            return Limit(
                "few_closures",
                "",
                1 - busy,
                figures,
                f"schedule more before join: {workers} workers need more than {workers} closures "
                "at a time",
                expected_gain=_expected_gain(workers, busy),
            )
    if run < _SHORT_SECONDS:
        return _short_closures(figures)
    waits_for_input = _may_wait_for_input(columns.functions, ended, reads_input)
    limit = _limit_of_tasks(figures, tasks, ps_bytes or {}, waits_for_input)
    if limit.kind != "compute":
        return limit
    if paused:
        name = variable_of(coordinator, "coordinator")
        return replace(limit, advice=f"resume it: {name}.resume()")
    if not any(store.unfinished()):
        return replace(limit, advice="schedule more closures: none waits or runs now")
    if time.perf_counter() - ended.until[-1] > max(_BREAK_SECONDS, 3 * run):
        return limit  # no closure ends now, for any reason
    local = [row for row in tasks if row.host in _LOCAL_HOSTS]
    used = sum(row.cpu_percent or 0.0 for row in local) / 100
    if local and len(local) == len(tasks) and is_busy(used, processors()):
        return replace(limit, advice=_NO_FREE_CORES)
    name = variable_of(cluster, "cluster")
    return replace(limit, advice=f"add workers: {name}.scale(workers={workers + 1})")


class _Ended:
    """The columns of closures that became ready, in the order in which they were dispatched."""

    def __init__(self, columns: Columns) -> None:
        import numpy as np

        rows = np.flatnonzero(np.frombuffer(columns.state, np.uint8) == READY)
        rows = rows[np.argsort(np.frombuffer(columns.dispatched)[rows], kind="stable")]
        self.function = np.frombuffer(columns.function, np.intc)[rows]
        self.dispatched = np.frombuffer(columns.dispatched)[rows]
        self.finished = np.frombuffer(columns.finished)[rows]
        self.waits = self.dispatched - np.frombuffer(columns.queued)[rows]
        self.runs = (np.frombuffer(columns.fetching) - np.frombuffer(columns.started))[rows]
        #: The latest end of these closures and those before them.
        self.until = np.maximum.accumulate(self.finished)
        #: The seconds from it to the dispatch of the next closure; negative while one runs.
        self.breaks = self.dispatched[1:] - self.until[:-1]


def _while_running(
    store: Store, tasks: Sequence[TaskRow], ended: _Ended, run: float
) -> Sequence[TaskRow]:
    """Return the tasks as measured while closures run, or while they ran last."""
    began = ended.dispatched[0]
    if len(gaps := (ended.breaks > _GAP_SECONDS).nonzero()[0]):
        began = ended.dispatched[gaps[-1] + 1]
    until = ended.until[-1]
    now, (_, running) = time.perf_counter(), store.unfinished()
    if running and now - until <= 1.5 * run:
        until = now
    if now - until <= _FRESH_SECONDS and until - began >= _MEASURED_SECONDS:
        _tasks_while_running[store] = tasks
    return _tasks_while_running.get(store, ())


def _may_wait_for_input(
    functions: Sequence[str], ended: _Ended, readers: bool | Collection[str]
) -> bool:
    """Return True if closures read input, and run longer than closures that do not, if any."""
    import numpy as np

    if isinstance(readers, bool):
        return readers
    reads = np.isin(ended.function, [i for i, name in enumerate(functions) if name in readers])
    reading, others = ended.runs[reads], ended.runs[~reads]
    if len(others) < _MIN_CLOSURES:
        return len(reading) > 0
    return len(reading) > 0 and bool(np.median(reading) > _LONGER_FACTOR * np.median(others))


def _short_closures(figures: dict[str, float]) -> Limit:
    return Limit(
        "short_closures",
        "",
        None,
        figures,
        "do more work in each closure: several steps in one tf.function, with tf.range",
    )


def _limit_of_tasks(
    figures: dict[str, float],
    tasks: Sequence[TaskRow],
    ps_bytes: Mapping[str, int],
    reads_input: bool,
) -> Limit:
    busy = figures["workers_busy"]
    total = sum(ps_bytes.values())
    cpu = [
        row.cpu_percent / 100
        for row in tasks
        if row.role is Role.WORKER and row.cpu_percent is not None
    ]
    ps = [row for row in tasks if row.role is Role.PS]
    sent = sum(row.bytes_per_s or 0.0 for row in ps)
    figures = {**figures, "ps_bytes_per_s": sent}
    if cpu:
        figures["worker_cpu_cores"] = statistics.mean(cpu)
    waits = bool(cpu) and statistics.mean(cpu) < _IDLE_CORES
    if waits and total and len(ps) > 1:
        most = max(ps_bytes, key=lambda task: ps_bytes[task])
        if ps_bytes[most] / total >= _ONE_PS_SHARE:
            return Limit(
                "one_ps",
                most,
                ps_bytes[most] / total,
                figures,
                "give strategy() a variable_partitioner, so that large variables are spread",
            )
    if waits and sent >= _NETWORK_BYTES_PER_S:
        return Limit(
            "network",
            "",
            None,
            figures,
            "read and write variables less often: larger batches, or several steps in a closure",
        )
    if waits and reads_input:
        return Limit(
            "input",
            "",
            None,
            figures,
            "make the input faster: prefetch in the dataset, or data workers of a tf.data service",
        )
    if busy < _BUSY_SHARE:
        return Limit("none", figures=figures)
    return Limit("compute", "", busy, figures)


def _figures(ended: _Ended, workers: int) -> dict[str, float]:
    import numpy as np

    wall = _working_seconds(ended)
    busy_seconds = float((ended.finished - ended.dispatched).sum())
    return {
        "closures_per_s": len(ended.finished) / wall,
        "workers_busy": min(1.0, busy_seconds / (wall * max(workers, 1))),
        "run_ms_median": float(np.median(ended.runs)) * 1e3,
        "queue_ms_median": float(np.median(ended.waits)) * 1e3,
    }


def _working_seconds(ended: _Ended) -> float:
    """Return the seconds in which closures ran, including short breaks but not long ones.

    Queueing time is excluded, because a queued closure only waits for earlier ones.
    """
    # From the first dispatch to the last end.
    wall = ended.until[-1] - ended.dispatched[0]
    return max(float(wall - ended.breaks[ended.breaks > _BREAK_SECONDS].sum()), 1e-6)


def _expected_gain(workers: int, busy: float) -> float | None:
    gain = 1 / max(busy, 1 / (4 * workers))
    return gain if gain > 1.1 else None
