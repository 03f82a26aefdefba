"""Supervision of a task in virtual time, in all orders of events.

Fake processes and probes replace real ones. A model predicts the state, the number of restarts and
the time of each start. The test compares them after each event.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests._virtual_time import InlineExecutor, VirtualTimeLoop
from tfd_notebook.agent.admin_policy import Limits
from tfd_notebook.agent.dataset_functions import Functions
from tfd_notebook.agent.memory import GroupHistory
from tfd_notebook.agent.processes import Process
from tfd_notebook.agent.task_supervisor import TaskSupervisor
from tfd_notebook.errors import LaunchError, TfdError, UsageError
from tfd_notebook.model.spec import Policy, Role, TaskSpec, TaskState
from tfd_notebook.net.probe import Probe, Prober

PLANNED, STARTING, READY, HUNG, RESTARTING, STOPPED, FAILED = (
    TaskState.PLANNED,
    TaskState.STARTING,
    TaskState.READY,
    TaskState.HUNG,
    TaskState.RESTARTING,
    TaskState.STOPPED,
    TaskState.FAILED,
)
#: The allowed transitions. A requested restart can follow another one, and so can a stop.
TRANSITIONS = {
    PLANNED: {STARTING, RESTARTING, STOPPED},
    STARTING: {READY, RESTARTING, FAILED, STOPPED},
    READY: {READY, HUNG, RESTARTING, FAILED, STOPPED},  # the reason may change
    HUNG: {READY, RESTARTING, FAILED, STOPPED},
    RESTARTING: {READY, RESTARTING, FAILED, STOPPED},
    FAILED: {RESTARTING, STOPPED},
    STOPPED: {STOPPED},
}
BACKOFF_SECONDS = (0.0, 0.5, 2.0, 5.0, 10.0)
STEADY_SECONDS = 60.0
#: The time in which the supervision waits for the exit of a process that reported an error.
REPORTED_SECONDS = 0.5
#: More than the longest interval of probes during a start.
PROBE_SECONDS = 0.21
POLICY = Policy(restarts=2, start_timeout=3.0, hang_seconds=1.0)


class FakeProcess(Process):
    """A process that replies to each request, and ends some time after it is killed."""

    def __init__(self, pid: int, error: TfdError | None, seconds_to_end: float) -> None:
        self.pid = pid
        self.failed = None
        self.ended = asyncio.get_running_loop().create_future()
        self.requests: list[str] = []
        self.closed = False
        self._error = error
        self.seconds_to_end = seconds_to_end

    async def request(self, method: str, timeout: float | None, **arguments: Any) -> Any:
        if self.ended.done():
            raise LaunchError("the process ended")
        self.requests.append(method)
        if method == "start" and self._error is not None:
            raise self._error
        return {"open_to": "loopback"}

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.ended.get_loop().call_later(self.seconds_to_end, self.end, int(number))

    def end(self, status: int) -> None:
        """End with a status as ``os.waitpid`` returns it."""
        if not self.ended.done():
            self.ended.set_result(status)

    async def close(self) -> None:
        self.closed = True


class FakeProber(Prober):
    """A prober that finds what the test chooses, at all addresses but the silent ones."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[str] = set()
        self.answers = True

    def probe(self, address: str, timeout: float = 1.0, expect: Any = None) -> Probe:
        alive = self.answers and address not in self.silent
        return Probe(address, "alive" if alive else "refused", expect, reason="" if alive else "x")


class FakeCluster:
    """The context of one supervised task, which records all that happens, with times."""

    name = "c"

    def __init__(self, directory: Path, policy: Policy, seconds_to_end: float = 0.0) -> None:
        self.directory, self.policy = directory, policy
        self.allow: list[str] = []
        self.functions = Functions()
        self.limits = Limits()
        self.prober = FakeProber()
        self.processes: list[FakeProcess] = []
        self.starts: list[float] = []
        self.states: list[TaskState] = []
        self.reasons: list[str] = []
        self.notices: list[str] = []
        #: Violations of invariants. The supervision would handle an exception instead.
        self.violations: list[str] = []
        #: The error with which each process replies to the request to start.
        self.reply: TfdError | None = None
        #: The error that each creation of a process raises.
        self.error: Exception | None = None
        self.seconds_to_start = 0.0
        self.seconds_to_end = seconds_to_end

    async def start_process(self, spec: TaskSpec, log: Path) -> Process:
        await asyncio.sleep(self.seconds_to_start)
        if self.error is not None:
            raise self.error
        if self.running:
            self.violations.append("a second process starts")
        process = FakeProcess(len(self.processes) + 1, self.reply, self.seconds_to_end)
        self.processes.append(process)
        self.starts.append(asyncio.get_running_loop().time())
        return process

    @property
    def running(self) -> list[FakeProcess]:
        return [process for process in self.processes if not process.ended.done()]

    def task_changed(self, task: TaskSupervisor, log: tuple[str, ...]) -> None:
        if self.states and task.state not in TRANSITIONS[self.states[-1]]:
            self.violations.append(f"{self.states[-1]} -> {task.state}")
        self.states.append(task.state)
        self.reasons.append(task.reason)

    def notice(
        self, severity: str, what: str, task: TaskSupervisor | None = None, fix: str | None = None
    ) -> None:
        self.notices.append(what)

    @contextlib.contextmanager
    def reported(self, operation: str, task: TaskSupervisor | None = None) -> Iterator[None]:
        yield


class Run:
    """A supervised task in virtual time."""

    def __init__(
        self,
        loop: VirtualTimeLoop,
        cluster: FakeCluster,
        role: Role = Role.WORKER,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.loop, self.cluster, self.began = loop, cluster, loop.time()
        self.settings = settings or {}

        async def create() -> TaskSupervisor:
            groups = GroupHistory(cluster.directory, cluster.directory)
            return TaskSupervisor(cluster, TaskSpec(role, 0), cluster.prober, groups)

        self.task = loop.run_until_complete(create())

    def at_once(self, *actions: Callable[[], object]) -> None:
        """Apply actions without a step of the event loop between them, then settle."""

        async def apply() -> None:
            for action in actions:
                result = action()
                if isinstance(result, Awaitable):
                    await result

        self.loop.run_until_complete(apply())
        self.loop.settle()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Stop the task, and check that nothing remains or starts later."""
        self.loop.run_until_complete(self.task.stop())
        if kind is not None:
            return
        assert self.task.state is STOPPED
        assert not self.cluster.violations
        starts = len(self.cluster.starts)
        assert not self.cluster.running
        assert all(process.closed for process in self.cluster.processes)
        assert not is_reserved(self.task.port)
        assert not asyncio.all_tasks(self.loop)
        self.advance(100.0)
        assert len(self.cluster.starts) == starts

    def start(self) -> None:
        self.at_once(lambda: self.task.start(self.settings))

    def crash(self, status: int = signal.SIGSEGV) -> None:
        for process in self.cluster.running:
            process.end(status)

    async def restart(self) -> None:
        await self.task.restart({})
        assert self.task.state in (PLANNED, RESTARTING)

    def advance(self, seconds: float) -> None:
        self.loop.advance(seconds)

    @property
    def starts(self) -> list[float]:
        """The times of the starts since the task was created."""
        return [start - self.began for start in self.cluster.starts]

    def check(self) -> None:
        """Check what holds at all times."""
        assert not self.cluster.violations
        assert self.task.restarts == self.cluster.states.count(RESTARTING)
        assert is_reserved(self.task.port)
        if self.task.state in (READY, HUNG):
            assert self.task.process in self.cluster.running
        if self.task.state is FAILED:
            assert not self.cluster.running


def is_reserved(port: int) -> bool:
    """Return True if a server without ``SO_REUSEPORT`` cannot use the port."""
    with socket.socket(socket.AF_INET6) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # despite old connections
        try:
            other.bind(("::", port))
        except OSError:
            return True
    return False


@pytest.fixture(scope="module")
def loop() -> Iterator[VirtualTimeLoop]:
    loop = VirtualTimeLoop()
    loop.set_default_executor(InlineExecutor())
    yield loop
    loop.close()


class Expected:
    """The model of a task whose processes start and end without delay."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.now = self.ready_at = 0.0
        self.state = STARTING
        self.crashes = self.restarts = 0
        self.runs = False
        #: Whether the probes of a process succeed, and its reply to the request to start.
        self.answers, self.replies = True, True
        self.starts: list[float] = []
        #: The next change that needs only time, and its time.
        self.next: tuple[float, Callable[[], None]] | None = None
        self.start()

    def start(self) -> None:
        self.runs, self.next = True, None
        self.starts.append(self.now)
        self.probed = self.replies
        if not self.replies:
            self.next = self.now + REPORTED_SECONDS, self.fail
        elif self.answers:
            self.be_ready()
        else:
            self.next = self.now + self.policy.start_timeout, self.crash

    def be_ready(self) -> None:
        self.state, self.ready_at, self.next = READY, self.now, None

    def crash(self) -> None:
        if self.state in (READY, HUNG) and self.now - self.ready_at > STEADY_SECONDS:
            self.crashes = 0
        self.crashes += 1
        if self.crashes > self.policy.restarts:
            self.fail()
            return
        self.runs, self.state = False, RESTARTING
        self.restarts += 1
        self.next = self.now + BACKOFF_SECONDS[min(self.crashes, 5) - 1], self.start
        self.advance(0.0)

    def fail(self) -> None:
        self.runs, self.state, self.next = False, FAILED, None

    def restart(self) -> None:
        self.restarts += 1
        self.crashes, self.state = 0, RESTARTING
        self.start()

    def toggle(self) -> None:
        self.answers = not self.answers
        if self.answers and self.runs and self.probed and self.state in (STARTING, RESTARTING):
            self.be_ready()
        self.advance(PROBE_SECONDS)

    def hang(self) -> None:
        self.advance(1.1)
        self.state = HUNG
        if self.policy.on_hang == "restart":
            self.crash()

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.next is not None and self.next[0] <= end:
            self.now, change = self.next
            change()
        self.now = end


#: For each event: when it can occur, its effect on the model and on the task.
Event = tuple[Callable[[Expected], bool], Callable[[Expected], None], Callable[[Run], None]]


def _toggle(run: Run) -> None:
    run.cluster.prober.answers ^= True
    run.advance(PROBE_SECONDS)


def _hang(run: Run) -> None:
    run.at_once(lambda: run.task.record_probe("no reply"))
    run.advance(1.1)
    run.at_once(lambda: run.task.record_probe("no reply"))


def _invalidate(run: Run) -> None:
    run.cluster.reply = None if run.cluster.reply else UsageError("invalid setting")


def _set_replies(expected: Expected) -> None:
    expected.replies = not expected.replies


def _passes(seconds: float) -> Event:
    return lambda _: True, lambda e: e.advance(seconds), lambda run: run.advance(seconds)


EVENTS: dict[str, Event] = {
    "crash": (lambda e: e.runs, Expected.crash, lambda run: run.at_once(run.crash)),
    "restart": (lambda _: True, Expected.restart, lambda run: run.at_once(run.restart)),
    "toggle": (lambda _: True, Expected.toggle, _toggle),
    "invalid": (lambda _: True, _set_replies, _invalidate),
    "hang": (lambda e: e.state is READY, Expected.hang, _hang),
    "respond": (
        lambda e: e.state is HUNG,
        lambda e: setattr(e, "state", READY),
        lambda run: run.at_once(lambda: run.task.record_probe("")),
    ),
    "third": _passes(0.33),
    "eleven": _passes(11.0),
    "minute": _passes(61.0),
}


def is_possible(order: tuple[str, ...], policy: Policy) -> bool:
    """Return True if each event can occur after those before it."""
    expected = Expected(policy)
    for name in order:
        possible, predict, _ = EVENTS[name]
        if not possible(expected):
            return False
        predict(expected)
    return True


@pytest.mark.parametrize("on_hang", ["warn", "restart"])
@pytest.mark.parametrize("first", list(itertools.product(EVENTS, repeat=2)), ids="-".join)
def test_states_follow_the_model_in_each_order(
    loop: VirtualTimeLoop, tmp_path: Path, first: tuple[str, ...], on_hang: str
) -> None:
    policy = Policy(**{**vars(POLICY), "on_hang": on_hang})
    for rest in itertools.product(EVENTS, repeat=2):
        order = (*first, *rest)
        if not is_possible(order, policy) or (on_hang == "restart" and "hang" not in order):
            continue
        expected = Expected(policy)
        with Run(loop, FakeCluster(tmp_path, policy)) as run:
            run.start()
            for position, name in enumerate(order):
                _, predict, apply = EVENTS[name]
                predict(expected)
                apply(run)
                done = order[: position + 1]
                actual = (run.task.state, run.task.restarts, bool(run.cluster.running))
                assert actual == (expected.state, expected.restarts, expected.runs), done
                assert run.starts == pytest.approx(expected.starts), done
                run.check()


#: Events that leave a slow process in each phase of its start or end.
SLOW_EVENTS: dict[str, Callable[[Run], None]] = {
    "crash": lambda run: run.at_once(run.crash),
    "restart": lambda run: run.at_once(run.restart),
    "toggle": _toggle,
    "invalid": _invalidate,
    "tenth": lambda run: run.advance(0.1),
    "third": lambda run: run.advance(0.33),
    "three": lambda run: run.advance(3.0),
}


@pytest.mark.parametrize("first", list(itertools.product(SLOW_EVENTS, repeat=2)), ids="-".join)
def test_slow_processes_do_not_overlap_and_leave_nothing(
    loop: VirtualTimeLoop, tmp_path: Path, first: tuple[str, ...]
) -> None:
    """The task is stopped at the end of each order, in the middle of what it does."""
    for rest in itertools.chain([()], *(itertools.product(SLOW_EVENTS, repeat=n) for n in (1, 2))):
        cluster = FakeCluster(tmp_path, POLICY, seconds_to_end=0.2)
        cluster.seconds_to_start = 0.15
        with Run(loop, cluster) as run:
            run.start()
            for name in (*first, *rest):
                SLOW_EVENTS[name](run)
                run.check()


def bring_to(run: Run, state: str) -> None:
    """Start the task and bring it to a state; ``back-off`` is the pause after the second crash."""
    if state == "planned":
        return
    run.cluster.prober.answers = state != "starting"
    run.start()
    if state == "hung":
        _hang(run)
    for _ in range({"back-off": 2, "failed": 3}.get(state, 0)):
        run.at_once(run.crash)
        run.advance(0.6 if state == "failed" else 0.0)
    expected = {"back-off": RESTARTING}.get(state)
    assert run.task.state is (expected or TaskState(state))


STATES = ["starting", "ready", "hung", "back-off", "failed"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("others", [(), ("crash",), ("restart",), ("silence",)], ids=str)
@pytest.mark.parametrize("position", [0, 1])
def test_requested_restart_starts_one_process_at_once(
    loop: VirtualTimeLoop, tmp_path: Path, state: str, others: tuple[str, ...], position: int
) -> None:
    """A crash at the same moment, before or after the request, does not count."""
    policy = Policy(**{**vars(POLICY), "on_hang": "restart"} if state != "hung" else vars(POLICY))
    with Run(loop, FakeCluster(tmp_path, policy)) as run:
        actions: dict[str, Callable[[], object]] = {
            "crash": run.crash,
            "restart": run.restart,
            "silence": lambda: run.task.record_probe("no reply"),
        }
        bring_to(run, state)
        run.cluster.prober.answers = True
        starts, restarts = len(run.starts), run.task.restarts
        order = list(others)
        order.insert(position, "restart")
        run.at_once(*(actions[name] for name in order))
        assert (run.task.state, len(run.starts)) == (READY, starts + 1)
        assert run.starts[-1] == loop.time() - run.began
        assert run.task.restarts == restarts + order.count("restart")
        run.check()
        # The count of crashes starts again.
        for state_after in (READY, RESTARTING, FAILED):
            run.at_once(run.crash)
            assert run.task.state is state_after
            run.advance(0.6)


def test_restart_of_a_planned_task_has_no_effect(loop: VirtualTimeLoop, tmp_path: Path) -> None:
    with Run(loop, FakeCluster(tmp_path, POLICY)) as run:
        run.at_once(run.restart)
        assert (run.task.state, run.task.restarts, run.starts) == (PLANNED, 0, [])
        run.start()
        assert (run.task.state, run.task.restarts) == (READY, 0)


@pytest.mark.parametrize("state", ["planned", *STATES])
@pytest.mark.parametrize("before", ["nothing", "crash", "restart"])
@pytest.mark.parametrize("seconds_to_end", [0.0, 0.4, 3.0])
def test_stop_ends_the_process_and_releases_the_port(
    loop: VirtualTimeLoop, tmp_path: Path, state: str, before: str, seconds_to_end: float
) -> None:
    with Run(loop, FakeCluster(tmp_path, POLICY)) as run:
        bring_to(run, state)
        for process in run.cluster.processes:
            process.seconds_to_end = seconds_to_end
        actions = {"nothing": (), "crash": (run.crash,), "restart": (run.restart,)}[before]
        run.at_once(*actions, run.task.stop)
        assert run.cluster.states[-1] is STOPPED


def test_stop_during_a_slow_end_waits_for_it(loop: VirtualTimeLoop, tmp_path: Path) -> None:
    """The start timeout has killed the process, which takes a while to end."""
    cluster = FakeCluster(tmp_path, POLICY, seconds_to_end=2.0)
    cluster.prober.answers = False
    with Run(loop, cluster) as run:
        run.start()
        run.advance(POLICY.start_timeout + 1.0)
        assert cluster.running
        run.at_once(run.task.stop)
        assert loop.time() - run.began == POLICY.start_timeout + 2.0
        assert cluster.processes[0].closed


def test_unkillable_process_does_not_block_a_stop(loop: VirtualTimeLoop, tmp_path: Path) -> None:
    with Run(loop, FakeCluster(tmp_path, POLICY, seconds_to_end=50.0)) as run:
        run.start()
        run.at_once(run.task.stop)
        assert (run.task.state, len(run.cluster.running)) == (STOPPED, 1)
        run.advance(60.0)


def test_pauses_between_restarts_grow(loop: VirtualTimeLoop, tmp_path: Path) -> None:
    with Run(loop, FakeCluster(tmp_path, Policy(restarts=7))) as run:
        run.start()
        for _ in range(8):
            run.at_once(run.crash)
            run.advance(10.5)
        began = [start - 10.5 * count for count, start in enumerate(run.starts)]
        # Each crash but the first occurs 10.5 s after the previous one.
        pauses = [start + 10.5 for start in began[1:]]
        assert pauses == pytest.approx([*BACKOFF_SECONDS, 10.0, 10.0])
        assert run.task.state is FAILED
        assert run.task.reason == "killed by signal 11 (SIGSEGV), 8 times in a row"
        assert run.task.restarts == 7


@pytest.mark.parametrize(("ready_for", "pause"), [(59.9, 2.0), (60.1, 0.0)])
def test_crashes_are_forgotten_after_a_minute(
    loop: VirtualTimeLoop, tmp_path: Path, ready_for: float, pause: float
) -> None:
    with Run(loop, FakeCluster(tmp_path, Policy(restarts=7))) as run:
        run.start()
        for _ in range(2):
            run.at_once(run.crash)
            run.advance(0.5)
        run.advance(ready_for)
        run.at_once(run.crash)
        run.advance(5.0)
        assert run.starts[-1] == pytest.approx(0.5 + 0.5 + ready_for + pause)


@pytest.mark.parametrize("restarts", [0, 1, 4])
def test_start_timeout_counts_as_a_crash(
    loop: VirtualTimeLoop, tmp_path: Path, restarts: int
) -> None:
    with Run(loop, FakeCluster(tmp_path, Policy(restarts=restarts, start_timeout=3.0))) as run:
        run.cluster.prober.answers = False
        run.start()
        run.advance(2.9)
        assert run.task.state is STARTING
        run.advance(100.0)
        assert run.task.state is FAILED
        assert run.task.reason.startswith("not ready within 3 s")
        assert len(run.starts) == restarts + 1
        assert run.cluster.states.count(RESTARTING) == restarts


@pytest.mark.parametrize("on_hang", ["warn", "restart"])
def test_silence_is_a_hang_after_the_limit(
    loop: VirtualTimeLoop, tmp_path: Path, on_hang: str
) -> None:
    policy = Policy(on_hang=on_hang, hang_seconds=30.0)
    with Run(loop, FakeCluster(tmp_path, policy)) as run:

        def probe_for(seconds: int, silence: str, late: bool = False) -> list[TaskState]:
            before = len(run.cluster.states)
            for _ in range(seconds):
                run.advance(1.0)
                run.at_once(lambda: run.task.record_probe(silence, late))
            return run.cluster.states[before:]

        run.start()
        assert not probe_for(6, "no reply")
        assert probe_for(25, "no reply") == [READY]
        assert run.task.reason == "no reply for over 5 s: no reply"
        assert probe_for(2, "") == [READY]
        assert not run.task.reason
        assert not probe_for(5, "no reply")
        assert not probe_for(1, "")
        assert not probe_for(40, "no reply", late=True)
        if on_hang == "warn":
            assert probe_for(60, "no reply") == [READY, HUNG]
            assert run.task.reason == "no reply for 31 s: no reply"
            assert probe_for(3, "") == [READY]
            assert run.starts == [0.0]
        else:
            assert probe_for(31, "no reply") == [READY, HUNG, RESTARTING, READY]
            assert run.cluster.reasons[-2] == "killed by signal 9 (SIGKILL)"
            assert not probe_for(6, "no reply")


@pytest.mark.parametrize("created", [True, False])
def test_reported_error_is_not_repeated(
    loop: VirtualTimeLoop, tmp_path: Path, created: bool
) -> None:
    error = UsageError("invalid preload 'nothing'")
    with Run(loop, FakeCluster(tmp_path, POLICY)) as run:
        run.cluster.reply, run.cluster.error = (error, None) if created else (None, error)
        run.start()
        run.advance(100.0)
        assert run.cluster.states == [STARTING, FAILED]
        assert "invalid preload 'nothing'" in run.task.reason
        assert len(run.starts) == created
        run.cluster.reply = run.cluster.error = None
        run.at_once(run.restart)
        assert run.task.state is READY


def test_restart_that_creates_no_process_fails_once(loop: VirtualTimeLoop, tmp_path: Path) -> None:
    with Run(loop, FakeCluster(tmp_path, POLICY)) as run:
        run.cluster.error = LaunchError("the fork server ended")
        run.cluster.seconds_to_start = 1.0
        run.start()
        run.advance(10.0)
        run.at_once(run.restart)
        run.advance(100.0)
        assert run.cluster.states == [STARTING, FAILED, RESTARTING, FAILED]


def test_exception_in_the_supervision_counts_as_a_crash(
    loop: VirtualTimeLoop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(loop, FakeCluster(tmp_path, POLICY)) as run:
        run.cluster.error = OSError("no descriptors")
        run.start()
        run.advance(100.0)
        assert run.cluster.states == [STARTING, RESTARTING, RESTARTING, FAILED]
        reason = "its supervision failed: OSError: no descriptors"
        assert set(run.cluster.reasons[1:3]) == {reason}
        assert "OSError: no descriptors" in capsys.readouterr().err


def limited_memory(directory: Path) -> Limits:
    path = directory / "policy.toml"
    path.write_text("memory_gb = 1.0\n")
    return Limits(memory_gb=1.0, path=path)


def test_too_much_memory_ends_the_process(loop: VirtualTimeLoop, tmp_path: Path) -> None:
    with Run(loop, FakeCluster(tmp_path, POLICY)) as run:
        run.cluster.limits = limited_memory(tmp_path)
        run.start()
        run.at_once(lambda: run.task.limit_memory(999.0))
        assert run.starts == [0.0]
        run.at_once(lambda: run.task.limit_memory(1500.0))
        assert "it used 1.50 GB of memory" in run.cluster.reasons[-2]
        assert (run.task.state, run.task.restarts) == (READY, 1)
        run.at_once(run.crash)
        assert run.task.reason == "killed by signal 11 (SIGSEGV)"


def test_removed_task_starts_again_without_its_history(
    loop: VirtualTimeLoop, tmp_path: Path
) -> None:
    with Run(loop, FakeCluster(tmp_path, POLICY)) as run:
        run.cluster.limits = limited_memory(tmp_path)
        run.start()
        run.at_once(run.crash)
        run.at_once(lambda: run.task.limit_memory(1500.0), run.task.remove)
        assert (run.task.state, run.cluster.running) == (STOPPED, [])
        assert is_reserved(run.task.port)
        run.cluster.states.clear()
        run.task.reset(run.task.spec)
        run.start()
        assert (run.task.state, run.task.restarts) == (READY, 0)
        run.at_once(run.crash)
        assert run.cluster.reasons[-2] == "killed by signal 11 (SIGSEGV)"
        assert run.task.state is READY


def test_data_worker_waits_for_its_dispatcher(loop: VirtualTimeLoop, tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, POLICY)
    cluster.prober.silent.add("localhost:1")
    settings = {"dispatcher_address": "localhost:1"}
    with Run(loop, cluster, Role.DATA_WORKER, settings) as run:
        run.start()
        run.at_once(run.restart)
        run.advance(1.0)
        assert (run.task.state, run.starts) == (RESTARTING, [])
        cluster.prober.silent.clear()
        run.advance(PROBE_SECONDS)
        assert (run.task.state, len(run.starts)) == (READY, 1)
        # The process satisfies the request that was made before it existed.
        run.at_once(run.crash)
        assert run.cluster.states == [STARTING, RESTARTING, READY, RESTARTING, READY]


def test_functions_added_during_a_start_are_installed(
    loop: VirtualTimeLoop, tmp_path: Path
) -> None:
    cluster = FakeCluster(tmp_path, POLICY)
    cluster.prober.answers = False
    cluster.functions.add(["f"], b"1")
    with Run(loop, cluster, Role.DATA_WORKER) as run:
        run.start()
        cluster.functions.add(["g"], b"2")
        cluster.prober.answers = True
        run.advance(PROBE_SECONDS)
        assert cluster.processes[0].requests == ["install", "start", "install"]
        assert run.task.state is READY


@pytest.mark.parametrize("role", [Role.DISPATCHER, Role.DATA_WORKER], ids=str)
def test_failed_task_of_the_data_service_answers_with_an_error(
    loop: VirtualTimeLoop, tmp_path: Path, role: Role
) -> None:
    with Run(loop, FakeCluster(tmp_path, Policy(restarts=0)), role) as run:
        run.start()
        run.at_once(run.crash)
        assert run.task.state is FAILED
        prober = Prober()
        assert (
            "has failed: killed by signal 11" in prober.probe(run.task.address, timeout=60.0).reason
        )
        run.at_once(run.restart)
        assert run.task.state is READY
        assert prober.probe(run.task.address, timeout=60.0).state == "refused"
        run.at_once(run.crash)
        assert prober.probe(run.task.address, timeout=60.0).state == "foreign"
        run.at_once(run.task.stop)
        assert prober.probe(run.task.address, timeout=60.0).state == "refused"
        prober.close()
