"""Bottlenecks of a coordinator: each kind is detected, without false alarms."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tfd_notebook.coordinator import limit
from tfd_notebook.coordinator.limit import judge
from tfd_notebook.model.closure_store import READY, Store
from tfd_notebook.model.limit import COORDINATOR_KINDS, Limit
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role


class Clock:
    """A clock that only a test advances."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tfd_notebook.model.closure_store.time", clock)
    monkeypatch.setattr(limit, "time", clock)
    return clock


def rounds(
    clock: Clock,
    count: int = 50,
    seconds: float = 0.05,
    idle: float = 0.0,
    function: str = "step",
    traces: int = 1,
    queued: int = 0,
    store: Store | None = None,
) -> Store:
    """Run closures on two workers concurrently and repeatedly, with breaks."""
    store = Store() if store is None else store
    for number in range(count):
        keys = [add(store, function, number % traces) for _ in range(2)]
        for worker, key in enumerate(keys):
            store.dispatched(key, worker)
            store.running(key)
        clock.now += seconds
        for worker, key in enumerate(keys):
            store.fetch(key)
            store.end(key, READY, worker)
        clock.now += idle
    for number in range(queued):
        add(store, function, number % traces)
    return store


def add(store: Store, function: str, trace: int) -> int:
    return store.add(function, f"__inference_{function}_{trace}", None)


def tasks(worker_cores: float, ps_bytes_per_s: float = 0.0) -> Sequence[TaskRow]:
    workers = [
        TaskRow(f"worker:{i}", Role.WORKER, i, cpu_percent=100 * worker_cores) for i in range(2)
    ]
    ps = [TaskRow(f"ps:{i}", Role.PS, i, bytes_per_s=ps_bytes_per_s / 2) for i in range(2)]
    return (*workers, *ps)


#: History of the closures, additional facts, the expected text, and the expected tasks.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "every result is fetched": (
        {"idle": 0.1},
        {"fetches": 100, "fetch_seconds": 5.0},
        "fetch_in_loop",
        "",
    ),
    "a few results are fetched": (
        {"idle": 0.1},
        {"fetches": 10, "fetch_seconds": 0.5},
        "few_closures",
        "",
    ),
    "results are fetched, and the workers are busy": (
        {},
        {"fetches": 100, "fetch_seconds": 5.0},
        "compute",
        "",
    ),
    "nothing is queued": ({"idle": 0.1}, {}, "few_closures", ""),
    "workers idle, but much is queued": ({"idle": 0.1, "queued": 50}, {}, "none", ""),
    "a break between two cells is none of the workers'": (
        {"seconds": 1.0, "idle": 4.0},
        {},
        "compute",
        "",
    ),
    "closures of a millisecond": ({"seconds": 1e-3}, {}, "short_closures", ""),
    "every second one is traced": ({"traces": 50}, {}, "retracing", "step"),
    "three shapes are no retracing": ({"traces": 3, "count": 5}, {}, "compute", ""),
    "a few traces among many closures": ({"traces": 10, "count": 200}, {}, "compute", ""),
    "one ps has nearly all": (
        {},
        {"tasks": tasks(0.1), "ps_bytes": {"ps:0": 10**6, "ps:1": 90 * 10**6}},
        "one_ps",
        "ps:1",
    ),
    "one ps has nearly all, and the workers compute": (
        {},
        {"tasks": tasks(1.0), "ps_bytes": {"ps:0": 10**6, "ps:1": 90 * 10**6}},
        "compute",
        "",
    ),
    "both ps have about the same": (
        {},
        {"tasks": tasks(0.1, 1e8), "ps_bytes": {"ps:0": 60 * 10**6, "ps:1": 50 * 10**6}},
        "network",
        "",
    ),
    "workers wait while much is sent": ({}, {"tasks": tasks(0.1, 1e8)}, "network", ""),
    "much is sent, and the workers compute": ({}, {"tasks": tasks(1.0, 1e8)}, "compute", ""),
    "workers wait for what they read": (
        {},
        {"tasks": tasks(0.1), "reads_input": {"step"}},
        "input",
        "",
    ),
    "workers that read compute": (
        {},
        {"tasks": tasks(1.0), "reads_input": {"step"}},
        "compute",
        "",
    ),
    "another function read, long ago": (
        {},
        {"tasks": tasks(0.1), "reads_input": {"warm_up"}},
        "compute",
        "",
    ),
    "workers are busy": ({}, {"tasks": tasks(1.0)}, "compute", ""),
    "too little has run": ({"count": 2}, {}, "none", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_is_detected(case: str, clock: Clock) -> None:
    counts, known, kind, stage = CASES[case]
    bottleneck = judge(rounds(clock, **counts), 2, **{"fetches": 0, "fetch_seconds": 0.0, **known})
    assert (bottleneck.kind, bottleneck.stage) == (kind, stage)
    assert bool(bottleneck.advice) == (kind != "none")
    assert bottleneck.share is None or 0 <= bottleneck.share <= 1
    assert repr(bottleneck)


def test_more_workers_are_advised_only_if_they_help(clock: Clock) -> None:
    def advised(store: Store, rows: Sequence[TaskRow], paused: bool = False) -> str:
        bottleneck = judge(store, 2, 0, 0.0, rows, paused=paused)
        assert bottleneck.kind == "compute"
        return bottleneck.advice

    idle, queued = rounds(clock), rounds(clock, queued=50)
    here, there = tasks(1000.0), [replace(row, host="node1") for row in tasks(1000.0)]
    assert advised(queued, there) == "add workers: cluster.scale(workers=3)"
    assert advised(queued, tasks(0.0)) == "add workers: cluster.scale(workers=3)"
    assert advised(queued, here).endswith("add workers on other hosts")
    assert advised(queued, there, paused=True) == "resume it: coordinator.resume()"
    assert advised(idle, there) == "schedule more closures: none waits or runs now"
    clock.now += 60.0  # no closure has ended since
    assert advised(queued, there) == advised(queued, here) == ""


def test_advice_names_the_users_variables(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        """Stand-in for a cluster or a coordinator, of which only the variable's name matters."""

    cluster, coordinator = Held(), Held()
    queued, main = rounds(clock, queued=50), sys.modules["__main__"]

    def advised(paused: bool = False) -> str:
        known: dict[str, Any] = {"paused": paused, "cluster": cluster, "coordinator": coordinator}
        return judge(queued, 2, 0, 0.0, tasks(0.0), **known).advice

    assert advised() == "add workers: cluster.scale(workers=3)"
    assert advised(paused=True) == "resume it: coordinator.resume()"
    monkeypatch.setattr(main, "training", cluster, raising=False)
    monkeypatch.setattr(main, "steps", coordinator, raising=False)
    assert advised() == "add workers: training.scale(workers=3)"
    assert advised(paused=True) == "resume it: steps.resume()"


def test_every_kind_has_a_case() -> None:
    assert {kind for _, _, kind, _ in CASES.values()} == set(COORDINATOR_KINDS)


@pytest.fixture
def limit_of(clock: Clock) -> Callable[..., Limit]:
    def limit_of(store: Store, cores: float, reads: Any = ("step",)) -> Limit:
        return judge(store, 2, 0, 0.0, tasks(cores), reads_input=reads)

    return limit_of


def test_current_idle_worker_does_not_change_past_limit(
    clock: Clock, limit_of: Callable[..., Limit]
) -> None:
    """After a join the workers are idle, independently of their earlier load."""
    store = rounds(clock, idle=0.0)
    assert limit_of(store, 1.0).kind == "compute"
    clock.now += 60
    assert limit_of(store, 0.0).kind == "compute"
    rounds(clock, store=store)
    assert limit_of(store, 0.1).kind == "input"
    clock.now += 60
    assert limit_of(store, 1.0).kind == "input"


def test_unobserved_worker_is_not_reported(clock: Clock, limit_of: Callable[..., Limit]) -> None:
    store = rounds(clock)
    clock.now += 60
    result = limit_of(store, 0.0)
    assert result.kind == "compute"
    assert "worker_cpu_cores" not in result.figures


def test_one_second_of_work_is_too_short(clock: Clock, limit_of: Callable[..., Limit]) -> None:
    """The latest CPU sample partly covers the time before the work."""
    store = rounds(clock, idle=0.0)
    clock.now += 60
    rounds(clock, count=20, store=store)
    assert limit_of(store, 0.1).kind == "compute"


def test_running_closures_count(clock: Clock, limit_of: Callable[..., Limit]) -> None:
    store = rounds(clock, count=10, seconds=5.0)
    clock.now += 60
    store.dispatched(add(store, "step", 0), 0)
    assert limit_of(store, 0.1).kind == "compute"  # it has just started
    rounds(clock, count=1, seconds=5.0, store=store)
    clock.now += 4
    assert limit_of(store, 0.1).kind == "input"


def test_closures_with_and_without_reading_are_compared(
    clock: Clock, limit_of: Callable[..., Limit]
) -> None:
    store = rounds(clock, seconds=0.05, function="step")
    rounds(clock, seconds=0.05, function="sum", store=store)
    assert limit_of(store, 0.1).kind == "compute"  # closures without reading take the same time
    store = rounds(clock, seconds=0.5, function="step")
    rounds(clock, seconds=0.05, function="sum", store=store)
    assert limit_of(store, 0.1).kind == "input"


def test_reading_ends_with_the_closures_that_read(
    clock: Clock, limit_of: Callable[..., Limit]
) -> None:
    store = rounds(clock)
    assert limit_of(store, 0.1).kind == "input"
    rounds(clock, count=2_500, function="sum", store=store)
    assert limit_of(store, 0.1).kind == "compute"
