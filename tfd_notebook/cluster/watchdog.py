"""Periodic checks of a running cluster: time limit, journal size and stuck consumers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from tfd_notebook.agent import work_dir as agent_work_dir
from tfd_notebook.cluster.monitor import Monitor
from tfd_notebook.cluster.task_manager import TaskManager
from tfd_notebook.data.bottleneck.advice import missing_consumers
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.model.events import ExpiryChanged, JournalMeasured

_JOURNAL_EVERY_SECONDS = 5.0
_JOURNAL_WARN_BYTES = 1_000_000_000


def _start_thread(call: Callable[[], None], name: str) -> None:
    threading.Thread(target=call, name=name, daemon=True).start()


class Watchdog:
    """Periodic checks of a running cluster. The monitor's thread calls it twice a second.

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
    ) -> None:
        self._task_manager = task_manager
        self._monitor = monitor
        self._consumers = consumers
        self._hang_seconds = hang_seconds
        self._end = end
        self._clock = clock
        self._start_thread = start_thread
        self._is_ending = False
        self._time_limit_notice = time_limit_notice
        self._has_notified = False
        self._journal_due = 0.0
        self._stuck: set[str] = set()

    def __call__(self) -> None:
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
        self._report_stuck_consumers()

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
        if work_dir is None or not (
            self._task_manager.on_this_host or agent_work_dir.is_url(work_dir)
        ):
            return
        if self._clock() < self._journal_due:
            return
        self._journal_due = self._clock() + _JOURNAL_EVERY_SECONDS
        if agent_work_dir.is_url(work_dir):
            # A remote file system may respond slowly, and this thread monitors all tasks.
            self._start_thread(partial(self._measure_journal, work_dir), "tfd-journal")
        else:
            self._measure_journal(work_dir)

    def _measure_journal(self, work_dir: str) -> None:
        try:
            size = agent_work_dir.total_bytes(work_dir)
        except OSError:  # the directory is removed when the cluster stops
            return
        before = self._monitor.journal_bytes or 0
        self._monitor.apply(JournalMeasured(size))
        if before <= _JOURNAL_WARN_BYTES < size:
            self._monitor.notice(
                "warning",
                f"the dispatcher's journal in {work_dir} is {size / 1e9:.1f} GB",
                fix='with "dynamic" each element of the source is one record: make the source '
                "coarser (files, batches), or use Service(fault_tolerant=False)",
            )

    def _report_stuck_consumers(self) -> None:
        """Publish a notice for each consumer that waits too long for data, once per wait."""
        stuck = set(self._consumers.stuck(self._hang_seconds))
        for name in stuck - self._stuck:
            if self._task_manager.on_this_host:
                self._report_stuck(name)
            else:
                # Queries to remote hosts may be slow, and this thread monitors all tasks.
                self._start_thread(partial(self._report_stuck, name), "tfd-watchdog-stuck")
        self._stuck = stuck

    def _report_stuck(self, name: str) -> None:
        why = "; ".join(self._task_manager.unreachable_peers())
        if name not in self._consumers.stuck(self._hang_seconds):
            return
        states = ", ".join(f"{row.task} {row.state}" for row in self._monitor.rows())
        self._monitor.notice(
            "warning",
            f"{name!r} has waited {self._hang_seconds:g} s for data "
            + (f"({states}): {why}" if why else f"({states})"),
            fix=missing_consumers(self._consumers.named(name).live.delivery)
            or "%tfd_cluster status shows why; Ctrl-C or cluster.interrupt() ends the wait",
        )
