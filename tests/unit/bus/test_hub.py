"""Messages and commands of panels and widgets, without a browser."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import re
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tfd_notebook
from tests._coordinator import FakeCoordinator
from tests._patch import Tree, merged, tree_of
from tests._waiting import until
from tfd_notebook import bus, errors
from tfd_notebook._compat.tf_data.meter import MetricTotals
from tfd_notebook.bus import hub, running_cell, session
from tfd_notebook.bus.closure_feed import COLUMNS, ColumnFeed
from tfd_notebook.bus.session import ControllerPresence, Session
from tfd_notebook.bus.snapshot_feed import SnapshotFeed, difference
from tfd_notebook.cluster import commands, data_service, registry
from tfd_notebook.cluster.cluster import Cluster
from tfd_notebook.cluster.monitor import Monitor
from tfd_notebook.data.bottleneck.live_limit import LiveLimit
from tfd_notebook.data.consume import sampler
from tfd_notebook.data.consume.consumers import Series
from tfd_notebook.launchers import Fake
from tfd_notebook.model.closure_store import CANCELLED, EPOCH, FAILED, READY, STATES, Store
from tfd_notebook.model.events import Notice
from tfd_notebook.model.snapshot import (
    CoordinatedRow,
    CoordinatorRow,
    GpuRow,
    RankRow,
    Snapshot,
    StreamRow,
    TaskRow,
)
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.resolvers import providers


def snapshot(**changes: Any) -> Snapshot:
    tasks = tuple(
        TaskRow(f"data_worker:{i}", Role.DATA_WORKER, i, state=TaskState.READY, cpu_percent=3.14)
        for i in range(3)
    )
    result = Snapshot(1, 10.0, "c", "local", "ready", tasks, planned={Role.DATA_WORKER: 3})
    return replace(result, **changes)


# The tree


def test_patch_turns_the_old_tree_into_the_new_one() -> None:
    chance = random.Random(5)

    def tree(depth: int) -> Any:
        if depth == 0 or chance.random() < 0.2:
            return chance.choice([1, 1.5, True, "", "x", [1, 2], []])
        return {str(chance.randrange(6)): tree(depth - 1) for _ in range(chance.randrange(5))}

    for _ in range(500):
        old, new = {"a": tree(3)}, {"a": tree(3)}
        assert merged(old, difference(old, new)) == new
        assert difference(new, new) == {}


def test_unchanged_rows_are_not_sent() -> None:
    feed, first = SnapshotFeed(), snapshot()
    feed.full([first])
    assert feed.patch([replace(first, version=2, time=11.0)]) == {}
    rows = (*first.tasks[:2], replace(first.tasks[2], state=TaskState.HUNG, reason="no answer"))
    patch = feed.patch([replace(first, tasks=rows, state="degraded")])
    assert patch == {
        "clusters": {
            "c": {
                "state": "degraded",
                "tasks": {"data_worker:2": {"state": "hung", "reason": "no answer"}},
            }
        }
    }
    patch = feed.patch([replace(first, tasks=rows[:2], state="degraded")])
    assert patch["clusters"]["c"]["tasks"] == {"data_worker:2": None}
    assert feed.patch([]) == {"clusters": {"c": None}}


def test_gpus_are_rows_by_host_and_number() -> None:
    feed, first = SnapshotFeed(), snapshot(state="starting")
    assert "gpus" not in feed.full([first])["clusters"]["c"]
    two = (GpuRow("one", 0, task="worker:0", use_percent=7.0), GpuRow("two", 0, memory_mb=1e4))
    patch = feed.patch([replace(first, gpus=two)])["clusters"]["c"]
    assert patch == {
        "gpus": {
            "one 0": {"host": "one", "index": 0, "task": "worker:0", "use_percent": 7.0},
            "two 0": {"host": "two", "index": 0, "memory_mb": 10_000.0},
        }
    }
    freed = (replace(two[0], task=""), two[1])
    patch = feed.patch([replace(first, gpus=freed)])["clusters"]["c"]
    assert patch == {"gpus": {"one 0": {"task": None}}}
    assert feed.patch([first])["clusters"]["c"] == {"gpus": None}


def test_gpus_of_an_idle_cluster_stop_changing() -> None:
    feed = SnapshotFeed()

    def patch_of(use: float, used: float) -> Any:
        return feed.patch([snapshot(gpus=(GpuRow("one", 0, "", "", use, used),))])

    patch_of(50.0, 900.0)
    row = patch_of(20.0, 950.0)["clusters"]["c"]["gpus"]["one 0"]
    assert row == {"use_percent": 20.0}
    assert patch_of(30.0, 1000.0) == {}
    assert patch_of(0.0, 2000.0)["clusters"]["c"]["gpus"]["one 0"] == {"use_percent": 0.0}


def test_idle_cluster_sends_no_patches() -> None:
    feed, first = SnapshotFeed(), snapshot()
    feed.full([first])
    busier = tuple(replace(row, cpu_percent=50.0, rss_mb=9.0) for row in first.tasks)
    patch = feed.patch([replace(first, tasks=busier)])["clusters"]["c"]["tasks"]
    assert patch["data_worker:0"] == {"rss_mb": 9.0}  # a new field
    busier = tuple(replace(row, rss_mb=90.0) for row in busier)
    assert feed.patch([replace(first, tasks=busier)]) == {}
    stream = StreamRow("train", "stream", "running", elements=5, elements_per_s=2.0)
    patch = feed.patch([replace(first, tasks=busier, streams=(stream,))])["clusters"]["c"]
    assert patch["tasks"]["data_worker:0"] == {"cpu_percent": 50.0, "rss_mb": 90.0}
    assert patch["streams"]["train"]["elements"] == 5


def test_measurements_of_an_idle_cluster_fall() -> None:
    feed = SnapshotFeed()
    stream = StreamRow("train", "stream", "running", elements=5, elements_per_s=2.0)

    def patch_of(second: float, cpu: float, sent: int, rate: float, *streams: StreamRow) -> Any:
        row = TaskRow("data_worker:0", Role.DATA_WORKER, 0, state=TaskState.READY, rss_mb=sent)
        row = replace(row, cpu_percent=cpu, bytes_sent=sent, bytes_per_s=rate)
        current = snapshot(tasks=(row,), streams=streams, time=1000.0 + second)
        clusters = feed.patch([current]).get("clusters", {"c": {}})
        return clusters["c"].get("tasks", {}).get("data_worker:0")

    patch_of(0.0, 32.0, 700, 44e6, stream)
    ended = replace(stream, state="finished", elements_per_s=0.0)
    # The rate is a mean of the last seconds, and the last bytes are measured after the end.
    assert patch_of(1.0, 36.0, 900, 30e6, ended) == {
        "cpu_percent": 36.0,
        "rss_mb": 900,
        "bytes_sent": 900,
        "bytes_per_s": 30e6,
    }
    patch_of(2.0, 4.0, 950, 20e6, ended)
    assert patch_of(60.0, 1.0, 990, 76.0, ended) == {"cpu_percent": 1.0, "bytes_per_s": 76.0}
    assert patch_of(61.0, 3.0, 999, 120.0, ended) is None


def test_measurements_are_sent_while_ranks_or_long_closures_run() -> None:
    rank = RankRow("worker:0", 0, "localhost", "running")
    long_closure = CoordinatorRow("running", counts={"running": 1})
    cases: tuple[dict[str, Any], ...] = ({"ranks": (rank,)}, {"coordinator": long_closure})
    for busy in cases:
        feed = SnapshotFeed()
        for second, cpu in ((0, 10.0), (60, 90.0)):
            row = TaskRow("worker:0", Role.WORKER, 0, state=TaskState.READY, cpu_percent=cpu)
            tree = feed.full([snapshot(tasks=(row,), time=1000.0 + second, **busy)])
            assert tree["clusters"]["c"]["tasks"]["worker:0"]["cpu_percent"] == cpu


def test_measurements_of_a_restarting_task_are_sent() -> None:
    feed = SnapshotFeed()
    for second, state, memory in ((0, "ready", 300.0), (60, "restarting", 5.0), (62, "ready", 9.0)):
        row = TaskRow("ps:0", Role.PS, 0, state=TaskState(state), rss_mb=memory)
        tree = feed.full([snapshot(tasks=(row,), time=1000.0 + second)])
        assert tree["clusters"]["c"]["tasks"]["ps:0"]["rss_mb"] == memory


def test_tree_has_the_coordinator_and_the_latest_notices() -> None:
    row = CoordinatorRow(
        "paused",
        "by request",
        counts={"ready": 3},
        workers=(CoordinatedRow(0, "running", 7, "step", 0.25), CoordinatedRow(1, "idle")),
        run_ms=(1.0, 2.0, math.pi),
    )
    notices = tuple(Notice("info", f"notice {i}", fix="none") for i in range(60))
    tree = SnapshotFeed().full([snapshot(coordinator=row, events=notices)])["clusters"]["c"]
    assert tree["coordinator"]["workers"]["0"]["function"] == "step"
    assert tree["coordinator"]["run_ms"] == [1.0, 2.0, 3.1416]
    assert [each["what"] for each in tree["notices"]] == [f"notice {i}" for i in range(10, 60)]
    assert tree["planned"] == {"data_worker": 3}


# Columns


class Page:
    """The rows that a page builds from messages about closures."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.errors: dict[int, str] = {}

    def take(self, head: Tree, buffers: list[bytes]) -> None:
        kinds = {"f8": "d", "i4": "i", "u1": "B", "i2": "h", "u2": "H"}
        columns = {
            name: array(kinds[kind], buffer)
            for (name, kind), buffer in zip(head["columns"], buffers, strict=True)
        }
        if head["full"]:
            self.rows.clear()
        self.errors.update({int(key): text for key, text in head["errors"].items()})
        for row in range(head["count"]):
            values = {name: column[row] for name, column in columns.items()}
            self.rows[int(values.pop("id"))] = values


def test_page_with_changes_equals_page_with_all_rows() -> None:
    store, chance, live = Store(), random.Random(3), []
    feed, page = ColumnFeed(store), Page()
    for _ in range(300):
        for _ in range(chance.randrange(8)):
            act = chance.random()
            if act < 0.5 or not live:
                live.append(store.add(chance.choice("fgh"), "t", None))
            else:
                key = chance.choice(live)
                worker = chance.randrange(3)
                store.dispatched(key, worker)
                if act < 0.6:
                    store.retry(key, worker, "lost")
                    continue
                store.running(key)
                state = chance.choice((READY, FAILED, CANCELLED))
                store.end(key, state, worker, "boom" if state == FAILED else "")
                live.remove(key)
        if (message := feed.changes()) is not None:
            page.take(*message)
    assert feed.changes() is None
    new_page = Page()
    new_page.take(*ColumnFeed(store).full())
    assert repr(page.rows) == repr(new_page.rows)
    assert page.errors.keys() >= new_page.errors.keys()
    assert len(page.rows) == len(store)


def test_errors_are_sent_without_stack_traces() -> None:
    store = Store()
    key = store.add("f", "f", None)
    frames = "".join(f'  File "kernelapp.py", line {line}, in main\n\n' for line in range(60))
    error = f"Graph execution error:\n\nDetected at node 'x'\n{frames}\nno batch [[x]] [Op:f]"
    store.end(key, FAILED, 0, error)
    page = Page()
    page.take(*ColumnFeed(store).full())
    assert page.errors == {key: "no batch [[x]] [Op:f]"}


def test_times_are_epoch_seconds_and_missing_times_are_nan() -> None:
    store = Store()
    key = store.add("f", "f", None)
    store.dispatched(key, 1)
    page = Page()
    page.take(*ColumnFeed(store).full())
    assert abs(page.rows[key]["queued"] - time.time()) < 60
    assert math.isnan(page.rows[key]["finished"])


def test_wall_clock_step_does_not_change_times(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    key = store.add("f", "f", None)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    head, _ = message = ColumnFeed(store).full()
    page = Page()
    page.take(*message)
    assert 0 <= head["now"] - page.rows[key]["queued"] < 60


def test_attempts_of_a_lost_worker_are_published() -> None:
    store = Store()
    key = store.add("f", "f", None)
    store.dispatched(key, 1)
    store.retry(key, 1, "put back")
    head, _ = ColumnFeed(store).full()
    ((lost, worker, began, ended),) = head["lost"]
    assert (lost, worker) == (key, 1)
    assert 0 < began - EPOCH <= ended - EPOCH


def test_reader_too_far_behind_gets_all_rows() -> None:
    store = Store(keep=50)
    feed = ColumnFeed(store)
    feed.full()
    for _ in range(2_000):
        key = store.add("f", "f", None)
        store.dispatched(key, 0)
        store.end(key, READY, 0)
    message = feed.changes()
    assert message is not None
    head, buffers = message
    assert head["full"]
    assert len(buffers) == len(COLUMNS)
    assert array("d", buffers[0])[-1] == key


def test_pause_is_published_as_a_change() -> None:
    store, paused = Store(), [False]
    store.add("f", "f", None)
    feed = ColumnFeed(store, lambda: paused[0])
    feed.full()
    assert feed.changes() is None
    paused[0] = True
    message = feed.changes()
    assert message is not None
    assert (message[0]["paused"], message[0]["count"]) == (True, 0)


# Sessions


class Browser:
    """A session, and its sent messages."""

    def __init__(self, **options: Any) -> None:
        self.sent: list[tuple[Tree, list[bytes]]] = []
        self.session = Session(
            lambda message, buffers: self.sent.append((message, buffers)), **options
        )
        hub.join(self.session)

    def send(self, kind: str, client: str = "tab", **content: Any) -> None:
        hub.receive(self.session, {"kind": kind, "client": client, **content})

    def received(self, kind: str) -> list[Tree]:
        return [message for message, _ in list(self.sent) if message["kind"] == kind]

    def request(self, command: str, client: str = "tab", **content: Any) -> Tree:
        name = f"{command} {len(self.sent)} {time.perf_counter()}"
        self.send("command", client, request_id=name, command=command, **content)
        return until(
            lambda: next((m for m in self.received("reply") if m["request_id"] == name), None)
        )  # type: ignore[no-any-return]

    @property
    def tree(self) -> Tree:
        return tree_of(self.received("state"))


@contextlib.contextmanager
def browser(**options: Any) -> Iterator[Browser]:
    client = Browser(**options)
    try:
        yield client
    finally:
        hub.leave(client.session)
        until(lambda: not [t for t in threading.enumerate() if t.name.startswith("tfd-bus")])


@pytest.fixture
def panel() -> Iterator[Browser]:
    with browser(everything=True) as client:
        yield client


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def cluster(fake: Fake) -> Iterator[Cluster]:
    with Cluster(launcher=fake, data_workers=2, workers=1, name="shown") as cluster:
        yield cluster


class FakeProxy:
    """A cluster of another kernel, which counts its snapshots."""

    state, ended = "ready", False
    coordinator: FakeCoordinator | None = None
    streams: Mapping[str, Any] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0
        self.elements = 0
        self.built = 0

    @property
    def has_coordinator(self) -> bool:
        return self.coordinator is not None

    def current_coordinator(self) -> FakeCoordinator | None:
        return self.coordinator

    def change(self) -> None:
        self.version += 1
        self.elements += 1
        registry.notify_change()

    def snapshot(self) -> Snapshot:
        self.built += 1
        row = StreamRow("train", "stream", "running", elements=self.elements)
        return snapshot(name=self.name, streams=(row,))


@pytest.fixture
def proxies() -> Iterator[dict[str, FakeProxy]]:
    """Yield two clusters of other kernels, by name."""
    clusters = {name: FakeProxy(name) for name in ("one", "two")}
    providers.proxies["fake"] = lambda: clusters
    try:
        yield clusters
    finally:
        del providers.proxies["fake"]


@pytest.mark.slow
def test_panel_is_notified_of_started_and_ended_clusters(panel: Browser) -> None:
    until(lambda: panel.received("hello"))
    assert panel.received("state") == []  # no client has subscribed yet
    panel.send("hello", protocol=bus.PROTOCOL, acks=True)
    until(lambda: panel.received("state"))
    assert panel.received("hello")[-1]["known"] == "tab"
    assert panel.tree == {"clusters": {}}
    with Cluster(launcher="fake", data_workers=1, name="coming"):
        until(lambda: panel.tree["clusters"].get("coming", {}).get("state") == "ready")
    until(lambda: panel.tree["clusters"]["coming"]["state"] == "stopped")
    numbers = [message["seq"] for message in panel.received("state")]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.slow
def test_commands_are_validated_and_answered(panel: Browser, cluster: Cluster) -> None:
    panel.send("hello")
    until(lambda: panel.received("state"))
    reply = panel.request("scale", name="shown", data_workers=3)
    assert reply["value"] == {"dispatcher": 1, "data_worker": 3, "worker": 1}
    assert reply["client"] == "tab"
    until(lambda: len(panel.tree["clusters"]["shown"]["tasks"]) == 5)
    assert panel.request("logs", name="shown", task="worker:0")["value"]["text"]
    for wrong in (
        {"command": "scale", "name": "missing", "data_workers": 1},
        {"command": "scale", "name": "shown", "data_workers": -1},
        {"command": "scale", "name": "shown", "data_workers": "many"},
        {"command": "scale", "name": "shown"},
        {"command": "restart", "name": "shown", "task": "data_worker:99"},
        {"command": "restart", "name": "shown", "task": ["data_worker:0"]},
        {"command": "hold", "name": "shown", "worker": True, "held": True},
        {"command": "break_on", "name": "shown", "failure": "yes"},
        {"command": "value", "name": "shown", "id": 1.5},
        {"command": "__class__"},
        {"command": "start"},
    ):
        answer = panel.request(**wrong)  # type: ignore[arg-type]
        assert answer["error"]["what"], wrong
        assert "value" not in answer
    for nonsense in (None, 3, [], {}, {"kind": "hello"}, {"kind": 1, "client": 2}):
        hub.receive(panel.session, nonsense)
    assert panel.request("stop", name="shown")["value"] == "stopped"


def unknown(panel: Browser, client: str) -> bool:
    return any(hello.get("unknown") == client for hello in panel.received("hello"))


@pytest.mark.slow
@pytest.mark.parametrize("acks", [True, False])
def test_silent_client_is_dropped_and_reconnects(
    panel: Browser, proxies: dict[str, FakeProxy], monkeypatch: pytest.MonkeyPatch, acks: bool
) -> None:
    monkeypatch.setattr(session, "SILENT_SECONDS", 0.2)
    proxies["one"].coordinator = fake_coordinator = FakeCoordinator()
    panel.send("hello", acks=acks)
    panel.send("subscribe", clusters=["one"])
    until(lambda: fake_coordinator.present == 1)
    until(lambda: unknown(panel, "tab"))
    until(lambda: fake_coordinator.present == 0)
    count = len(panel.received("state"))
    proxies["one"].change()
    assert panel.request("list", client="other")["value"]
    assert len(panel.received("state")) == count
    monkeypatch.setattr(session, "SILENT_SECONDS", 300.0)
    panel.send("hello", acks=acks)
    until(lambda: len(panel.received("state")) > count)


@pytest.mark.slow
def test_client_that_sends_messages_is_kept(
    panel: Browser, proxies: dict[str, FakeProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SILENT_SECONDS", 0.5)
    panel.send("hello", acks=True)
    panel.send("hello", client="gone", acks=True)
    panel.send("subscribe", clusters=["one"])

    def other_is_forgotten() -> bool:
        panel.send("ack", seq=0)
        proxies["one"].change()
        return unknown(panel, "gone")

    until(other_is_forgotten)
    assert not unknown(panel, "tab")


@pytest.mark.slow
def test_client_without_messages_need_not_acknowledge(
    panel: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel.send("hello", acks=True)
    until(lambda: panel.received("state"))
    panel.send("ack", seq=1)
    monkeypatch.setattr(session, "SILENT_SECONDS", 0.0)
    push, ticks = panel.session.push, itertools.count()
    latest = [0]

    def counted(*args: Any) -> None:
        latest[0] = next(ticks)
        push(*args)

    monkeypatch.setattr(panel.session, "push", counted)
    until(lambda: latest[0] >= 3)
    assert not unknown(panel, "tab")


@pytest.mark.slow
def test_client_is_kept_while_a_cell_delays_its_messages(
    panel: Browser, proxies: dict[str, FakeProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    from IPython.core.events import EventManager, available_events

    shell = SimpleNamespace()
    shell.events = EventManager(shell, available_events)
    running_cell.follow(shell)
    try:
        shell.events.trigger("pre_execute")
        monkeypatch.setattr(session, "SILENT_SECONDS", 0.2)
        panel.send("hello", acks=False)
        panel.send("hello", client="gone", acks=True)

        def other_is_forgotten() -> bool:
            proxies["one"].change()
            return unknown(panel, "gone")

        until(other_is_forgotten)
        assert not unknown(panel, "tab")
        shell.events.trigger("post_execute")
        until(lambda: unknown(panel, "tab"))
    finally:
        running_cell.unfollow()
    assert not any(shell.events.callbacks.values())


def test_number_of_clients_is_limited(panel: Browser) -> None:
    for number in range(1000):
        panel.send("hello", client=f"tab-{number}", acks=False)
    oldest = 1000 - session.MAX_CLIENTS
    for number in (999, oldest, oldest - 1):
        panel.send("subscribe", client=f"tab-{number}", clusters=["shown"])
    until(lambda: unknown(panel, f"tab-{oldest - 1}"))
    assert not unknown(panel, "tab-999")
    assert not unknown(panel, f"tab-{oldest}")


class BlockedCluster(FakeProxy):
    """A cluster of another kernel that answers a command when the test releases it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.entered, self.release = threading.Event(), threading.Event()
        self.commands: list[str] = []

    def perform(self, command: str, timeout: float, **arguments: Any) -> str:
        self.entered.set()
        assert self.release.wait(60)
        self.commands.append(command)
        return command


@pytest.fixture
def blocked() -> Iterator[BlockedCluster]:
    blocked_cluster = BlockedCluster("blocked")
    providers.proxies["blocked"] = lambda: {blocked_cluster.name: blocked_cluster}
    try:
        yield blocked_cluster
    finally:
        blocked_cluster.release.set()
        del providers.proxies["blocked"]


def test_blocked_command_does_not_delay_other_clusters(
    panel: Browser, cluster: Cluster, proxies: dict[str, FakeProxy], blocked: BlockedCluster
) -> None:
    panel.send("hello")
    panel.send("command", request_id="first", command="logs", name="blocked")
    assert blocked.entered.wait(60)
    panel.send("hello", client="second")
    until(lambda: any(hello.get("known") == "second" for hello in panel.received("hello")))
    before = len(panel.received("state"))
    proxies["one"].change()
    until(lambda: len(panel.received("state")) > before)
    assert panel.request("pause", name="shown")["error"]["code"]
    assert panel.request("stop", name="shown")["value"] == "stopped"
    assert [reply for reply in panel.received("reply") if reply["request_id"] == "first"] == []
    blocked.release.set()
    until(lambda: [reply for reply in panel.received("reply") if reply["request_id"] == "first"])


def test_commands_for_one_cluster_keep_their_order(panel: Browser, blocked: BlockedCluster) -> None:
    expected = ["scale", "restart", "scale", "stop"]
    for number, command in enumerate(expected):
        request = {"command": command, "name": "blocked", "task": "worker:0"}
        panel.send("command", request_id=str(number), **request)
    assert blocked.entered.wait(60)
    assert blocked.commands == []
    blocked.release.set()
    until(lambda: len(panel.received("reply")) == len(expected))
    assert blocked.commands == expected


@pytest.fixture
def start_gate(
    cluster: Cluster, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, threading.Event]:
    """Return the events that a start of new tasks sets, and for which it waits."""
    entered, release = threading.Event(), threading.Event()
    reserve_ports = fake.task_hosts[0].reserve_ports

    def wait(tasks: Any, *, timeout: float = 30.0) -> dict[str, str]:
        entered.set()
        assert release.wait(60)
        return reserve_ports(tasks)

    monkeypatch.setattr(fake.task_hosts[0], "reserve_ports", wait)
    return entered, release


@pytest.mark.parametrize("command", ["detach", "renew"])
def test_lease_command_does_not_wait_for_starting_tasks(
    cluster: Cluster, start_gate: tuple[threading.Event, threading.Event], command: str
) -> None:
    cluster.detach(1)
    entered, release = start_gate
    scaling = threading.Thread(target=cluster.scale, kwargs={"data_workers": 3})
    scaling.start()
    event = threading.Event()

    def renew() -> None:
        commands.perform({"command": command, "name": "shown", "hours": 2})
        event.set()

    renewing = threading.Thread(target=renew)
    try:
        assert entered.wait(60)
        renewing.start()
        assert event.wait(60)
    finally:
        release.set()
        scaling.join()
        renewing.join()
        cluster.stop()


def test_invalid_request_is_not_sent_to_another_kernel(blocked: BlockedCluster) -> None:
    with pytest.raises(errors.UsageError, match="invalid task None"):
        commands.perform({"command": "restart", "name": "blocked"})
    with pytest.raises(errors.UsageError, match="invalid lines '5'"):
        commands.perform({"command": "logs", "name": "blocked", "lines": "5"})
    assert not blocked.entered.is_set()


def test_logs_can_be_read_while_tasks_are_changed(
    panel: Browser, start_gate: tuple[threading.Event, threading.Event]
) -> None:
    entered, release = start_gate
    try:
        panel.send("command", request_id="scale", command="scale", name="shown", data_workers=3)
        assert entered.wait(60)
        assert panel.request("logs", name="shown", task="worker:0")["value"]["text"]
    finally:
        release.set()
    until(lambda: panel.received("reply")[-1]["request_id"] == "scale")


@pytest.mark.slow
def test_client_that_is_behind_gets_no_more_messages(
    panel: Browser, proxies: dict[str, FakeProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_UNACKNOWLEDGED", 5)
    monkeypatch.setattr(hub, "TICK_SECONDS", 0.0)
    panel.send("hello", acks=True)
    until(lambda: panel.received("state"))

    def change() -> bool:
        proxies["one"].change()
        return len(panel.received("state")) >= 5

    until(change)
    count = len(panel.received("state"))
    proxies["one"].change()
    assert panel.request("list")["value"]  # it still answers commands
    assert len(panel.received("state")) == count
    panel.send("ack", seq=count)
    until(lambda: elements(panel, "one") == proxies["one"].elements)


def test_gap_is_closed_by_a_full_state(panel: Browser, cluster: Cluster) -> None:
    panel.send("hello")
    until(lambda: panel.received("state"))
    panel.send("resync")
    until(lambda: sum(message["full"] for message in panel.received("state")) == 2)


def test_unknown_client_is_notified(panel: Browser) -> None:
    panel.send("subscribe", client="old tab", clusters=["x"])
    until(lambda: any(m.get("unknown") == "old tab" for m in panel.received("hello")))


@pytest.mark.slow
def test_widget_gets_only_its_cluster_and_its_end(cluster: Cluster) -> None:
    with (
        Cluster(launcher="fake", data_workers=1, name="other"),
        browser(cluster=cluster) as widget,
    ):
        widget.send("hello")
        until(lambda: widget.tree.get("clusters", {}).keys() == {"shown"})
        cluster.stop()
        until(lambda: widget.tree["clusters"]["shown"]["state"] == "stopped")
        assert widget.tree["clusters"].keys() == {"shown"}


class BrokenCluster(BlockedCluster):
    """A cluster of another kernel whose snapshots can be taken until `broken` is set."""

    broken = False

    def snapshot(self) -> Snapshot:
        if self.broken:
            raise ValueError("not a number")
        return super().snapshot()


@pytest.mark.parametrize("at_first", [True, False])
def test_failing_snapshot_does_not_stop_other_clusters(
    panel: Browser, cluster: Cluster, at_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    broken = BrokenCluster("broken")
    broken.broken = at_first
    providers.proxies["broken"] = lambda: {broken.name: broken}
    widget = Browser(cluster=cluster)
    try:
        panel.send("hello")
        widget.send("hello")
        until(lambda: "shown" in panel.tree.get("clusters", {}))
        broken.broken = True
        broken.change()
        cluster.scale(data_workers=3)
        for each in (panel, widget):
            until(lambda e=each: len(e.tree["clusters"]["shown"]["tasks"]) == 5)  # type: ignore[misc]
        listed = panel.request("list")["value"]
        assert ("broken" in panel.tree["clusters"]) is not at_first
        assert len(listed) == (1 if at_first else 2)
        assert len([r for r in caplog.records if "not a number" in r.message]) == 1
    finally:
        hub.leave(widget.session)
        del providers.proxies["broken"]


def test_broken_cluster_does_not_stop_keep_alives(monkeypatch: pytest.MonkeyPatch) -> None:
    # Before the hub waits for the first time.
    monkeypatch.setattr(hub, "ALIVE_SECONDS", 0.05)
    broken, blocked = BrokenCluster("broken"), BlockedCluster("other")
    broken.broken = True
    providers.proxies["broken"] = lambda: {broken.name: broken, blocked.name: blocked}
    try:
        with browser(everything=True) as panel:
            until(lambda: panel.received("alive"))
    finally:
        del providers.proxies["broken"]


@pytest.mark.slow
def test_clusters_are_listed_while_another_thread_imports() -> None:
    program = """
import importlib.util, sys, threading
from tfd_notebook.cluster import registry

entered, release = threading.Event(), threading.Event()
spec = importlib.util.find_spec("tfd_notebook.cluster.cluster")
load = spec.loader.exec_module

class Slow:
    def find_spec(self, name, path, target=None):
        return spec if name == spec.name else None

def exec_module(module):
    entered.set()
    assert release.wait(60)
    load(module)

spec.loader.exec_module = exec_module
sys.meta_path.insert(0, Slow())
importing = threading.Thread(target=__import__, args=(spec.name,))
importing.start()
assert entered.wait(60)
listed = []
listing = threading.Thread(target=lambda: listed.append(registry.running_clusters()))
listing.start()
listing.join(60)
print(listed)
release.set()
importing.join()
listing.join()
"""
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert completed.stdout == "[{}]\n", completed.stderr


def elements(panel: Browser, name: str) -> int | None:
    cluster = panel.tree.get("clusters", {}).get(name)
    return None if cluster is None else cluster["streams"]["train"]["elements"]


def counts(proxies: dict[str, FakeProxy]) -> list[int]:
    return [proxy.built for proxy in proxies.values()]


@pytest.mark.slow
def test_only_changed_clusters_are_built(panel: Browser, proxies: dict[str, FakeProxy]) -> None:
    panel.send("hello")
    until(lambda: elements(panel, "two") == 0)
    assert counts(proxies) == [1, 1]
    proxies["one"].change()
    until(lambda: elements(panel, "one") == 1)
    assert counts(proxies) == [2, 1]
    panel.send("hello", client="another tab")
    until(lambda: sum(message["full"] for message in panel.received("state")) == 2)
    assert panel.request("list")["value"]
    assert counts(proxies) == [2, 1]


def test_nothing_is_built_or_sent_without_changes(
    panel: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(hub, "TICK_SECONDS", 0.0)
    proxy, checks = FakeProxy("one"), [0]

    def provide() -> dict[str, FakeProxy]:
        checks[0] += 1
        return {"one": proxy}

    providers.proxies["fake"] = provide
    try:
        panel.send("hello")
        until(lambda: elements(panel, "one") == 0)
        sent, first = len(panel.sent), checks[0]
        until(lambda: checks[0] > first + 100)
        assert (proxy.built, len(panel.sent)) == (1, sent)
    finally:
        del providers.proxies["fake"]


@pytest.mark.slow
def test_change_is_published_without_a_check(
    panel: Browser, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "CHECK_SECONDS", 10_000.0)
    panel.send("hello")
    until(lambda: "shown" in panel.tree.get("clusters", {}))
    for count in range(3, 6):
        cluster.scale(data_workers=count)
        until(lambda n=count: panel.tree["clusters"]["shown"]["observed"]["data_worker"] == n)  # type: ignore[misc]


def test_changes_in_one_interval_are_published_together(
    panel: Browser, proxies: dict[str, FakeProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    panel.send("hello")
    until(lambda: elements(panel, "two") == 0)
    monkeypatch.setattr(hub, "TICK_SECONDS", 10_000.0)
    for _ in range(100):
        proxies["one"].change()
    assert panel.request("pause", name="missing")["error"]
    assert counts(proxies) == [1, 1]
    monkeypatch.setattr(hub, "TICK_SECONDS", 0.0)
    panel.send("ack", seq=1)
    until(lambda: elements(panel, "one") == 100)
    assert counts(proxies) == [2, 1]


@pytest.mark.slow
def test_new_stream_and_its_state_are_published_without_a_check(
    panel: Browser, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_shown(state: str) -> bool:
        shown = panel.tree.get("clusters", {}).get("shown", {})
        return bool(shown.get("streams", {}).get("train", {}).get("state") == state)

    monkeypatch.setattr(hub, "CHECK_SECONDS", 10_000.0)
    monkeypatch.setattr(sampler, "watch", lambda registry: None)
    panel.send("hello")
    until(lambda: "shown" in panel.tree.get("clusters", {}))
    source: Any = SimpleNamespace(kind="stream", error=None, meter=None, ended=None)
    source.series, source.live, source.sample = Series(), LiveLimit(), MetricTotals
    consumers = data_service.of(cluster).consumers
    for state in ("new", "running", "paused", "running", "failed"):
        source.state = state
        consumers.add(source, "train") if state == "new" else consumers.measure(source)
        until(lambda state=state: is_shown(state))  # type: ignore[misc]
    before = replace(cluster.snapshot(), time=0.0)
    assert replace(cluster.snapshot(), time=0.0) == before


def test_nothing_is_built_without_clients(panel: Browser, proxies: dict[str, FakeProxy]) -> None:
    panel.send("hello")
    until(lambda: elements(panel, "two") == 0)
    panel.send("bye")
    for _ in range(10):
        proxies["one"].change()
        assert panel.request("pause", name="missing")["error"]
    assert counts(proxies) == [1, 1]


def test_state_is_read_without_a_snapshot(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Monitor, "snapshot")
    assert (cluster.state, cluster.ended) == ("ready", False)


def test_nothing_is_sent_without_clients(panel: Browser, cluster: Cluster) -> None:
    panel.send("hello")
    until(lambda: panel.received("state"))
    panel.send("bye")
    assert panel.request("list")["value"]
    count = len(panel.received("state"))
    cluster.scale(data_workers=3)
    assert panel.request("list")["value"]
    assert len(panel.received("state")) == count


@pytest.mark.slow
def test_kernel_without_changes_sends_keep_alives(
    panel: Browser, proxies: dict[str, FakeProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ALIVE_SECONDS", 0.05)
    proxy = proxies["one"]

    def sent_after_checks(elements: int = 0) -> int:
        """Return the number of keep-alives after the hub has inspected new snapshots."""
        last = proxy.built + 3

        def checked() -> bool:
            proxy.elements += elements
            proxy.version += 1
            return proxy.built >= last

        until(checked)
        return len(panel.received("alive"))

    panel.request("list")  # wakes the hub
    idle = sent_after_checks()
    assert sent_after_checks() == idle
    assert sent_after_checks(elements=1) > idle
    monkeypatch.setenv(hub.KEEP_ALIVE, "0")
    disabled = sent_after_checks(elements=1)
    assert sent_after_checks(elements=1) == disabled


# Forms


class Shell:
    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {"taken": 3}


def test_form_starts_the_same_cluster_as_the_magic() -> None:
    shell = Shell()
    form = commands.panel_requests(shell)["launchers"]({})
    assert {each["name"] for each in form["launchers"]} >= {"local", "inprocess"}
    assert "fake" not in {each["name"] for each in form["launchers"]}
    values = {field["name"]: field["default"] for field in form["fields"]}
    values |= {"launcher": "fake", "name": "formed", "output": "taken", "data_workers": 1}
    answer = commands.panel_requests(shell)["start"]({"options": values})
    try:
        assert answer["cluster"] == "formed"
        assert answer["variable"] == "taken_2"
        assert shell.user_ns["taken"] == 3
        assert answer["line"] == (
            "%tfd_cluster start --data-workers 1 --launcher fake --name formed --output taken"
        )
        assert not answer["reused"]
        assert commands.panel_requests(shell)["start"]({"options": values})["reused"]
    finally:
        shell.user_ns["taken_2"].stop()


@pytest.mark.parametrize(
    "options",
    [
        None,
        [],
        {"no_option": 1},
        {"data_workers": [1]},
        {"data_workers": "three"},
        {"launcher": "nowhere"},
        {"output": "not a name"},
        {"name": "x" * 300},
        {"time_limit": "soon"},
    ],
)
def test_invalid_form_is_refused(options: Any) -> None:
    with pytest.raises(errors.TfdError):
        commands.panel_requests(Shell())["start"]({"options": options})


# Presence


def test_presence_moves_to_the_next_coordinator() -> None:
    presence, first, second = ControllerPresence(), FakeCoordinator(), FakeCoordinator()
    cluster: Any = FakeProxy("shown")
    viewed, running = [frozenset({"shown", "gone"})], {"shown": cluster}
    presence.renew(running, viewed)
    cluster.coordinator = first
    presence.renew(running, viewed)
    presence.renew(running, viewed)
    assert first.present == 1
    cluster.coordinator = second
    presence.renew(running, viewed)
    assert (first.present, second.present) == (0, 1)
    presence.renew(running, [frozenset()])
    assert second.present == 0


@pytest.mark.slow
def test_open_widget_counts_as_present(proxies: dict[str, FakeProxy]) -> None:
    proxies["one"].coordinator = fake_coordinator = FakeCoordinator()
    with browser(cluster=proxies["one"]) as widget:
        widget.send("hello")
        until(lambda: fake_coordinator.present == 1)
        widget.send("bye")
        until(lambda: fake_coordinator.present == 0)
        widget.send("hello")
        until(lambda: fake_coordinator.present == 1)
    until(lambda: fake_coordinator.present == 0)


def test_panel_that_shows_closures_counts_as_present(
    panel: Browser, proxies: dict[str, FakeProxy]
) -> None:
    proxies["one"].coordinator = fake_coordinator = FakeCoordinator()
    panel.send("hello")
    until(lambda: panel.tree)
    panel.send("subscribe", clusters=["missing"])
    assert panel.request("list")["value"]
    assert fake_coordinator.present == 0
    panel.send("subscribe", clusters=["one"])
    until(lambda: fake_coordinator.present == 1)


# Both sides


def test_front_end_and_package_share_version_and_protocol() -> None:
    root = Path(__file__).parents[3]
    package = json.loads((root / "labextension" / "package.json").read_text())
    locked = json.loads((root / "labextension" / "package-lock.json").read_text())
    project = (root / "pyproject.toml").read_text()
    assert package["version"] == locked["version"] == tfd_notebook.__version__
    assert f'version = "{tfd_notebook.__version__}"' in project
    protocol = (root / "labextension" / "src" / "shared" / "protocol.ts").read_text()
    assert f"export const PROTOCOL = {bus.PROTOCOL};" in protocol
    states = re.search(r"CLOSURE_STATES = \[(.*?)\]", protocol, re.DOTALL)
    assert states is not None
    assert tuple(re.findall(r"'(\w+)'", states[1])) == STATES


def test_lockfile_has_no_download_urls() -> None:
    root = Path(__file__).parents[3]
    assert '"resolved"' not in (root / "labextension" / "package-lock.json").read_text()
