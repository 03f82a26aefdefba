"""The store of closures and the gate of workers, without TensorFlow."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from tfd_notebook.coordinator.values import VALUE_COLUMNS, Values
from tfd_notebook.errors import StateError, UnknownName, UsageError, ValueGone
from tfd_notebook.model import closure_store
from tfd_notebook.model.closure_gate import Gate
from tfd_notebook.model.closure_store import CANCELLED, FAILED, READY, STATES, Store


class Result:
    """The result of a closure."""


def through(store: Store, worker: int = 0, end: int = READY, function: str = "f") -> int:
    key = store.add(function, f"__inference_{function}_1", None)
    store.dispatched(key, worker)
    store.running(key)
    store.fetch(key)
    store.end(key, end, worker)
    return key


@contextlib.contextmanager
def ctrl_c_at(step: int) -> Iterator[Callable[[], bool]]:
    """Send Ctrl-C at a step of the store, counted from 0.

    A step is the start of a function or the return of a C function, where Python checks for
    signals. Yields a function that returns True if Ctrl-C was sent.
    """
    count = itertools.count()
    sent = False

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal sent
        checked = event in ("call", "c_return") and frame.f_code.co_filename == store_file
        if checked and next(count) == step:
            sent = True
            signal.raise_signal(signal.SIGINT)  # calls Python's handler at once

    store_file = closure_store.__file__
    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield lambda: sent
    finally:
        sys.setprofile(previous)


class TestStore:
    def test_ctrl_c_is_raised_and_leaves_no_incomplete_row(self) -> None:
        for step in itertools.count():
            store = Store()
            through(store)
            interrupted = False
            try:
                with ctrl_c_at(step) as sent:
                    through(store)
                    store.counts()
            except KeyboardInterrupt:
                interrupted = True
            assert interrupted == sent()
            key = through(store)
            columns = store.columns()
            assert len(columns.state) == len(store) == sum(store.counts().values()) == key + 1
            for state, queued, finished in zip(
                columns.state, columns.queued, columns.finished, strict=True
            ):
                assert state != READY or finished >= queued > 0
            assert columns.state[-1] == READY
            if not sent():
                break
        assert step > 50

    def test_closure_passes_through_its_states(self) -> None:
        store = Store()
        key = store.add("f", "__inference_f_1", None)
        history = [store.counts()]
        states = [store.columns().state[0]]
        for change in (
            lambda: store.dispatched(key, 1),
            lambda: store.retry(key, 1, "worker:1 was lost"),
            lambda: store.dispatched(key, 0),
            lambda: store.running(key),
            lambda: store.fetch(key),
            lambda: store.end(key, READY, 0),
        ):
            change()
            states.append(store.columns().state[0])
        history.append(store.counts())
        assert [counts["queued"] for counts in history] == [1, 0]
        assert sum(history[1].values()) == history[1]["ready"] == 1
        columns = store.columns()
        assert (columns.attempts[0], columns.worker[0]) == (2, 0)
        assert [STATES[state] for state in states] == [
            "queued",
            "dispatched",
            "retrying",
            "dispatched",
            "running",
            "fetching",
            "ready",
        ]
        assert (
            columns.queued[0]
            <= columns.dispatched[0]
            <= columns.started[0]
            <= columns.fetching[0]
            <= columns.finished[0]
            == store.changed_at
        )
        assert store.workers()[1]["retrying"] == 1
        assert store.workers()[0]["ready"] == 1

    def test_ended_closure_keeps_its_state(self) -> None:
        store = Store()
        key = through(store)
        store.end(key, CANCELLED)
        assert store.counts()["ready"] == 1
        assert store.counts()["cancelled"] == 0

    def test_oldest_closures_are_dropped_but_counted(self) -> None:
        store = Store(keep=100)
        keys = [through(store) for _ in range(1_000)]
        assert len(store) == store.counts()["ready"] == 1_000
        columns = store.columns()
        assert len(columns) <= 125
        assert columns.ids[-1] == 999
        assert store.ended_between([0, store.changed_at + 1])[0] <= 100
        with pytest.raises(KeyError):
            store.value(keys[0])

    def test_unfinished_closures_are_kept(self) -> None:
        store = Store(keep=10)
        waiting = store.add("f", "f", None)
        for _ in range(100):
            through(store)
        assert store.state_of(waiting) == 0
        store.end(waiting, READY)
        assert store.counts()["ready"] == 101

    def test_values_are_dropped_from_the_record_with_their_results(self) -> None:
        store, kept = Store(), Result()
        key = store.add("f", "f", weakref.ref(kept))
        discarded = [store.add("f", "f", weakref.ref(Result())) for _ in range(30_000)]
        assert store.value(key) is kept
        assert store.value(discarded[0]) is None
        assert len(store) == 30_001

    def test_transitions_are_recorded_without_a_query(self) -> None:
        store = Store(keep=100)
        keys = [through(store) for _ in range(10_000)]
        position, changed = store.changes(0)
        assert (position, changed) == (50_000, None)
        assert store.times(keys[:1]) == [None]
        assert store.lost_attempts() == ()

    def test_traces_are_counted_by_function(self) -> None:
        store = Store()
        for number in range(4):
            store.add("f", f"__inference_f_{number}", None)
        store.add("g", "__inference_g_9", None)
        assert store.traces() == {"f": 4, "g": 1}

    def test_store_is_safe_for_many_threads(self) -> None:
        store = Store(keep=500)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: through(store, number % 4), range(4_000)))
        assert store.counts()["ready"] == len(store) == 4_000
        assert sum(row["ready"] for row in store.workers().values()) == 4_000


class TestGate:
    def test_closed_gate_passes_permitted_closures(self) -> None:
        gate = Gate()
        assert gate.admits(0, 1, "f")
        gate.close("by request")
        assert not gate.admits(0, 1, "f")
        gate.permit(2)
        assert [gate.admits(0, key, "f") for key in (1, 2, 3)] == [True, True, False]
        gate.open()
        assert gate.admits(0, 3, "f")
        assert not gate.armed

    def test_held_worker_gets_no_closures(self) -> None:
        gate = Gate()
        gate.hold(1)
        assert (gate.admits(0, 1, "f"), gate.admits(1, 1, "f")) == (True, False)
        gate.release(1)
        assert gate.admits(1, 1, "f")

    def test_breakpoint_closes_once_for_each_closure(self) -> None:
        gate = Gate()
        gate.break_on(False, {1}, {"f"})
        assert gate.admits(0, 1, "g")
        assert not gate.admits(0, 2, "f")
        assert "closure 2 of f" in gate.reason
        gate.open()
        assert gate.admits(0, 2, "f")
        assert not gate.admits(0, 3, "f")
        gate.permit(1)
        assert gate.admits(0, 3, "f")
        gate.open()
        assert not gate.admits(1, 4, "g")
        assert "worker:1" in gate.reason

    def test_first_reason_of_a_pause_is_kept(self) -> None:
        gate = Gate()
        gate.close("a failure", by_failure=True)
        gate.close("by request")
        assert (gate.reason, gate.by_failure) == ("a failure", True)

    @pytest.mark.parametrize("count", [0, -1, 1.0, "1", True])
    def test_invalid_numbers_of_steps_are_refused(self, count: Any) -> None:
        gate = Gate()
        gate.close("by request")
        with pytest.raises(UsageError):
            gate.permit(count)

    def test_open_gate_refuses_steps(self) -> None:
        with pytest.raises(StateError):
            Gate().permit(1)


class TestValues:
    def test_empty_store_has_no_rows(self) -> None:
        values = Values(Store(), lambda: False)
        assert len(values) == 0
        assert "none yet" in repr(values)
        assert tuple(values.to_frame().columns) == VALUE_COLUMNS
        assert values.records(10) == []

    def test_failed_closure_without_a_result_has_run(self) -> None:
        store = Store()
        key = store.add("f", "f", None)
        store.dispatched(key, 0)
        store.running(key)
        store.end(key, FAILED, 0, "boom")
        values = Values(store, lambda: False)
        assert values.record(key)["run_ms"] >= 0
        assert values.record(key)["fetch_ms"] is None
        assert values.to_frame().run_ms.notna().all()

    def test_rows_describe_the_closures(self) -> None:
        store = Store()
        through(store)
        through(store, 1, FAILED, "g")
        store.add("f", "f", None)
        values = Values(store, lambda: True)
        assert values.counts()["paused"] == 1
        frame = values.to_frame()
        assert list(frame.state) == ["ready", "failed", "paused"]
        assert list(frame.function) == ["f", "g", "f"]
        assert list(frame.worker) == [0, 1, -1]
        assert frame.run_ms.notna().tolist() == [True, True, False]
        assert [row["id"] for row in values.records(10, state="failed")] == [1]
        assert [row["id"] for row in values.records(10, worker=0)] == [0]
        assert len(values.to_frame(latest=1)) == 1
        with pytest.raises(ValueGone):
            values.value(0)
        with pytest.raises(UnknownName):
            values.value(99)
        for unknown in (99, 10**30):
            with pytest.raises(UnknownName):
                values.record(unknown)
        for invalid in (-1, "x", None):
            with pytest.raises(UsageError, match="invalid id"):
                values.record(invalid)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="invalid latest=0"):
            values.to_frame(latest=0)
