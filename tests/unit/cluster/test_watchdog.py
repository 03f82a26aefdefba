"""The watchdog of a running cluster, in all orders of events and with a fake clock."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tfd_notebook.agent.work_dir import total_bytes
from tfd_notebook.cluster.monitor import Monitor
from tfd_notebook.cluster.watchdog import Watchdog
from tfd_notebook.data.bottleneck.usage import Delivery
from tfd_notebook.errors import StateError
from tfd_notebook.model.events import ClusterEnded, ExpiryChanged, TaskChanged, TasksLost
from tfd_notebook.model.spec import ClusterConfig, Role, TaskState
from tfd_notebook.model.stacks import BlockedFunction
from tfd_notebook.net import clock
from tfd_notebook.net.probe import Probe

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
        self.in_process = False
        self.unreachable: list[str] = []
        self.blocked: list[BlockedFunction] = []
        #: The arguments of the journal's `interrupt`.
        self.interrupted: list[str] = []
        self.journal = SimpleNamespace(interrupt=self.interrupted.append)

    def blocked_functions(self, seconds: float) -> list[BlockedFunction]:
        return self.blocked

    def journal_size(self) -> int | None:
        return None if self.work_dir is None else total_bytes(self.work_dir)

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
        self,
        monkeypatch: pytest.MonkeyPatch,
        tasks: FakeTasks,
        directory: Path | None = None,
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        self.now = 1000.0
        self.tasks = tasks
        monkeypatch.setattr(clock, "now", lambda: self.now)
        config = ClusterConfig("c", "local", {Role.WORKER: 1})
        self.monitor = Monitor(config)
        self.consumers = FakeConsumers(lambda: self.now)
        self.silent: dict[str, Probe] = {}
        self.probed: list[tuple[str, ...]] = []
        self.ended: list[str] = []
        self.threads: list[str] = []
        self.journal = None if directory is None else directory / "journal"

        def probe(addresses: Iterable[str], timeout: float) -> tuple[Probe, ...]:
            self.probed.append(tuple(addresses))
            self.now += timeout if self.silent else 0.0
            return tuple(self.silent.get(each, Probe(each, "alive")) for each in self.probed[-1])

        def start_thread(call: Callable[[], None], name: str) -> None:
            self.threads.append(name)
            call()

        self.tick: Any = Watchdog(
            tasks,  # type: ignore[arg-type]
            self.monitor,
            self.consumers,  # type: ignore[arg-type]
            hang_seconds,
            NOTICE_SECONDS,
            self.ended.append,
            clock=lambda: self.now,
            start_thread=start_thread,
            probe=probe,
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


def test_stopped_task_is_recorded_in_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = FakeTasks(None)
    watched = Watched(monkeypatch, tasks)
    watched.tick()
    assert tasks.interrupted == []
    watched.tick("data_worker:1")
    assert tasks.interrupted == ["data_worker:1"]
    tasks.journal = None  # type: ignore[assignment]
    watched.tick("data_worker:1")
    assert tasks.interrupted == ["data_worker:1"]


def test_function_that_does_not_return_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = FakeTasks(None)
    blocked = BlockedFunction("decode", "/a/x.py", 12, ("data_worker:0",), 8.2, "x.py:12")
    tasks.blocked = [blocked]
    watched = Watched(monkeypatch, tasks)
    watched.consumers.waits["train"] = watched.now - HANG_SECONDS
    watched.tick()
    assert "tfd-watchdog-stuck" in watched.threads
    (notice,) = watched.monitor.snapshot().notices
    assert notice.what.endswith("decode (x.py:12) in data_worker:0 has not returned for 8 s")


def test_function_is_named_before_its_consumer_counts_as_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = FakeTasks(None)
    tasks.blocked = [BlockedFunction("decode", "/a/x.py", 12, ("data_worker:0",), 4.0, "x.py:12")]
    watched = Watched(monkeypatch, tasks, hang_seconds=30.0)
    for _ in range(3):  # once for three waits
        watched.consumers.waits["train"] = watched.now
        watched.tick()
        watched.now += 4.5
        watched.tick()
        watched.consumers.waits.clear()
        watched.tick()
    (notice,) = watched.monitor.snapshot().notices
    assert notice.what == (
        "'train' has waited 4 s for data: "
        "decode (x.py:12) in data_worker:0 has not returned for 4 s"
    )
    assert "cluster.stacks()" in str(notice.fix)


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
    assert watched.threads[-1] == "tfd-watchdog-stuck"
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


def test_journal_on_another_host_is_measured_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    watched = Watched(monkeypatch, FakeTasks(tmp_path, on_this_host=False), tmp_path)
    watched.set_journal(2 * JOURNAL_WARN_BYTES)
    watched.tick()
    assert watched.threads == ["tfd-journal"]
    assert watched.monitor.journal_bytes == 2 * JOURNAL_WARN_BYTES
    assert watched.notices == {"journal": 1}


def test_slow_host_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tasks = FakeTasks(tmp_path, on_this_host=False)
    watched = Watched(monkeypatch, tasks, tmp_path)
    requests = []

    def slow() -> int:
        requests.append(watched.now)
        watched.now += 2 * JOURNAL_SECONDS
        watched.tick()
        raise StateError("the host does not answer")

    monkeypatch.setattr(tasks, "journal_size", slow)
    watched.tick()
    assert len(requests) == 1
    assert watched.monitor.journal_bytes is None
    monkeypatch.setattr(tasks, "journal_size", lambda: 7)
    watched.now += JOURNAL_SECONDS
    watched.tick()
    assert watched.monitor.journal_bytes == 7


def test_removed_journal_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watched = Watched(monkeypatch, FakeTasks(tmp_path / "gone"))
    watched.tick()
    assert watched.monitor.journal_bytes in (None, 0)
    assert not watched.notices


DISPATCHER, WORKER = "localhost:1", "localhost:2"


def service(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Return a watchdog of a dispatcher and a data worker, whose consumer begins to wait."""
    watched = Watched(monkeypatch, FakeTasks(None), hang_seconds=30.0)
    for task, address in (("dispatcher:0", DISPATCHER), ("data_worker:0", WORKER)):
        watched.monitor.apply(TaskChanged(task, TaskState.READY, address=address, pid=5))
    watched.consumers.waits["train"] = watched.now
    return watched


def run_until(watched: Watched, seconds: float) -> list[Any]:
    """Call the watchdog for some seconds, and return the notices."""
    limit = watched.now + seconds
    while watched.now < limit:
        watched.now += TICK_SECONDS
        watched.tick()
    return list(watched.monitor.snapshot().notices)


def test_silent_dispatcher_is_named_before_the_consumer_counts_as_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = service(monkeypatch)
    start = watched.now
    hung = Probe(DISPATCHER, "hung", reason="accepts connections, no answer")
    watched.silent[DISPATCHER] = hung
    (notice,) = run_until(watched, 4.0)
    assert watched.now - start < 5.0
    assert notice.task == "dispatcher:0"
    assert notice.what == (
        "does not answer (accepts connections, no answer), while 'train' waits for data"
    )
    assert notice.fix == "if it does not continue, cluster.restart('dispatcher:0')"
    assert watched.probed == [(DISPATCHER, WORKER), (DISPATCHER,)]
    # The wait is reported later, with the tasks as they are then.
    *_, stuck = run_until(watched, 40.0)
    assert stuck.what == (
        "'train' has waited 30 s for data (dispatcher:0 does not answer, data_worker:0 ready)"
    )
    assert stuck.fix == "cluster.restart('dispatcher:0')"
    assert len(run_until(watched, 20.0)) == 2, "each is reported once"
    watched.silent.clear()
    run_until(watched, 10.0)
    watched.silent[WORKER] = Probe(WORKER, "hung", reason="accepts connections, no answer")
    watched.silent[DISPATCHER] = hung
    assert [each.task for each in run_until(watched, 10.0)[2:]] == ["dispatcher:0", "data_worker:0"]


def test_task_that_answers_the_second_probe_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = service(monkeypatch)

    class Once(dict[str, Probe]):
        def get(self, address: str, answer: Any = None) -> Any:
            return self.pop(address, answer)

    watched.silent = Once({DISPATCHER: Probe(DISPATCHER, "hung")})
    assert not run_until(watched, 20.0)
    assert watched.probed[:3] == [(DISPATCHER, WORKER), (DISPATCHER,), (DISPATCHER, WORKER)]


def test_restarted_task_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = service(monkeypatch)
    watched.silent[DISPATCHER] = Probe(DISPATCHER, "refused", reason="connection refused")
    tasks = watched.monitor.tasks

    def listed() -> Any:
        rows = tasks()
        watched.monitor.apply(
            TaskChanged("dispatcher:0", TaskState.READY, address=DISPATCHER, pid=6)
        )
        return rows

    monkeypatch.setattr(watched.monitor, "tasks", listed)
    assert not [each for each in run_until(watched, 1.5) if each.task == "dispatcher:0"]


@pytest.mark.parametrize("in_process", [True, False])
def test_service_is_not_probed_without_need(
    monkeypatch: pytest.MonkeyPatch, in_process: bool
) -> None:
    watched = service(monkeypatch)
    watched.silent[DISPATCHER] = Probe(DISPATCHER, "hung")
    if in_process:  # the probe would find this process
        watched.tasks.in_process = True
    else:
        watched.consumers.waits.clear()
    run_until(watched, 20.0)
    assert not watched.probed
