"""Metrics, gate and values of a coordinator, without TensorFlow."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import Any

import pytest

from tests._calls import count_calls
from tfd_notebook import errors
from tfd_notebook.coordinator import metrics
from tfd_notebook.coordinator.limit import judge
from tfd_notebook.coordinator.metrics import (
    CompletionRate,
    CoordinatorMetrics,
    completion_rate,
    rate,
    row_version,
    worker_rows,
)
from tfd_notebook.coordinator.values import Values
from tfd_notebook.model import closure_store as stores
from tfd_notebook.model.closure_gate import Gate
from tfd_notebook.model.closure_store import CANCELLED, FAILED, READY, Store
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import CoordinatorRow, TaskRow
from tfd_notebook.model.spec import Role, TaskState


@dataclass
class Closure:
    key: int
    name: str = "step"


class Clock:
    """Stand-in for `time` in a store. `wall` is the wall clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.wall = 2_000_000_000.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.wall


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stores, "time", clock)
    return clock


def run(store: Store, clock: Clock, seconds: float, worker: int = 0, state: int = READY) -> int:
    """Simulate a closure that runs from now on for `seconds`."""
    key = store.add("step", "step_1", None)
    store.dispatched(key, worker)
    store.running(key)
    clock.now += seconds
    store.fetch(key)
    store.end(key, state, worker, "it failed" if state == FAILED else "")
    return key


# Figures


def test_remaining_time_follows_from_an_even_rate(clock: Clock) -> None:
    store = Store()
    for _ in range(400):
        run(store, clock, 0.05)
    known = completion_rate(store, clock.now)
    assert sum(known.ends) == pytest.approx(200, abs=2)
    middle, low, high = known.time_left(100) or (0, 0, 0)
    assert middle == pytest.approx(5.0, rel=0.05)
    assert low < middle < high < 1.25 * middle


def test_uneven_rate_widens_the_range(clock: Clock) -> None:
    even, uneven = CompletionRate((20,) * 10), CompletionRate((2, 38) * 5)
    assert even.time_left(1000)[0] == uneven.time_left(1000)[0]  # type: ignore[index]
    narrow, wide = (p.time_left(1000)[2] - p.time_left(1000)[1] for p in (even, uneven))  # type: ignore[index]
    assert wide > 2 * narrow
    assert all(
        math.isfinite(each) for each in CompletionRate((0, 0, 9)).time_left(10**6) or (math.inf,)
    )


def test_too_few_closures_give_no_estimate(clock: Clock) -> None:
    store = Store()
    assert completion_rate(store, clock.now).time_left(10) is None
    run(store, clock, 0.1)
    assert completion_rate(store, clock.now).time_left(10) is None
    assert CompletionRate((5, 5, 5)).time_left(0) is None


def test_slow_closures_have_a_longer_window(clock: Clock) -> None:
    store = Store()
    for _ in range(30):
        run(store, clock, 5.0)
    known = completion_rate(store, clock.now)
    assert known.seconds > 1
    assert known.time_left(12)[0] == pytest.approx(60, rel=0.2)  # type: ignore[index]


def test_rate_covers_the_last_seconds(clock: Clock) -> None:
    store = Store()
    for _ in range(20):
        run(store, clock, 0.1)
    assert rate(store, clock.now) == pytest.approx(10, rel=0.3)
    assert rate(store, clock.now + 60) == 0
    run(store, clock, 0.1, state=CANCELLED)
    assert store.ended_between([0.0, clock.now + 1]) == [20]


def test_row_version_changes_with_the_row(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "time", clock)
    store = Store()

    def changes(seconds: float = 0.0) -> bool:
        before = row_version(store)
        clock.now += seconds
        return bool(row_version(store) != before)

    clock.now += 3600
    assert not changes(seconds=60)
    before = row_version(store)
    run(store, clock, 0.1)
    assert row_version(store) != before
    assert changes(seconds=1)  # the rates fall
    clock.now += 3600
    assert not changes(seconds=60)
    key = store.add("f", "f", None)
    store.dispatched(key, 0)
    store.running(key)
    clock.now += 3600
    assert changes(seconds=1)  # the time of the running closure
    store.end(key, READY, 0)
    clock.now += 3600
    before = row_version(store)
    Gate(on_change=store.touch).close("by request")
    assert row_version(store) != before


def test_store_reports_each_change_once() -> None:
    store, changes = Store(), []
    store.on_change = lambda: changes.append(store.version)
    gate = Gate(on_change=store.touch)
    key = store.add("step", "step_1", None)
    store.dispatched(key, 0)
    store.end(key, READY, 0)
    gate.close("by request")
    gate.hold(1)
    gate.break_on(True, set(), set())
    gate.open()
    assert changes == list(range(1, 8))


def test_workers_are_described(clock: Clock) -> None:
    store, gate = Store(), Gate()
    run(store, clock, 0.1, worker=0)
    run(store, clock, 0.1, worker=1, state=FAILED)
    store.resource(1, True)
    store.resource(1, False)
    key = store.add("step", "step_1", None)
    store.dispatched(key, 2)
    gate.hold(3)
    gone = TaskRow("worker:4", Role.WORKER, 4, state=TaskState.RESTARTING)
    rows = worker_rows(store, gate, {2: Closure(key)}, (gone,), 5)
    assert [row.state for row in rows] == ["idle", "idle", "running", "paused", "lost"]
    assert [(row.done, row.failed) for row in rows[:2]] == [(1, 0), (0, 1)]
    assert (rows[2].id, rows[2].function) == (key, "step")
    assert (rows[1].built, rows[1].unbuilt) == (1, 1)
    store.retry(key, 2, "worker:2 was lost")
    gate.close("by request")
    rows = worker_rows(store, gate, {}, (), 3)
    assert [(row.state, row.lost) for row in rows] == [("paused", 0), ("paused", 0), ("paused", 1)]


def sample(store: Store, gate: Gate | None, **given: Any) -> CoordinatorRow:
    default: dict[str, Any] = {
        "in_flight": {},
        "stopped": False,
        "workers": 2,
        "counts": store.counts(),
        "tasks": (),
        "limit": lambda: Limit("none", figures={"closures_per_s": 3.0}),
        "ps_bytes": lambda: {"ps:0": 4000},
    }
    return CoordinatorMetrics(store).row(gate=gate, **{**default, **given})


def test_states_of_the_coordinator_are_described(clock: Clock) -> None:
    store, gate = Store(), Gate()
    assert sample(store, gate).state == "idle"
    run(store, clock, 0.1)
    assert sample(store, gate).run_ms == pytest.approx((100, 100, 100))
    store.add("step", "step_2", None)
    running = sample(store, gate)
    assert (running.state, running.reason, dict(running.traces)) == ("running", "", {"step": 2})
    gate.close("before closure 3")
    paused = sample(store, gate)
    assert (paused.state, paused.reason, paused.left_s) == ("paused", "before closure 3", None)
    assert sample(store, gate, stopped=True).state == "stopped"
    reduced = sample(store, None)
    assert (reduced.state, reduced.workers, reduced.reduced) == ("running", (), True)


def test_figures_are_kept_with_many_queued_closures(clock: Clock) -> None:
    store = Store()
    for _ in range(10):
        run(store, clock, 0.1)
    for _ in range(20_000):
        store.add("step", "step_1", None)
    assert sample(store, Gate()).run_ms is not None
    assert judge(store, 1, 0, 0.0).kind == "compute"


def test_sampling_many_closures_is_cheap() -> None:
    store = Store()
    for _ in range(100_000):
        store.add("step", "step_1", None)
    metrics = CoordinatorMetrics(store)
    given: dict[str, Any] = {"in_flight": {}, "stopped": False, "workers": 2, "tasks": ()}
    given.update(counts=store.counts(), limit=lambda: judge(store, 2, 0, 0.0), ps_bytes=dict)
    metrics.row(gate=Gate(), **given)
    # Reading all rows takes more than 100,000 calls.
    assert count_calls(lambda: metrics.row(gate=Gate(), **given)) < 1_000


def test_gate_keeps_control_for_a_while_after_opening() -> None:
    gate = Gate()
    assert not gate.controlled
    gate.controlled_until = math.inf
    assert gate.controlled
    gate.close("from a terminal")
    gate.open()
    assert time.monotonic() < gate.controlled_until < time.monotonic() + 60


def test_values_have_representations(clock: Clock) -> None:
    store, gate = Store(), Gate()
    values = Values(store, lambda: gate.closed)
    assert "no closure scheduled yet" in values._repr_mimebundle_()["text/plain"]
    run(store, clock, 0.1)
    run(store, clock, 0.1, worker=1, state=FAILED)
    store.add("other", "other_1", None)
    gate.close("by request")
    shown = values._repr_mimebundle_()["text/plain"]
    assert "it failed" in shown
    assert re.search(r"2 +other +‖ paused", shown)
    assert [record["id"] for record in values.table(worker=1).records()] == [1]
    assert [record["id"] for record in values.table(1).records()] == [2]
    assert [record["id"] for record in values.table(state="ready").records()] == [0]
    assert "no matching closure" in values.table(state="running").text()
    with pytest.raises(errors.UsageError, match="1 or more"):
        values.table(0)
    with pytest.raises(
        errors.UnknownName, match=r"unknown state 'redy'.*\s+.*did you mean 'ready'"
    ):
        values.table(state="redy")


def test_time_of_a_value_uses_the_current_clock(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfd_notebook.coordinator.values.time", clock)
    store = Store()
    store.add("f", "f", None)
    values = Values(store, lambda: False)
    for step in (0, 3600):
        clock.wall += step
        assert values.to_frame()["queued"][0].timestamp() == clock.wall
