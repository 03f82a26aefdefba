"""The watchdog of a running cluster, in all orders of events and with a fake clock."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tfd_notebook.cluster.monitor import Monitor
from tfd_notebook.cluster.watchdog import Watchdog
from tfd_notebook.data.bottleneck.usage import Delivery
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.model.events import ClusterEnded, ExpiryChanged, TaskChanged, TasksLost
from tfd_notebook.model.spec import ClusterConfig, Role, TaskState
from tfd_notebook.net import clock

LIMIT_SECONDS = 100.0
NOTICE_SECONDS = 50.0
HANG_SECONDS = 3.0
JOURNAL_SECONDS = 5.0
JOURNAL_WARN_BYTES = 1_000_000_000
TICK_SECONDS = 0.5
#: The start of each notice, by the check that publishes it.
NOTICES = {
    "limit": "the cluster ends in",
    "expiry": "the time limit of 100 s was reached: stopping the cluster",
    "journal": "the dispatcher's journal in",
    "stuck": "'train' has waited 3 s for data",
}


class FakeTasks:
    """The part of a task manager that the watchdog uses."""

    def __init__(self, work_dir: Path | None, on_this_host: bool = True) -> None:
        self.work_dir = None if work_dir is None else str(work_dir)
        self.on_this_host = on_this_host
        self.unreachable: list[str] = []

    def unreachable_peers(self) -> list[str]:
        return self.unreachable


class FakeConsumers:
    """Consumers that wait since a time of a fake clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.waits: dict[str, float] = {}
        self.delivery: Any = None

    def named(self, name: str) -> Any:
        return SimpleNamespace(live=SimpleNamespace(delivery=self.delivery))

    def stuck(self, seconds: float) -> tuple[str, ...]:
        return tuple(n for n, since in self.waits.items() if self._now() - since >= seconds)


class Watched:
    """A watchdog and what it observes. Its threads are calls."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, tasks: FakeTasks, directory: Path | None = None
    ) -> None:
        self.now = 1000.0
        monkeypatch.setattr(clock, "now", lambda: self.now)
        config = ClusterConfig("c", "local", {Role.WORKER: 1})
        self.monitor = Monitor(config, Consumers(), lambda _: None, lambda: "")
        self.consumers = FakeConsumers(lambda: self.now)
        self.ended: list[str] = []
        self.threads: list[str] = []
        self.journal = None if directory is None else directory / "journal"

        def start_thread(call: Callable[[], None], name: str) -> None:
            self.threads.append(name)
            call()

        self.tick: Any = Watchdog(
            tasks,  # type: ignore[arg-type]
            self.monitor,
            self.consumers,  # type: ignore[arg-type]
            HANG_SECONDS,
            NOTICE_SECONDS,
            self.ended.append,
            clock=lambda: self.now,
            start_thread=start_thread,
        )

    def set_journal(self, size: int) -> None:
        """Change the size of the journal, without writing its data."""
        assert self.journal is not None
        with self.journal.open("ab") as file:
            file.truncate(size)

    @property
    def notices(self) -> Counter[str]:
        """The number of notices of each check."""
        published = [notice.what for notice in self.monitor.snapshot().notices]
        return Counter(
            kind for kind, start in NOTICES.items() for what in published if what.startswith(start)
        )


class Expected:
    """The model of a watchdog that is called after each event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.notices: Counter[str] = Counter()
        self.ended: list[str] = []
        self.lost = self.closed = False
        self.size = self.measured = 0
        self.measure_at = 0.0
        self.waits_since: float | None = None
        self.reported = False

    def tick(self) -> None:
        if self.now > LIMIT_SECONDS and not self.notices["expiry"]:
            self.notices["expiry"] = 1
            self.ended.append("stopped")
        elif self.now >= LIMIT_SECONDS - NOTICE_SECONDS and not self.notices["expiry"]:
            self.notices["limit"] = 1
        if self.lost:
            self.ended.append("lost")
        elif self.closed:
            self.ended.append("stopped")
        del self.ended[1:]
        if self.now >= self.measure_at:
            self.measure_at = self.now + JOURNAL_SECONDS
            self.notices["journal"] += self.measured <= JOURNAL_WARN_BYTES < self.size
            self.measured = self.size
        waits = self.waits_since is not None and self.now - self.waits_since >= HANG_SECONDS
        self.notices["stuck"] += waits and not self.reported
        self.reported = waits


def _advance(seconds: float) -> Callable[[Watched, Expected], None]:
    def advance(watched: Watched, expected: Expected) -> None:
        watched.now += seconds
        expected.now += seconds

    return advance


def _resize(size: int) -> Callable[[Watched, Expected], None]:
    def resize(watched: Watched, expected: Expected) -> None:
        watched.set_journal(size)
        expected.size = size

    return resize


def _toggle_wait(watched: Watched, expected: Expected) -> None:
    if expected.waits_since is None:
        watched.consumers.waits["train"] = watched.now
        expected.waits_since = expected.now
    else:
        watched.consumers.waits.clear()
        expected.waits_since = None


def _lose(watched: Watched, expected: Expected) -> None:
    watched.monitor.apply(TasksLost("the agent has ended"))
    expected.lost = True


def _close(watched: Watched, expected: Expected) -> None:
    watched.monitor.apply(ClusterEnded("it was stopped from another process"))
    expected.closed = True


EVENTS: dict[str, Callable[[Watched, Expected], None]] = {
    "tick": _advance(TICK_SECONDS),
    "six": _advance(6.0),
    "minute": _advance(60.0),
    "large": _resize(2 * JOURNAL_WARN_BYTES),
    "small": _resize(10),
    "wait": _toggle_wait,
    "lost": _lose,
    "closed": _close,
}


@pytest.mark.parametrize("first", list(itertools.product(EVENTS, repeat=2)), ids="-".join)
def test_each_condition_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: tuple[str, ...]
) -> None:
    for rest in itertools.product(EVENTS, repeat=2):
        watched, expected = Watched(monkeypatch, FakeTasks(tmp_path), tmp_path), Expected()
        watched.set_journal(0)
        reason = f"the time limit of {LIMIT_SECONDS:g} s was reached"
        watched.monitor.apply(ExpiryChanged(LIMIT_SECONDS, reason))
        for name in (*first, *rest):
            EVENTS[name](watched, expected)
            watched.tick()
            expected.tick()
            assert watched.notices == expected.notices, (*first, *rest)
            assert watched.ended == expected.ended, (*first, *rest)


@pytest.mark.parametrize("event", [TasksLost("x"), ClusterEnded("x"), ExpiryChanged(-1.0, "x")])
def test_slow_end_of_a_cluster_is_requested_once(
    monkeypatch: pytest.MonkeyPatch, event: Any
) -> None:
    watched = Watched(monkeypatch, FakeTasks(None))
    watched.monitor.apply(event)
    for _ in range(10):
        watched.tick()
        watched.now += TICK_SECONDS
    assert watched.ended == ["lost" if isinstance(event, TasksLost) else "stopped"]
    assert watched.threads == ["tfd-watchdog-end"]


def test_remote_hosts_are_queried_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = FakeTasks(None, on_this_host=False)
    tasks.unreachable = ["host-a cannot reach data_worker:0"]
    watched = Watched(monkeypatch, tasks)
    watched.monitor.apply(TaskChanged("worker:0", TaskState.READY, address="host-a:5", pid=5))
    watched.consumers.waits["train"] = watched.now
    watched.tick()
    watched.now += HANG_SECONDS
    cluster = SimpleNamespace(readers=lambda job_name: ([1], 0))
    watched.consumers.delivery = Delivery(lambda: cluster, -1, "OFF", "r", consumer=(1, 2))  # type: ignore
    watched.tick()
    assert watched.threads == ["tfd-watchdog-stuck"]
    (notice,) = watched.monitor.snapshot().notices
    assert notice.what == (
        "'train' has waited 3 s for data (worker:0 ready): host-a cannot reach data_worker:0"
    )
    assert str(notice.fix).startswith("start the missing consumers of job 'r'")


def test_wait_that_ends_during_a_slow_query_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = FakeTasks(None, on_this_host=False)
    watched = Watched(monkeypatch, tasks)

    def end_wait() -> list[str]:
        watched.consumers.waits.clear()
        return []

    monkeypatch.setattr(tasks, "unreachable_peers", end_wait)
    watched.consumers.waits["train"] = watched.now - HANG_SECONDS
    watched.tick()
    assert not watched.notices


def test_journal_on_another_host_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    watched = Watched(monkeypatch, FakeTasks(tmp_path, on_this_host=False), tmp_path)
    watched.set_journal(2 * JOURNAL_WARN_BYTES)
    watched.tick()
    assert watched.monitor.journal_bytes is None


def test_removed_journal_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watched = Watched(monkeypatch, FakeTasks(tmp_path / "gone"))
    watched.tick()
    assert watched.monitor.journal_bytes in (None, 0)
    assert not watched.notices
