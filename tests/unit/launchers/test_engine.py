"""Hosts that an engine starts: waiting, a minimum of hosts, errors and stops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import LaunchError, StartTimeout
from tfd_notebook.launchers import engine
from tfd_notebook.launchers.engine import Engine, EngineLauncher, HostState, Start
from tfd_notebook.launchers.remote import RemoteHost
from tfd_notebook.model.events import Event, Notice, TaskChanged
from tfd_notebook.model.spec import ClusterConfig, Policy, Role

CONFIG = ClusterConfig(
    "mine",
    launcher="simulated",
    counts={Role.DISPATCHER: 1, Role.DATA_WORKER: 2},
    policy=Policy(start_timeout=30.0),
)
Q = "no node is free"
QUEUED = HostState("queued", Q, "wait")
STARTING = HostState("starting", "the image is pulled")
RUNNING = HostState("running")
ENDED = HostState("ended", "the job was cancelled", "start it again")


class Host(RemoteHost):
    closed = False

    def connect(self, agent: str, start: bool) -> Any:
        raise OSError("not a real host")

    def close(self) -> None:
        self.closed = True


class Simulated(Engine[Host]):
    """Two hosts in one group. Each poll takes one second of the clock, and the last one stays."""

    kind = "machines"

    def __init__(self, *polls: Sequence[HostState], minimum: int | None = None) -> None:
        self.events: list[Event] = []
        super().__init__(CONFIG, self.events.append, minimum)
        self.groups = [[Host("one"), Host("two")]]
        self.polls = list(polls)
        self.calls: list[str] = []
        self.now = 0.0
        self.output = b""

    def submit(self) -> None:
        self.calls.append("submit")

    def states(self, hosts: Sequence[Host]) -> Mapping[Host, HostState]:
        self.now += 1.0
        self.changed.set()  # no waiting
        poll = self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]
        return dict(zip(hosts, poll, strict=True))

    def state(self, host: Host) -> HostState:
        return self.states(self.hosts)[host]

    def runs(self, host: Host, role: str, index: int) -> bool:
        return host is self.groups[0][index]

    def complete(self) -> None:
        self.calls.append("complete")

    def cancel(self) -> None:
        self.calls.append("cancel")

    def log(self, host: Host) -> bytes:
        return self.output

    def shown(self) -> list[tuple[str, str]]:
        changes = [event for event in self.events if isinstance(event, TaskChanged)]
        return [(event.task, event.reason) for event in changes]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[[Simulated], Sequence[Host]]:
    def begin(simulated: Simulated) -> Sequence[Host]:
        clock = SimpleNamespace(monotonic=lambda: simulated.now)
        monkeypatch.setattr(engine, "time", clock)
        try:
            return simulated.start()
        finally:
            simulated.stop()

    return begin


def test_reasons_are_shown_once_in_the_rows_of_their_tasks(begin: Any) -> None:
    simulated = Simulated(
        (QUEUED, STARTING), (QUEUED, STARTING), (STARTING, RUNNING), (RUNNING, RUNNING)
    )
    assert [host.label for host in begin(simulated)] == ["one", "two"]
    assert simulated.shown() == [
        ("dispatcher:0", QUEUED.reason),
        ("data_worker:0", QUEUED.reason),
        ("data_worker:1", STARTING.reason),
        ("dispatcher:0", STARTING.reason),
        ("data_worker:0", STARTING.reason),
    ]
    assert simulated.calls == ["submit", "complete", "cancel"]
    assert simulated.now == 4.0


@pytest.mark.parametrize(("settle", "seconds"), [(0.0, 2.0), (5.0, 7.0)])
def test_minimum_of_hosts_is_enough(begin: Any, settle: float, seconds: float) -> None:
    simulated = Simulated((STARTING, QUEUED), (RUNNING, QUEUED), minimum=1)
    simulated.settle_seconds = settle  # type: ignore[misc]
    one, two = simulated.hosts
    assert begin(simulated) == [one]
    assert two.closed
    assert not one.closed
    assert simulated.now == seconds
    (notice,) = [event for event in simulated.events if isinstance(event, Notice)]
    assert notice.what == "the cluster has 1 of 2 machines: no node is free"


def test_change_of_a_queued_host_is_awaited_again(begin: Any) -> None:
    polls = [(RUNNING, QUEUED)] * 4 + [(RUNNING, STARTING)] + [(RUNNING, QUEUED)] * 5
    simulated = Simulated(*polls, (RUNNING, RUNNING), minimum=1)
    simulated.settle_seconds = 5.0  # type: ignore[misc]
    assert len(begin(simulated)) == 2


def test_host_that_is_starting_is_awaited(begin: Any) -> None:
    simulated = Simulated(*[(RUNNING, STARTING)] * 20, (RUNNING, RUNNING), minimum=1)
    assert len(begin(simulated)) == 2


def test_each_group_needs_its_minimum(begin: Any) -> None:
    simulated = Simulated((RUNNING, QUEUED), minimum=1)
    simulated.groups = [[host] for host in simulated.hosts]
    simulated.polls = [(RUNNING, QUEUED)] * 10 + [(RUNNING, RUNNING)]
    simulated.runs = lambda *_: True  # type: ignore[method-assign]
    assert len(begin(simulated)) == 2


def test_timeout_has_the_reason_and_its_fix(begin: Any) -> None:
    simulated = Simulated((RUNNING, QUEUED))
    with pytest.raises(StartTimeout, match=r"not all machines started within 30 s: no node"):
        begin(simulated)
    assert simulated.calls == ["submit", "cancel"]
    with pytest.raises(StartTimeout, match=r"Policy\(start_timeout"):
        begin(Simulated((STARTING, STARTING)))


def test_end_of_a_host_has_its_output(begin: Any) -> None:
    simulated = Simulated((RUNNING, STARTING), (RUNNING, ENDED))
    simulated.output = b"first\n\nthe disk is broken\n"
    with pytest.raises(
        LaunchError, match=r"was cancelled; its output ends.*disk is broken"
    ) as caught:
        begin(simulated)
    assert caught.value.fix == ENDED.fix
    assert simulated.shown()[-1] == ("data_worker:1", ENDED.reason)
    simulated = Simulated((RUNNING, ENDED))
    simulated.output = stdio.HANDSHAKE.encode() + b"{\n"
    with pytest.raises(LaunchError, match="two sent an invalid handshake"):
        begin(simulated)


def test_last_connections_of_an_ended_host_may_still_arrive(begin: Any) -> None:
    simulated = Simulated(*[(RUNNING, ENDED)] * 8, (RUNNING, RUNNING))
    simulated.end_seconds = 8.0  # type: ignore[misc]
    assert len(begin(simulated)) == 2
    simulated = Simulated((RUNNING, HostState("ending", "it is ending")))
    simulated.end_seconds = 8.0  # type: ignore[misc]
    with pytest.raises(LaunchError, match="it is ending"):
        begin(simulated)
    assert simulated.now == 9.0


def test_stop_cancels_after_a_submission_in_progress() -> None:
    simulated = Simulated((RUNNING, RUNNING))
    submitting, go_on = threading.Event(), threading.Event()
    caught: list[BaseException] = []

    def submit() -> None:
        submitting.set()
        assert go_on.wait(60)
        simulated.calls.append("submit")

    def begin() -> None:
        try:
            simulated.start()
        except LaunchError as error:
            caught.append(error)

    simulated.submit = submit  # type: ignore[method-assign]
    simulated.interrupt = go_on.set  # type: ignore[method-assign]
    thread = threading.Thread(target=begin)
    thread.start()
    assert submitting.wait(60)
    simulated.stop()
    thread.join(60)
    assert "cluster 'mine' was stopped while it started" in str(caught[0])
    assert simulated.calls == ["submit", "cancel"]
    simulated.stop()
    assert simulated.calls == ["submit", "cancel"]


class Late(Simulated):
    """An engine whose missing hosts may join later: those of its job, or of another one."""

    def __init__(self, *polls: Sequence[HostState], replaces: bool = False) -> None:
        super().__init__((RUNNING, QUEUED), minimum=1)
        self.may_join = True
        self.replaces = replaces
        self.late_polls = list(polls)
        self.requested: list[Host] = []

    def later(self, missing: list[Host]) -> list[Host]:
        if not self.replaces:
            return missing
        self.requested.append(Host(f"late {len(self.requested)}"))
        return self.requested[-1:]

    def states(self, hosts: Sequence[Host]) -> Mapping[Host, HostState]:
        if "complete" not in self.calls:
            return super().states(hosts)
        self.changed.set()  # no waiting
        poll = self.late_polls.pop(0) if len(self.late_polls) > 1 else self.late_polls[0]
        return dict(zip(hosts, poll, strict=True))

    def notices(self) -> list[str]:
        return [event.what for event in self.events if isinstance(event, Notice)]


@pytest.fixture
def late() -> Iterator[Callable[..., tuple[Late, list[str], list[list[str]]]]]:
    """Return a function that starts an engine, and waits for its late hosts."""
    started: list[Late] = []

    def begin(
        *polls: Sequence[HostState], replaces: bool = False, error: LaunchError | None = None
    ) -> tuple[Late, list[str], list[list[str]]]:
        simulated = Late(*polls, replaces=replaces)
        started.append(simulated)
        assert [host.label for host in simulated.start()] == ["one"]
        assert simulated.notices() == [
            f"the cluster has 1 of 2 machines, and 1 may join later: {Q}"
        ]
        joined: list[str] = []
        shown: list[list[str]] = []

        def join(host: Host) -> bool:
            if error is not None:
                raise error
            joined.append(host.label)
            return True

        simulated.await_late(join, shown.append)
        return simulated, joined, shown

    yield begin
    for simulated in started:
        simulated.stop()


def test_late_host_joins_when_it_runs(late: Any) -> None:
    simulated, joined, shown = late((QUEUED,), (STARTING,), (RUNNING,))
    assert joined == ["two"]
    assert shown == [[QUEUED.reason], [STARTING.reason], []]
    assert simulated.notices()[1:] == ["two has joined the cluster"]
    assert [host.label for host in simulated.hosts] == ["one", "two"]
    assert not any(host.closed for host in simulated.hosts)
    assert simulated.calls == ["submit", "complete", "complete"]


@pytest.mark.parametrize("fails", [True, False], ids=["join", "start"])
def test_late_host_that_cannot_join_is_closed(late: Any, fails: bool) -> None:
    error = LaunchError("it has no TensorFlow") if fails else None
    simulated, joined, shown = late((RUNNING if fails else ENDED,), error=error)
    reason = "it has no TensorFlow" if fails else ENDED.reason
    assert not joined
    assert shown == [[reason]]  # for the rows of its tasks
    assert simulated.notices()[1:] == [f"two does not join the cluster: {reason}"]
    assert [host.label for host in simulated.hosts] == ["one"]


def test_missing_hosts_are_requested_again(late: Any) -> None:
    missing = HostState("missing", "the job gets no more")
    simulated, joined, shown = late((missing,), (QUEUED,), (RUNNING,), replaces=True)
    first, second = simulated.requested
    assert joined == [second.label]
    assert first.closed
    assert shown == [["the job gets no more"], [QUEUED.reason], []]


def test_end_of_the_cluster_closes_late_hosts() -> None:
    simulated = Late((QUEUED,))
    simulated.start()
    (late,) = simulated.late
    shown: list[list[str]] = []

    def show(reasons: list[str]) -> None:
        shown.append(reasons)
        simulated.close_late()

    simulated.await_late(lambda host: True, show)
    assert late.closed
    assert len(shown) == 1
    simulated.stop()
    assert simulated.calls == ["submit", "complete", "cancel"]


class Launcher(EngineLauncher):
    name = "simulated"
    summary = ""

    def start_hosts(self, start: Start) -> Sequence[RemoteHost]:
        start.opened.callback(self.closed.append, start)
        self.abort(start.config.name)
        start.check()
        raise AssertionError("the start was not stopped")

    def __init__(self) -> None:
        super().__init__({"size": 1})
        self.closed: list[Start] = []


def test_stopped_start_closes_what_it_has_opened() -> None:
    launcher = Launcher()
    assert launcher.options["size"] == 1
    for _ in range(2):
        with pytest.raises(LaunchError, match="was stopped"):
            launcher.connect(CONFIG, lambda event: None)
    one, two = launcher.closed
    assert one is not two
    assert one.stopped
    launcher.abort("mine")  # nothing starts
