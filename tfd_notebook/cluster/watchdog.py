"""Periodic checks of a running cluster: time limit, journal size and stuck consumers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from tfd_notebook.agent import work_dir as agent_work_dir
from tfd_notebook.cluster.monitor import Monitor
from tfd_notebook.cluster.task_manager import TaskManager
from tfd_notebook.data.bottleneck.advice import missing_consumers
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.errors import TfdError
from tfd_notebook.model.events import ExpiryChanged, JournalMeasured
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.net.probe import Probe, probe_many

_JOURNAL_EVERY_SECONDS = 5.0
#: Size of a journal above which a notice and the doctor report it.
JOURNAL_WARN_BYTES = 1_000_000_000
#: The next step. TensorFlow only appends to a journal, and a restart of the dispatcher reads it.
JOURNAL_FIX = (
    'stop the cluster and start it again, which begins an empty journal. With mode "dynamic" each '
    "element of the source is one record: make the source coarser (files, batches), or use "
    "Service(fault_tolerant=False)"
)
#: Seconds after which a consumer's wait causes a probe of the service, and those between probes.
_PROBE_AFTER_SECONDS, _PROBE_EVERY_SECONDS = 1.0, 2.0
#: Timeouts of a task's probes. A task on a busy host may miss the first one.
_PROBE_SECONDS = (1.0, 1.5)
#: Seconds of a wait after which a notice names missing consumers, or a Python function.
_ROUND_SECONDS = 4.0
#: Seconds after which a Python function is named as the reason of a wait.
_BLOCKED_SECONDS = 1.0
_SERVICE_ROLES = (Role.DISPATCHER, Role.DATA_WORKER)


class ProbeTasks(Protocol):
    """Probes addresses, and returns the results in the same order."""

    def __call__(self, addresses: Iterable[str], timeout: float) -> tuple[Probe, ...]: ...


def _start_thread(call: Callable[[], None], name: str) -> None:
    threading.Thread(target=call, name=name, daemon=True).start()


class Watchdog:
    """Checks of a running cluster. The monitor's thread calls it, see `Monitor.start`.

    Parameters
    ----------
    task_manager : TaskManager
    monitor : Monitor
    consumers : Consumers
    hang_seconds : float
        A consumer that waits longer than this for data causes a notice.
    time_limit_notice : float
        Seconds before the time limit at which a notice is published.
    end : callable
        Ends the cluster. Takes its final state. It is called once.
    clock : callable
        Returns the time in seconds. Default `time.monotonic`.
    start_thread : callable
        Takes a function that may block, and the name of the thread that calls it.
    probe : callable
        Probes addresses. Default `tfd_notebook.net.probe.probe_many`.
    """

    def __init__(
        self,
        task_manager: TaskManager,
        monitor: Monitor,
        consumers: Consumers,
        hang_seconds: float,
        time_limit_notice: float,
        end: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        start_thread: Callable[[Callable[[], None], str], None] = _start_thread,
        probe: ProbeTasks = probe_many,
    ) -> None:
        self._task_manager = task_manager
        self._monitor = monitor
        self._consumers = consumers
        self._hang_seconds = hang_seconds
        self._end = end
        self._clock = clock
        self._start_thread = start_thread
        self._probe_many = probe
        self._is_ending = False
        self._time_limit_notice = time_limit_notice
        self._has_notified = False
        self._journal_due = 0.0
        self._measures_journal = False
        #: Consumers that wait long: for `_ROUND_SECONDS`, and for `hang_seconds`.
        self._incomplete: set[str] = set()
        #: A slow function causes one notice, not one for each element.
        self._reported_functions: set[tuple[str, str]] = set()
        self._stuck: set[str] = set()
        self._probe_due = 0.0
        self._is_probing = False
        #: Tasks that did not answer, and were ready then, with their processes.
        self._silent: list[tuple[str, int | None]] = []

    def __call__(self, stopped: str = "") -> None:
        if stopped:
            self._record_interruption(stopped)
        if self._monitor.expired:
            reason = self._monitor.expiry_reason
            self._monitor.apply(ExpiryChanged(None))
            self._monitor.notice("warning", f"{reason}: stopping the cluster")
            self._end_in_thread("stopped")
        self._notify_of_time_limit()
        if self._monitor.state == "lost":
            # Consumers that still read would wait indefinitely.
            self._end_in_thread("lost")
        elif self._monitor.end_reason:
            self._end_in_thread("stopped")
        self._check_journal()
        self._probe_for_waiting_consumers()
        self._incomplete = self._report_waits(self._incomplete, _ROUND_SECONDS, self._report_cause)
        self._stuck = self._report_waits(self._stuck, self._hang_seconds, self._report_stuck)

    def _record_interruption(self, task: str) -> None:
        """Record in the journal's open iterations that a task of the service has stopped."""
        with contextlib.suppress(TfdError):  # The host may be lost.
            if (journal := self._task_manager.journal) is not None:
                journal.interrupt(task)

    def _notify_of_time_limit(self) -> None:
        """Publish a notice some time before the cluster ends at its time limit, once."""
        left = self._monitor.seconds_left
        if left is not None and left <= self._time_limit_notice and not self._has_notified:
            self._has_notified = True
            self._monitor.notice(
                "warning",
                f"the cluster ends in {left / 60:.0f} min, at its time limit",
                fix='save your work; tfd.training_loop(..., on_time_limit="checkpoint") does',
            )

    def _end_in_thread(self, state: str) -> None:
        """End the cluster in a new thread, because ending joins the monitor's thread."""
        if not self._is_ending:
            self._is_ending = True
            self._start_thread(partial(self._end, state), "tfd-watchdog-end")

    def _check_journal(self) -> None:
        work_dir = self._task_manager.work_dir
        if work_dir is None or self._measures_journal or self._clock() < self._journal_due:
            return
        self._journal_due = self._clock() + _JOURNAL_EVERY_SECONDS
        self._measures_journal = True
        if self._task_manager.on_this_host and not agent_work_dir.is_url(work_dir):
            self._measure_journal(work_dir)
        else:
            # A remote host or file system may respond slowly, and this thread monitors all tasks.
            self._start_thread(partial(self._measure_journal, work_dir), "tfd-journal")

    def _measure_journal(self, work_dir: str) -> None:
        try:
            size = self._task_manager.journal_size()
        except (OSError, TfdError):  # the directory is removed when the cluster stops
            size = None
        finally:
            self._measures_journal = False
        if size is None:
            return
        before = self._monitor.journal_bytes or 0
        self._monitor.apply(JournalMeasured(size))
        if before <= JOURNAL_WARN_BYTES < size:
            self._monitor.notice(
                "warning",
                f"the dispatcher's journal in {work_dir} is {size / 1e9:.1f} GB",
                fix=JOURNAL_FIX,
            )

    def _probe_for_waiting_consumers(self) -> None:
        """Probe the service while a consumer waits for data, long before a task counts as hung."""
        if self._is_probing or self._clock() < self._probe_due:
            return
        waiting = self._consumers.stuck(_PROBE_AFTER_SECONDS)
        if waiting and not self._task_manager.in_process:
            self._is_probing = True
            self._start_thread(partial(self._probe_service, waiting), "tfd-watchdog-probe")

    def _probe_service(self, waiting: tuple[str, ...]) -> None:
        try:
            rows = [row for row in self._monitor.tasks() if row.role in _SERVICE_ROLES]
            reasons = self._why_silent(rows)
            # Tasks that have ended since then have other notices.
            now = {row.task: (row.state, row.pid) for row in self._monitor.rows()}
            silent = [
                (row.task, row.pid)
                for row in rows
                if row.task in reasons and now.get(row.task) == (row.state, row.pid)
            ]
            names = ", ".join(map(repr, waiting))
            for task, _ in (each for each in silent if each not in self._silent):
                self._monitor.notice(
                    "warning",
                    f"does not answer ({reasons[task]}), while {names} wait"
                    f"{'s' if len(waiting) == 1 else ''} for data",
                    task=task,
                    fix="if it does not continue, "
                    + self._monitor.config.restart_step(task, reasons[task]),
                )
            self._silent = silent
        finally:
            self._probe_due = self._clock() + _PROBE_EVERY_SECONDS
            self._is_probing = False

    def _why_silent(self, rows: Iterable[TaskRow]) -> dict[str, str]:
        """Return, for each ready task that does not answer probes, the reason."""
        silent = {row.task: row.address for row in rows if row.state is TaskState.READY}
        reasons: dict[str, str] = {}
        for timeout in _PROBE_SECONDS:
            results = self._probe_many(silent.values(), timeout=timeout)
            answers = zip(silent, results, strict=True)
            reasons = {task: result.reason for task, result in answers if not result.alive}
            silent = {task: silent[task] for task in reasons}
        return reasons

    def _report_waits(
        self, reported: set[str], seconds: float, report: Callable[[str], None]
    ) -> set[str]:
        """Call `report` for each consumer that waits `seconds` for data, once per wait."""
        waiting = set(self._consumers.stuck(seconds))
        for name in waiting - reported:
            # The queries may be slow, and this thread monitors all tasks.
            self._start_thread(partial(report, name), "tfd-watchdog-stuck")
        return waiting

    def _report_cause(self, name: str) -> None:
        """Report what a consumer certainly waits for, before it counts as stuck."""
        what, where = f"{name!r} has waited {_ROUND_SECONDS:g} s", ""
        fix = missing_consumers(self._consumers.named(name).live.delivery)
        if fix:
            where = " in a coordinated read"
        else:
            for each in self._task_manager.blocked_functions(_ROUND_SECONDS):
                if (known := (each.function, each.file)) not in self._reported_functions:
                    self._reported_functions.add(known)
                    where = f" for data: {each} has not returned for {each.seconds:.0f} s"
                    fix = "cluster.stacks() shows where it waits"
        if where and name in self._consumers.stuck(_ROUND_SECONDS):
            self._monitor.notice("warning", what + where, fix=fix)

    def _report_stuck(self, name: str) -> None:
        blocked = self._task_manager.blocked_functions(_BLOCKED_SECONDS)
        reasons = [f"{each} has not returned for {each.seconds:.0f} s" for each in blocked]
        why = "; ".join([*self._task_manager.unreachable_peers(), *reasons])
        rows = self._monitor.tasks()
        silent = self._why_silent(rows)
        if name not in self._consumers.stuck(self._hang_seconds):
            return
        states = ", ".join(
            f"{row.task} {'does not answer' if row.task in silent else row.state}" for row in rows
        )
        self._monitor.notice(
            "warning",
            f"{name!r} has waited {self._hang_seconds:g} s for data "
            + (f"({states}): {why}" if why else f"({states})"),
            fix=self._monitor.config.restart_step(*next(iter(silent.items())))
            if silent
            else missing_consumers(self._consumers.named(name).live.delivery)
            or "%tfd_cluster status shows why; Ctrl-C or cluster.interrupt() ends the wait",
        )
