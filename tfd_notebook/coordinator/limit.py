"""Why a coordinator is not faster, from what is known of its closures and tasks."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tfd_notebook.data.explain.classification import is_busy
from tfd_notebook.data.service.usage import processors
from tfd_notebook.data.variable_names import variable_of
from tfd_notebook.model.closure_store import READY, Columns, Store
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role

#: Closures that an answer rests on, the latest ones.
_LATEST = 5_000
#: Fewer tell nothing.
_LEAST = 5
#: Share of the time that workers have a closure, below which they lack closures.
_BUSY = 0.6
#: Seconds of running below which handing a closure over is most of its cost.
_SHORT = 2e-3
#: Share of a function's closures that were traced anew from which on tracing is the limit.
_RETRACED = 0.2
#: Share of the variables' bytes on one of several parameter servers.
_LOPSIDED = 0.7
#: Processors of a worker below which it waits for something else.
_IDLE_CPU = 0.5
#: Seconds without a closure that are a break of the user's: between two cells, or two steps.
_BREAK = 3.0
_NETWORK_BYTES_PER_S = 30e6
#: Measures of tasks come once a second and are of the second before: seconds that closures must
#: have run for, and that may have gone by since, for the latest measure to be of their time.
_MEASURED = 2.0
_FRESH = 0.2
#: Seconds without a closure after which they begin anew, for that.
_PAUSE = 0.5
#: Times as long as closures that read no input, from which on reading may be what takes long.
_LONGER = 1.5
_LOCAL = ("localhost", "127.0.0.1", "::1")
_NO_CORES = (
    "all cores of this machine are in use, so that more workers on it would not help: add "
    "workers on other machines"
)
#: The tasks as they were last seen while closures ran.
_at_work: weakref.WeakKeyDictionary[Store, Sequence[TaskRow]] = weakref.WeakKeyDictionary()

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
    """Return what limits a coordinator.

    Parameters
    ----------
    store : Store
    workers : int
    fetches : int
        How often somebody waited for one result, so far.
    fetch_seconds : float
        How long, together.
    tasks : sequence of TaskRow
        The tasks of the cluster. Their processors and bytes count as of the time when closures ran:
        now while some run, otherwise as they were in the last call while some did.
    ps_bytes : mapping of str to int, optional
        Bytes of the variables on each parameter server.
    reads_input : bool or collection of str
        Whether closures read from datasets on the workers, or which functions' closures do.
    paused : bool
        Whether the coordinator is paused. Default false.
    cluster, coordinator : object, optional
        Advice names the user's variables that hold them. Default ``cluster`` and ``coordinator``.
    """
    # Of many that are queued, those that have run come before.
    seen = store.columns(_LATEST, ended=True)
    ended = [row for row in range(len(seen)) if seen.state[row] == READY]
    if len(ended) < _LEAST:
        return NOTHING
    figures = _figures(seen, ended, workers)
    busy, run = figures["workers_busy"], figures["run_ms_median"] / 1e3
    held = [(seen.dispatched[row], seen.finished[row]) for row in ended]
    tasks = _while_running(store, tasks, held, run)
    traced = {name: count for name, count in store.traces().items() if count > 3}
    counted = store.functions()
    for name, count in traced.items():
        if counted[name] and count / counted[name] >= _RETRACED:
            return Limit(
                "retracing",
                name,
                min(1.0, count / counted[name]),
                {**figures, "traces": float(count)},
                "pass tensors instead of Python numbers, of shapes that stay, or give the function "
                "an input_signature",
            )
    if busy < _BUSY:
        waiting, _ = store.unfinished()
        total = len(store)
        if total and fetches >= 0.5 * total and fetch_seconds > 0:
            return Limit(
                "fetch_in_loop",
                "",
                1 - busy,
                figures,
                "schedule many closures first and fetch their results afterwards",
                expected_gain=_gain(workers, busy),
            )
        if run < _SHORT and figures["queue_ms_median"] > figures["run_ms_median"]:
            return _short(figures)
        if not waiting:
            return Limit(
                "few_closures",
                "",
                1 - busy,
                figures,
                f"schedule more before join: {workers} workers need more than {workers} closures "
                "at a time",
                expected_gain=_gain(workers, busy),
            )
    if run < _SHORT:
        return _short(figures)
    waits_for_input = _may_wait_for_input(seen, ended, reads_input)
    found = _of_tasks(figures, tasks, ps_bytes or {}, waits_for_input)
    if found.kind != "compute":
        return found
    if paused:
        name = variable_of(coordinator, "coordinator")
        return replace(found, advice=f"it is paused now: {name}.resume()")
    if not any(store.unfinished()):
        return replace(found, advice="it is idle now: no closure waits or runs")
    here = [row for row in tasks if row.host in _LOCAL]
    used = sum(row.cpu_percent or 0.0 for row in here) / 100
    if here and len(here) == len(tasks) and is_busy(used, processors()):
        return replace(found, advice=_NO_CORES)
    name = variable_of(cluster, "cluster")
    return replace(found, advice=f"add workers: {name}.scale(workers={workers + 1})")


def _while_running(
    store: Store, tasks: Sequence[TaskRow], held: list[tuple[float, float]], run: float
) -> Sequence[TaskRow]:
    """Return the tasks as they are if closures run, else as they were when some did."""
    began = until = 0.0
    for start, over in sorted(held):
        if start - until > _PAUSE:
            began = start
        until = max(until, over)
    now, (_, running) = time.perf_counter(), store.unfinished()
    if running and now - until <= 1.5 * run:
        until = now
    if now - until <= _FRESH and until - began >= _MEASURED:
        _at_work[store] = tasks
    return _at_work.get(store, ())


def _may_wait_for_input(seen: Columns, ended: list[int], readers: bool | Collection[str]) -> bool:
    """Whether closures read input, and take longer than those that do not, if there are any."""
    if isinstance(readers, bool):
        return readers
    names = [seen.functions[seen.function[row]] for row in ended]
    runs = [seen.fetching[row] - seen.started[row] for row in ended]
    reading = [run for name, run in zip(names, runs, strict=True) if name in readers]
    others = [run for name, run in zip(names, runs, strict=True) if name not in readers]
    if len(others) < _LEAST:
        return bool(reading)
    return bool(reading) and statistics.median(reading) > _LONGER * statistics.median(others)


def _short(figures: dict[str, float]) -> Limit:
    return Limit(
        "short_closures",
        "",
        None,
        figures,
        "do more in each: several steps in one tf.function, with tf.range",
    )


def _of_tasks(
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
    waits = bool(cpu) and statistics.mean(cpu) < _IDLE_CPU
    if waits and total and len(ps) > 1:
        most = max(ps_bytes, key=lambda task: ps_bytes[task])
        if ps_bytes[most] / total >= _LOPSIDED:
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
    if busy < _BUSY:
        return Limit("none", figures=figures)
    return Limit("compute", "", busy, figures)


def _figures(seen: Columns, ended: list[int], workers: int) -> dict[str, float]:
    wall = _working_seconds([(seen.dispatched[row], seen.finished[row]) for row in ended])
    held = sum(seen.finished[row] - seen.dispatched[row] for row in ended)
    runs = [seen.fetching[row] - seen.started[row] for row in ended]
    waits = [seen.dispatched[row] - seen.queued[row] for row in ended]
    return {
        "closures_per_s": len(ended) / wall,
        "workers_busy": min(1.0, held / (wall * max(workers, 1))),
        "run_ms_median": statistics.median(runs) * 1e3,
        "queue_ms_median": statistics.median(waits) * 1e3,
    }


def _working_seconds(held: list[tuple[float, float]]) -> float:
    """Return how long closures ran, with short breaks in between and without long ones.

    When the first was queued does not matter: of many it waited for those before it.
    """
    wall, until = 0.0, None
    for began, over in sorted(held):
        if until is None or began - until > _BREAK:
            wall += over - began
        else:
            wall += max(over - until, 0.0)
        until = over if until is None else max(until, over)
    return max(wall, 1e-6)


def _gain(workers: int, busy: float) -> float | None:
    gain = 1 / max(busy, 1 / (4 * workers))
    return gain if gain > 1.1 else None
