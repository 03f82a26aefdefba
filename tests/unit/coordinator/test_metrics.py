"""Views and control of a coordinator, without TensorFlow."""

from __future__ import annotations

import inspect
import math
import re
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from tests._calls import count_calls
from tests._coordinator import FakeCoordinator
from tfd_notebook import errors, views
from tfd_notebook.coordinator import metrics
from tfd_notebook.coordinator.background_join import BackgroundJoin
from tfd_notebook.coordinator.limit import judge
from tfd_notebook.coordinator.metrics import (
    CompletionRate,
    CoordinatorMetrics,
    pace,
    rate,
    row_version,
    worker_rows,
)
from tfd_notebook.coordinator.values import VALUE_STATES, Values
from tfd_notebook.model import closure_store as stores
from tfd_notebook.model.closure_gate import Gate
from tfd_notebook.model.closure_store import CANCELLED, FAILED, READY, Store
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import CoordinatedRow, CoordinatorRow, Snapshot, TaskRow, as_dict
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.ui.magics.schedule import as_function
from tfd_notebook.ui.magics.stepper import number_and_name
from tfd_notebook.views import formatting as figures

SCRIPT = "\x1b[2J<script>alert('&')</script>"


@dataclass
class Closure:
    key: int
    name: str = "step"


class Clock:
    """Stand-in for `time.perf_counter` in a store."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stores, "time", clock)
    return clock


def run(store: Store, clock: Clock, seconds: float, worker: int = 0, state: int = READY) -> int:
    """Simulate a closure that runs from now on for `seconds`."""
    key = store.add("step", "step_1", None)
    store.dispatched(key, worker)
    store.running(key, worker)
    clock.now += seconds
    store.fetch(key, worker)
    store.end(key, state, worker, "it failed" if state == FAILED else "")
    return key


# Figures


def test_remaining_time_follows_from_an_even_rate(clock: Clock) -> None:
    store = Store()
    for _ in range(400):
        run(store, clock, 0.05)
    known = pace(store, clock.now)
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
    assert pace(store, clock.now).time_left(10) is None
    run(store, clock, 0.1)
    assert pace(store, clock.now).time_left(10) is None
    assert CompletionRate((5, 5, 5)).time_left(0) is None


def test_slow_closures_have_a_longer_window(clock: Clock) -> None:
    store = Store()
    for _ in range(30):
        run(store, clock, 5.0)
    known = pace(store, clock.now)
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
    store.running(key, 0)
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
    store.end(key, READY, 0)  # it has ended already
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


# Views

ROW = CoordinatorRow(
    "paused",
    "by request",
    {"queued": 0, "paused": 12, "ready": 1_000},
    120.0,
    (1.0, 2.0, 30.0),
    (0.2, 4.0, 5_000.0),
    (40.0, 30.0, 7_000.0),
    (
        CoordinatedRow(0, "running", 17, "step", 0.25, 500, 0, 0, 2),
        CoordinatedRow(1, "lost", done=499, failed=1, lost=3, built=1, unbuilt=4),
    ),
    {"step": 3},
    {"ps:0": 4_000_000},
    "There are too few closures.",
    break_on_failure=True,
)


def snapshot(row: CoordinatorRow | None) -> Snapshot:
    return Snapshot(1, 0.0, "train", "local", "ready", coordinator=row)


@pytest.mark.parametrize("shown", [views.text(snapshot(ROW), 400), views.html(snapshot(ROW))])
def test_both_views_are_complete(shown: str) -> None:
    for words in (
        "‖ paused (by request)",
        "12 paused, 1,000 ready",
        "120 closures/s",
        "about 40 s left (30 s to 1.9 h)",
        "waited p50 1.0 ms, p90 2.0 ms, p99 30 ms",
        "ran p50 0.2 ms, p90 4.0 ms, p99 5.0 s",
        "ps:0 4.0 MB",
        "step 3",
        "breaks on failure",
        "worker:0",
        "► running",
        "250 ms",
        "∅ lost",
        "1, 4 failed",
        "There are too few closures.",
    ):
        assert words in shown


@pytest.mark.parametrize("width", [40, 80, 110])
def test_text_stays_within_its_width(width: int) -> None:
    lines = views.text(snapshot(ROW), width).splitlines()
    assert max(map(figures.columns_of, lines)) <= width


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_views_support_any_number_of_workers(count: int) -> None:
    rows = tuple(CoordinatedRow(i, "idle") for i in range(count))
    row = CoordinatorRow("idle", workers=rows)
    for shown in views.coordinator_bundle(row).values():
        assert ("… and 950 more (950 idle)" in shown) == (count == 1000)
        assert shown.count("worker:") == min(count, 50)
        assert "no closure yet" in shown


def test_external_text_is_escaped_in_both_views() -> None:
    row = CoordinatorRow(
        "paused",
        SCRIPT,
        workers=(CoordinatedRow(0, "running", 1, SCRIPT),),
        traces={SCRIPT: 1},
        limit=SCRIPT,
    )
    bundle = views.coordinator_bundle(row)
    assert "<script" not in bundle["text/html"]
    assert "\x1b" not in bundle["text/plain"]
    table = views.values_table([{**RECORD, "function": SCRIPT, "error": SCRIPT}], {"failed": 1})
    assert "<script" not in table.html()
    assert "\x1b" not in table.text()


def test_snapshot_without_a_coordinator_shows_none() -> None:
    assert "coordinator" not in views.text(snapshot(None))
    assert "coordinator" not in views.html(snapshot(None))
    assert as_dict(snapshot(None))["coordinator"] is None
    assert as_dict(snapshot(ROW))["coordinator"]["workers"][1]["lost"] == 3  # type: ignore[index]


RECORD: dict[str, Any] = {
    "id": 7,
    "function": "step",
    "state": "failed",
    "worker": 1,
    "attempts": 2,
    "queue_ms": 3.0,
    "run_ms": None,
    "fetch_ms": None,
    "error": "Graph execution error:\n\nDetected at node x\n  File 'y', line 1\n\nbad input [Op:z]",
}


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_views_support_any_number_of_values(count: int) -> None:
    table = views.values_table([dict(RECORD, id=i) for i in range(count)], {"failed": count + 1})
    assert len(table) == count
    shown = table.text(100)
    assert shown.count("bad input [Op:z]") == count
    assert "Detected at" not in shown
    assert f"{count:,} shown of {count + 1:,}: {count + 1:,} failed" in shown
    assert max(map(len, shown.splitlines())) <= 100


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
    with pytest.raises(errors.UnknownName, match=r"unknown state 'redy'.*\s+.*did you mean|queued"):
        values.table(state="redy")


def test_time_of_a_value_uses_the_current_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    store.add("f", "f", None)
    values, real = Values(store, lambda: False), time.time
    (before,) = values.to_frame()["queued"]
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    (after,) = values.to_frame()["queued"]
    assert (after - before).total_seconds() == pytest.approx(3600, abs=1)
    assert values.to_frame()["queued"][0].timestamp() == pytest.approx(time.time(), abs=60)


# Control


class Joined(FakeCoordinator):
    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error
        self.go = threading.Event()
        self.values = "values"

    def join(self, timeout: float | None) -> None:
        assert self.present == 1
        self.go.wait(10)
        if self.error:
            raise self.error


def test_background_join_reports_its_end() -> None:
    received: list[tuple[str, str]] = []
    coordinator = Joined()
    joining = BackgroundJoin(coordinator, None, lambda *words: received.append(words))  # type: ignore[arg-type]
    assert (joining.state, joining.error, received) == ("waiting", None, [])
    with pytest.raises(errors.TimeLimit):
        joining.wait(0.01)
    coordinator.go.set()
    joining.wait(10)
    assert (joining.state, received[0][0]) == ("done", "info")
    failing = Joined(ValueError("no such thing"))
    failing.go.set()
    joining = BackgroundJoin(failing, 1.0, lambda *words: received.append(words))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no such thing"):
        joining.wait(10)
    assert repr(joining) == "<BackgroundJoin failed: ValueError: no such thing>"
    assert received[1] == (
        "error",
        "the background join failed: ValueError: no such thing",
    )


# Texts


def test_cell_becomes_a_function() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "factor": 3}
    function = as_function(
        "'''a\n  b'''\nx = 2\nfor _ in range(2):\n    x *= factor\nx", "cell_4", names
    )
    assert function() == 18
    assert "cell_4" not in names
    assert "x *= factor" in inspect.getsource(function)
    names["factor"] = 1
    assert function() == 2
    assert as_function("x = 1", "cell_5", names)() is None
    assert as_function("return 7", "cell_6", names)() == 7
    with pytest.raises(errors.UsageError, match="empty"):
        as_function("# nothing\n", "cell_7", names)
    with pytest.raises(SyntaxError):
        as_function("x +", "cell_8", names)


def test_number_and_name_may_have_any_order() -> None:
    assert number_and_name([], "") == (None, None)
    assert number_and_name(["3", "train"], "") == (3, "train")
    assert number_and_name(["train", "3"], "") == (3, "train")
    assert number_and_name(["-3"], "") == (-3, None)
    with pytest.raises(errors.UsageError, match="write NAME N"):
        number_and_name(["1", "2"], "NAME N")


def test_states_have_symbols() -> None:
    for state in VALUE_STATES:
        assert figures.sign(state) != "·"
