"""Snapshots of a cluster after its events."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tfd_notebook._compat.tf_data.pipeline_model import Buffer
from tfd_notebook.agent import memory
from tfd_notebook.cluster import registry
from tfd_notebook.cluster.monitor import Monitor
from tfd_notebook.data.service.protocols import Registered
from tfd_notebook.model.closure_store import Store
from tfd_notebook.model.events import (
    AdaptationChanged,
    ClusterEnded,
    ConsumerMeasured,
    Event,
    ExpiryChanged,
    GpusMeasured,
    HostDisconnected,
    HostReconnected,
    JournalMeasured,
    LeaseChanged,
    PlanChanged,
    StateChanged,
    TaskChanged,
    TaskMeasured,
    TaskRemoved,
    TasksLost,
    WorkersAdapted,
)
from tfd_notebook.model.snapshot import AdaptationRow
from tfd_notebook.model.spec import ClusterConfig, Role, TaskState
from tfd_notebook.net import clock


@pytest.fixture
def monitor() -> Monitor:
    config = ClusterConfig("c", "local", {Role.WORKER: 2})
    monitor = Monitor(config)
    for task in ("worker:1", "worker:0"):
        monitor.apply(ready(task))
    return monitor


def ready(task: str) -> TaskChanged:
    return TaskChanged(task, TaskState.READY, address="host-a:5", pid=5)


def test_tasks_are_sorted_and_counted(monitor: Monitor) -> None:
    snapshot = monitor.snapshot()
    assert [row.task for row in snapshot.tasks] == ["worker:0", "worker:1"]
    assert snapshot.observed == {Role.WORKER: 2}
    assert {row.host for row in snapshot.tasks} == {"host-a"}


def test_rates_of_tasks_have_times(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = [1_000_000.5]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    steady = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(steady)))
    for total in (0, 100, 300):
        monitor.apply(TaskMeasured("worker:0", bytes_sent=total))
        wall[0] += 1
    rates = monitor.rates(1_000_000)
    assert rates["until"] == 1_000_003
    assert rates["tasks"] == {"worker:0": [None, 100, 150]}
    assert monitor.rates(1_000_002)["tasks"] == {"worker:0": [150]}


def test_state_is_degraded_while_planned_tasks_are_missing(monitor: Monitor) -> None:
    monitor.apply(StateChanged("ready"))
    states = [monitor.state]
    for event in (
        PlanChanged(Role.WORKER, planned=3, requested=4),
        ready("worker:2"),
        TaskRemoved("worker:0"),
        PlanChanged(Role.WORKER, planned=2),
    ):
        monitor.apply(event)
        states.append(monitor.state)
    assert states == ["ready", "degraded", "ready", "degraded", "ready"]
    snapshot = monitor.snapshot()
    assert (snapshot.planned, snapshot.requested) == ({Role.WORKER: 2}, {Role.WORKER: 4})


def test_deadlines_can_be_set_and_removed(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "now", lambda: 50.0)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monitor.apply(ExpiryChanged(10.0))
    monitor.apply(LeaseChanged(20.0))
    snapshot = monitor.snapshot()
    assert (snapshot.expires, snapshot.lease) == (1010.0, 1020.0)
    assert (monitor.expired, monitor.detached) == (False, True)
    monitor.apply(ExpiryChanged(-1.0))
    assert monitor.expired
    monitor.apply(ExpiryChanged(None))
    monitor.apply(LeaseChanged(None))
    snapshot = monitor.snapshot()
    assert (snapshot.expires, snapshot.lease) == (None, None)
    assert (monitor.expired, monitor.detached) == (False, False)


def test_gpus_belong_to_a_host_and_its_tasks(monitor: Monitor) -> None:
    gpu: dict[str, Any] = {"index": 0, "name": "H200", "memory": 2e9, "use_percent": 50.0}
    monitor.apply(GpusMeasured(({**gpu, "task": "worker:1"},), host="host-a"))
    monitor.apply(GpusMeasured((gpu,)))
    snapshot = monitor.snapshot()
    assert [(row.host, row.task, row.memory_mb) for row in snapshot.gpus] == [
        ("host-a", "worker:1", 2000.0),
        ("localhost", "", 2000.0),
    ]
    assert [bool(row.gpu) for row in snapshot.tasks] == [False, True]
    monitor.apply(GpusMeasured((), host="host-a"))
    assert [row.host for row in monitor.snapshot().gpus] == ["localhost"]
    monitor.apply(StateChanged("stopped"))
    assert monitor.snapshot().gpus == ()


def test_measurements_of_an_exited_task_are_removed(monitor: Monitor) -> None:
    monitor.apply(TaskMeasured("worker:0", cpu_percent=50.0, rss_mb=10.0, bytes_sent=0))
    monitor.apply(TaskMeasured("worker:0", bytes_sent=10))
    monitor.apply(TaskMeasured("worker:7", cpu_percent=50.0))  # a removed task
    assert monitor.snapshot().task("worker:0").cpu_percent == 50.0  # type: ignore[union-attr]
    monitor.apply(TaskChanged("worker:0", TaskState.STOPPED))
    row = monitor.snapshot().task("worker:0")
    assert row is not None
    assert (row.pid, row.cpu_percent, row.rss_mb, row.bytes_per_s) == (None,) * 4
    assert row.bytes_sent == 10


def test_late_replies_among_the_last_three_are_counted(monitor: Monitor) -> None:
    counts = []
    for sent, late in enumerate((True, False, True, None, True, False)):
        monitor.apply(TaskMeasured("worker:0", bytes_sent=10 + sent, late=late))
        counts.append(monitor.snapshot().task("worker:0").late)  # type: ignore[union-attr]
    assert counts == [1, 1, 2, 2, 2, 2]
    monitor.apply(TaskMeasured("worker:0", bytes_sent=0, late=True))  # the task was restarted
    assert monitor.snapshot().task("worker:0").late == 1  # type: ignore[union-attr]


def test_events_are_logged_and_measurements_are_not(monitor: Monitor) -> None:
    before = monitor.snapshot()
    monitor.apply(JournalMeasured(4096))
    monitor.apply(TaskMeasured("worker:0", cpu_percent=1.0))
    monitor.apply(ConsumerMeasured("train", "running", 1.0, 2, 3, 0.0))
    after = monitor.snapshot()
    assert (after.journal_bytes, after.events) == (4096, before.events)
    assert after.version == before.version + 3
    monitor.apply(StateChanged("ready"))
    monitor.apply(StateChanged("ready"))  # changes nothing
    assert monitor.snapshot().events[len(before.events) :] == (StateChanged("ready"),)
    assert monitor.snapshot().version == after.version + 1


def test_adaptation_is_shown_and_its_decisions_are_notices(monitor: Monitor) -> None:
    monitor.apply(WorkersAdapted(1, 2, "no range was set"))
    assert monitor.snapshot().adaptation is None
    monitor.apply(AdaptationChanged(1, 8))
    assert monitor.snapshot().adaptation == AdaptationRow(1, 8)
    monitor.apply(WorkersAdapted(2, 5, "'train' waits"))
    row = monitor.snapshot().adaptation
    assert row is not None
    assert (row.workers, row.reason) == (5, "'train' waits")
    assert monitor.snapshot().notices[-1].what == "2 → 5 data workers: 'train' waits"
    monitor.apply(AdaptationChanged(None, None, "scale has set it"))
    assert monitor.snapshot().adaptation is None
    assert "is fixed: scale has set it" in monitor.snapshot().notices[-1].what


def test_start_time_is_measured_for_new_data_workers(monitor: Monitor) -> None:
    monitor.apply(ready("data_worker:0"))  # of a cluster that this process attached to
    assert monitor.start_seconds is None
    monitor.apply(TaskChanged("data_worker:1", TaskState.PLANNED, address="host-a:6"))
    assert monitor.requested_at().keys() == {"data_worker:1"}
    monitor.apply(ready("data_worker:1"))
    assert monitor.start_seconds is not None
    assert not monitor.requested_at()


def test_end_and_reconnects_are_reported(monitor: Monitor) -> None:
    monitor.apply(HostReconnected("host-a", 3.0))
    monitor.apply(HostReconnected("host-a", 3.0))
    monitor.apply(ClusterEnded("its lease has expired"))
    assert monitor.reconnects == {"host-a": 2}
    assert monitor.end_reason == "its lease has expired"
    reconnected, _, ended = monitor.snapshot().notices
    assert "host-a after 3 s (worker:1, worker:0)" in reconnected.what
    assert "its lease has expired" in ended.what


@pytest.mark.parametrize(
    ("event", "state", "reason"),
    [
        (TasksLost("it died"), "lost", "it died"),
        (HostDisconnected("host-a", 600.0), "ready", "the connection to its host is lost"),
        (HostReconnected("host-a", 3.0), "ready", ""),
    ],
    ids=["lost", "disconnected", "reconnected"],
)
def test_snapshots_contain_an_event_with_its_effects(
    monitor: Monitor, event: Event, state: str, reason: str
) -> None:
    def add_state() -> None:
        snapshot = monitor.snapshot()
        if event in snapshot.events:
            states.append((snapshot.state, {(row.state, row.reason) for row in snapshot.tasks}))

    monitor.apply(StateChanged("ready"))
    if isinstance(event, HostReconnected):
        monitor.apply(HostDisconnected("host-a", 600.0))
    states: list[Any] = []
    registry.on_change(add_state)
    try:
        monitor.apply(event)
    finally:
        registry.remove_on_change(add_state)
    assert states
    assert all(each == (state, {(state, reason)}) for each in states)


@pytest.mark.slow
def test_monitor_can_be_closed_while_it_starts(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, errors = threading.Thread.start, list[BaseException]()

    def close() -> None:
        try:
            monitor.close()
        except RuntimeError as error:
            errors.append(error)

    closing = threading.Thread(target=close)

    def close_first(thread: threading.Thread) -> None:
        monkeypatch.undo()
        closing.start()
        closing.join(0.1)  # ends here only if it does not wait for the start
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", close_first)
    monitor.start(lambda _: None)
    closing.join()
    assert errors == []


def test_stopped_task_of_the_service_is_passed_on_at_once(monitor: Monitor) -> None:
    passed: queue.Queue[str] = queue.Queue()
    monitor.start(lambda task: passed.put(task) if task else None)
    try:
        monitor.apply(StateChanged("ready"))
        monitor.apply(TaskChanged("worker:0", TaskState.RESTARTING))
        monitor.apply(TaskChanged("data_worker:0", TaskState.RESTARTING))
        monitor.apply(ready("data_worker:0"))
        monitor.apply(TaskChanged("dispatcher:0", TaskState.FAILED))
        assert [passed.get(timeout=60) for _ in range(2)] == ["data_worker:0", "dispatcher:0"]
    finally:
        monitor.close(60)
    assert passed.empty()


def test_error_of_a_check_is_a_notice(monitor: Monitor) -> None:
    def check(task: str) -> None:
        if task:
            raise ValueError(f"no journal of {task}")

    def reported(_: object) -> bool:
        return monitor.snapshot().notices[-1].what == "ValueError: no journal of data_worker:0"

    monitor.start(check)
    try:
        monitor.apply(StateChanged("ready"))
        monitor.apply(TaskChanged("data_worker:0", TaskState.FAILED))
        assert monitor.wait(reported, 60)
    finally:
        monitor.close(60)


def test_memory_limit_of_a_data_worker_names_the_largest_buffer(monitor: Monitor) -> None:
    buffers = (Buffer("shuffle(10)", 10, 10**9), Buffer("cache()", None, 2 * 10**9))
    monitor.registered["1"] = Registered(-1, None, buffers=buffers)
    for task in ("worker:0", "data_worker:0"):
        monitor.apply(TaskChanged(task, TaskState.FAILED, reason=memory.too_much(9.0)))
    worker, data_worker = (notice.what for notice in monitor.snapshot().notices)
    assert "likely cause" not in worker
    assert "The likely cause is cache(): it holds all elements, 2 GB" in data_worker


def test_version_changes_with_the_closures_of_the_coordinator(monitor: Monitor) -> None:
    first = monitor.version
    monitor.coordinator = SimpleNamespace(store=Store())  # type: ignore[assignment]
    assert monitor.version != first
