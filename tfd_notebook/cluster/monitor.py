"""State of a cluster: events and measurements are applied, immutable snapshots come out."""

from __future__ import annotations

import itertools
import logging
import queue
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tfd_notebook.agent import memory
from tfd_notebook.cluster import registry
from tfd_notebook.coordinator.metrics import row_version
from tfd_notebook.data.bottleneck.usage import workers_of
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.data.service.protocols import Registered
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
    Notice,
    PlanChanged,
    RankChanged,
    RunChanged,
    StateChanged,
    TaskChanged,
    TaskMeasured,
    TaskRemoved,
    TasksLost,
    WorkersAdapted,
)
from tfd_notebook.model.rate_history import RateHistory
from tfd_notebook.model.rate_window import RateWindow
from tfd_notebook.model.snapshot import (
    JUDGED_REPLIES,
    AdaptationRow,
    GpuRow,
    RankRow,
    Snapshot,
    TaskRow,
)
from tfd_notebook.model.spec import ClusterConfig, Role, TaskState
from tfd_notebook.net.clock import Deadline

if TYPE_CHECKING:
    from tfd_notebook.coordinator.coordinator import Coordinator

log = logging.getLogger("tfd_notebook")

_TICK_SECONDS = 0.5
_RATE_SECONDS = 5.0
#: Minimum measurements for an average of the working share.
_LEAST_SHARES = 3
#: The number of starts whose duration is kept.
_KEPT_STARTS = 5
#: The number of events that are kept.
_KEPT_EVENTS = 1000
#: Events without an entry in the event log: measurements are too many.
_UNLOGGED = (TaskMeasured, ConsumerMeasured, GpusMeasured, JournalMeasured)
_MEASURED = ("cpu_percent", "rss_mb", "pss_mb", "bytes_sent")
_ENDED = ("stopped", "failed", "lost", "left")
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
#: The reason of a task without current information.
_DISCONNECTED = "the connection to its host is lost"
_ORDER = {role: position for position, role in enumerate(Role)}

#: Roles whose failure affects a running epoch.
_EPOCH_ROLES = (Role.DISPATCHER, Role.DATA_WORKER)
#: Sentences about the data that is lost when a task fails.
_LOST_WITH = {
    Role.DISPATCHER: ". In mode dynamic, the current epoch loses the split that it was assigning",
    Role.DATA_WORKER: ". Elements that it had prepared for the current epoch are lost (dynamic) or "
    "delivered again (off, file, data)",
    Role.PS: ". Its variables are lost: create a new strategy and restore a checkpoint",
    Role.WORKER: ". The closure that it was running is retried on a worker that is ready",
}


class Monitor:
    """The current state of a cluster. It applies events and returns snapshots.

    Parameters
    ----------
    config : ClusterConfig

    Attributes
    ----------
    consumers : Consumers
        The consumers in this process that read from the cluster.
    registered : dict of str to Registered
        The datasets that this process registered with the data service, by id.
    coordinator : Coordinator or None
        The current coordinator.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.consumers = Consumers(task_of=self.task_at)
        self.registered: dict[str, Registered] = {}
        self.coordinator: Coordinator | None = None
        self._on_tick: Callable[[str], None] = lambda _: None
        self._rows: dict[str, TaskRow] = {}
        #: The processes of the latest `Cluster.run`, by the names of their workers.
        self._ranks: dict[str, RankRow] = {}
        #: The GPUs of each host, in display order.
        self._gpus: dict[str, tuple[GpuRow, ...]] = {}
        self._sent: dict[str, RateWindow] = {}
        self._working: dict[str, deque[float]] = {}
        self._late: dict[str, deque[bool]] = {}
        self._stream_rates, self._task_rates = RateHistory(), RateHistory()
        self._changed = threading.Condition()
        self._version = 0
        self._state = "new"
        self._shown_state = "new"
        self._planned: dict[Role, int] = dict(config.counts)
        self._requested: dict[Role, int] = {}
        #: Tasks of the data service that have stopped. None ends the thread.
        self._stopped: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._journal_bytes: int | None = None
        self._expires: Deadline | None = None
        self._expiry_reason = ""
        self._reconnects: Counter[str] = Counter()
        self._lease: Deadline | None = None
        self._end_reason = ""
        self._why_lost = ""
        self._adaptation: AdaptationRow | None = None
        #: The times at which starting data workers were requested, and the latest durations.
        self._requested_at: dict[str, float] = {}
        self._start_seconds: deque[float] = deque(maxlen=_KEPT_STARTS)
        self._thread: threading.Thread | None = None
        self.consumers.connect(self.apply, lambda: workers_of(self.tasks()))

    # Updates

    def start(self, on_tick: Callable[[str], None]) -> None:
        """Start the thread that calls `on_tick` twice a second.

        It also calls `on_tick` at once with each task of the data service that stops or restarts.
        Otherwise, the argument is empty.
        """
        self._on_tick = on_tick
        # Another thread may stop the cluster at this moment.
        with self._changed:
            self._thread = threading.Thread(
                target=self._work, name=f"tfd-monitor-{self.config.name}", daemon=True
            )
            self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Stop the thread."""
        with self._changed:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._stopped.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout)

    @property
    def planned(self) -> dict[Role, int]:
        """The number of tasks of each role that the user requested."""
        with self._changed:
            return dict(self._planned)

    @property
    def state(self) -> str:
        """The state of the whole cluster; ``degraded`` if ready tasks are missing."""
        return self._shown_state

    @property
    def version(self) -> Hashable:
        """A value that is different after each change of `snapshot`. Reading it is cheap."""
        coordinator = self.coordinator  # another thread may set it
        row = None if coordinator is None else (id(coordinator), row_version(coordinator.store))
        return self._version, row

    def apply(self, event: Event) -> None:
        """Apply an event. This is the only way in which the state changes."""
        with self._changed:
            before = self._rows.get(event.task) if isinstance(event, TaskChanged) else None
            if not self._update(event):
                return
            if not isinstance(event, _UNLOGGED):
                self._events.append(event)
                self._update_shown_state()
            self._version += 1
            self._changed.notify_all()
        registry.notify_change()
        self._report(event, before)

    def _update(self, event: Event) -> bool:
        """Update the state by an event, and return True unless it changes nothing."""
        match event:
            case TaskChanged():
                self._update_task(event)
            case TaskMeasured():
                return self._update_measurement(event)
            case ConsumerMeasured():
                stream = self.consumers.apply(event)
                if stream is not None and stream.state == "running":
                    self._stream_rates.add(stream.name, time.time(), stream.elements_per_s)
            case GpusMeasured():
                self._set_gpus(event.host or "localhost", event.gpus)
            case TaskRemoved():
                for rows in (self._rows, self._sent, self._working, self._late, self._requested_at):
                    rows.pop(event.task, None)
            case RunChanged():
                self._ranks = {
                    task: RankRow(
                        task, rank, self._rows[task].host, "starting", event.function, event.attempt
                    )
                    for rank, task in enumerate(event.tasks)
                }
            case RankChanged():
                times: dict[str, Any] = {
                    "started" if event.state == "running" else "ended": event.time
                }
                self._ranks[event.task] = replace(
                    self._ranks[event.task], state=event.state, reason=event.reason, **times
                )
            case StateChanged():
                before, self._state = self._state, event.state
                return before != event.state
            case PlanChanged():
                if event.planned is not None:
                    self._planned[event.role] = event.planned
                if event.requested is not None:
                    self._requested[event.role] = event.requested
            case AdaptationChanged():
                self._adaptation = None
                if event.minimum is not None and event.maximum is not None:
                    self._adaptation = AdaptationRow(event.minimum, event.maximum)
            case WorkersAdapted():
                if self._adaptation is not None:
                    self._adaptation = replace(
                        self._adaptation,
                        workers=event.after,
                        reason=event.reason,
                        since=event.time,
                    )
            case ExpiryChanged():
                deadline = _deadline(event.seconds_left)
                if not (deadline and self._expires and self._expires.left <= deadline.left):
                    self._expires, self._expiry_reason = deadline, event.reason
            case JournalMeasured():
                self._journal_bytes = event.size
            case LeaseChanged():
                self._lease = _deadline(event.seconds_left)
            case ClusterEnded():
                self._end_reason = event.reason
            case HostDisconnected():
                self._replace_reason(event.host, "", _DISCONNECTED)
            case HostReconnected():
                self._reconnects[event.host] += 1
                self._replace_reason(event.host, _DISCONNECTED, "")
            case TasksLost():
                for name, row in self._rows.items():
                    if not row.state.ended:
                        self._rows[name] = replace(
                            row, state=TaskState.LOST, reason=event.reason, pid=None
                        )
                self._state, self._why_lost = "lost", event.reason
        return True

    def _report(self, event: Event, before: TaskRow | None) -> None:
        """Publish a notice about an event, if users need one. `before` is the task's last row."""
        match event:
            case Notice():
                log.log(_LEVELS[event.severity], "%s: %s", self.config.name, event)
            case TaskChanged():
                self._publish_notice(event, before)
                stopped = event.state is TaskState.RESTARTING or event.state.ended
                if stopped and self._state == "ready" and event.task.startswith(_EPOCH_ROLES):
                    self._stopped.put(event.task)
            case WorkersAdapted():
                self.notice("info", f"{event.before} → {event.after} data workers: {event.reason}")
            case AdaptationChanged() if event.reason:
                self.notice("info", f"the number of data workers is fixed: {event.reason}")
            case ClusterEnded():
                self.notice("warning", f"the cluster has ended: {event.reason}")
            case HostDisconnected():
                self.notice(
                    "warning",
                    f"lost the connection to {event.host}; reconnecting. Its tasks "
                    f"({self._tasks_on(event.host)}) keep running for up to {event.grace:g} s",
                )
            case HostReconnected():
                self.notice(
                    "info",
                    f"reconnected to {event.host} after {event.seconds:.0f} s "
                    f"({self._tasks_on(event.host)})",
                )
            case TasksLost():
                self.notice("error", event.reason, fix="start the cluster again")

    def notice(
        self, severity: str, what: str, *, task: str | None = None, fix: str | None = None
    ) -> None:
        """Publish a notice to the views, and write it to the log ``tfd_notebook``."""
        self.apply(Notice(severity=severity, what=what, task=task, fix=fix))

    # Queries

    def snapshot(self) -> Snapshot:
        """Return the current state of the cluster."""
        coordinator = self.coordinator
        # Not under the lock: the coordinator acquires its own locks.
        row = None if coordinator is None else coordinator.row(self.tasks())
        with self._changed:
            tasks = self.tasks()
            gpus = () if self._shown_state in _ENDED else self._gpus.values()
            return Snapshot(
                version=self._version,
                time=time.time(),
                name=self.config.name,
                launcher=self.config.launcher,
                state=self._shown_state,
                tasks=tasks,
                streams=self.consumers.rows(),
                ranks=tuple(self._ranks.values()),
                gpus=tuple(itertools.chain.from_iterable(gpus)),
                planned=dict(self._planned),
                requested=dict(self._requested),
                observed=self._observed(),
                events=tuple(self._events),
                journal_bytes=self._journal_bytes,
                expires=None if self._expires is None else self._expires.wall,
                lease=None if self._lease is None else self._lease.wall,
                coordinator=row,
                adaptation=None if self._shown_state in _ENDED else self._adaptation,
            )

    def rates(self, since: int) -> dict[str, Any]:
        """Return the rates by second from `since` on, in seconds since the Unix epoch.

        Returns
        -------
        dict
            ``streams`` in elements/s and ``tasks`` in bytes/s, each a list by name. ``until`` is
            the second after the last one. None: not measured.
        """
        until = int(time.time())
        with self._changed:
            streams = self._stream_rates.since(since, until)
            tasks = self._task_rates.since(since, until)
        return {"until": until, "streams": streams, "tasks": tasks}

    def tasks(self) -> tuple[TaskRow, ...]:
        """Return the current tasks in display order, with their rates."""
        with self._changed:
            return tuple(sorted(self._rows.values(), key=lambda r: (_ORDER[r.role], r.index)))

    @property
    def detached(self) -> bool:
        """True if the cluster has a lease."""
        return self._lease is not None

    @property
    def seconds_left(self) -> float | None:
        """Seconds before the time limit; None without a limit."""
        return None if self._expires is None else self._expires.left

    @property
    def expiry_reason(self) -> str:
        """The reason for the time limit; see `ExpiryChanged`."""
        return self._expiry_reason

    @property
    def expired(self) -> bool:
        """True if the time limit has passed."""
        return self._expires is not None and self._expires.expired

    @property
    def end_reason(self) -> str:
        """The reason for which an agent or another process ended the cluster; empty if none did."""
        return self._end_reason

    @property
    def why_lost(self) -> str:
        """The reason for which the tasks are lost; empty if they are not."""
        return self._why_lost

    @property
    def start_seconds(self) -> float | None:
        """The median time from the request of a data worker until it was ready, of the latest."""
        with self._changed:
            return statistics.median(self._start_seconds) if self._start_seconds else None

    def requested_at(self) -> dict[str, float]:
        """Return the data workers that start, and when they were requested (`time.monotonic`)."""
        with self._changed:
            return dict(self._requested_at)

    @property
    def journal_bytes(self) -> int | None:
        """The size of the dispatcher's journal, or None while it is unknown."""
        return self._journal_bytes

    @property
    def reconnects(self) -> Mapping[str, int]:
        """The number of reconnects to each host."""
        with self._changed:
            return dict(self._reconnects)

    def rows(self) -> tuple[TaskRow, ...]:
        """Return the current tasks in arbitrary order."""
        with self._changed:
            return tuple(self._rows.values())

    def task_at(self, address: str) -> str | None:
        """Return the task at an address, or None if there is none."""
        return next((row.task for row in self.rows() if row.address == address), None)

    def wait(self, predicate: Callable[[dict[str, TaskRow]], bool], timeout: float) -> bool:
        """Wait until `predicate` holds for the rows by task name. Return False on timeout."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not predicate(self._rows):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.5))
            return True

    # Internals

    def _observed(self) -> dict[Role, int]:
        """Return the number of ready tasks by role, in display order."""
        ready = Counter(row.role for row in self._rows.values() if row.state is TaskState.READY)
        return {role: ready[role] for role in Role if ready[role]}

    def _update_shown_state(self) -> None:
        self._shown_state = self._state
        if self._state == "ready":
            observed = self._observed()
            if any(observed.get(role, 0) < count for role, count in self._planned.items()):
                self._shown_state = "degraded"

    def _work(self) -> None:
        stopped: str | None = ""
        while stopped is not None:
            try:
                stopped = self._stopped.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                stopped = ""
            try:
                self._on_tick(stopped or "")
            except Exception as error:
                self.notice("error", f"{type(error).__name__}: {error}")

    def _set_gpus(self, host: str, gpus: Iterable[Mapping[str, Any]]) -> None:
        """Set the GPUs of a host, as JSON values of `GpusMeasured`."""
        rows = tuple(
            GpuRow(
                host,
                gpu["index"],
                gpu.get("name", ""),
                gpu.get("task", ""),
                gpu.get("use_percent"),
                *(None if gpu.get(key) is None else gpu[key] / 1e6 for key in ("used", "memory")),
            )
            for gpu in gpus
        )
        self._gpus[host] = rows
        for name in {gpu.task for gpu in rows} & set(self._rows):
            if self._rows[name].pid is not None:
                words = "; ".join(gpu.words for gpu in rows if gpu.task == name and gpu.words)
                self._rows[name] = replace(self._rows[name], gpu=words)

    def _update_task(self, event: TaskChanged) -> None:
        row = self._rows.get(event.task)
        if row is None:
            role, _, index = event.task.partition(":")
            row = TaskRow(event.task, Role(role), int(index))
        is_requested = bool(event.address) and not row.address  # before, it waits for a host
        if is_requested and row.role is Role.DATA_WORKER and event.state is not TaskState.READY:
            self._requested_at[event.task] = time.monotonic()
        if event.task in self._requested_at and (
            event.state is TaskState.READY or event.state.ended
        ):
            requested = self._requested_at.pop(event.task)
            if event.state is TaskState.READY:
                self._start_seconds.append(time.monotonic() - requested)
        exited = event.pid is None
        self._rows[event.task] = replace(
            row,
            host=event.host or event.address.rpartition(":")[0],
            address=event.address,
            pid=event.pid,
            state=event.state,
            reason=event.reason,
            restarts=event.restarts,
            open_to=event.open_to,
            cpu_percent=None if exited else row.cpu_percent,
            rss_mb=None if exited else row.rss_mb,
            pss_mb=None if exited else row.pss_mb,
            bytes_per_s=None if exited else row.bytes_per_s,
            gpu="" if exited else row.gpu,
        )

    def _publish_notice(self, event: TaskChanged, before: TaskRow | None) -> None:
        """Publish a notice for changes that can block or fail a running cell."""
        fix, cause = self.config.restart_step(event.task, event.reason), ""
        memory_limit = memory.is_reason(event.reason)
        if memory_limit:
            fix = memory.FIX
            if event.task.startswith(Role.DATA_WORKER):
                cause = memory_cause(self.registered)
        if event.state is TaskState.FAILED:
            last = f" Last output: {event.log[-1]!r}" if event.log else ""
            last = cause if memory_limit else last
            self.notice("error", f"failed: {event.reason}.{last}", task=event.task, fix=fix)
        elif event.state is TaskState.RESTARTING:
            role = Role(event.task.partition(":")[0])
            reading = role in _EPOCH_ROLES and self.consumers.reading()
            if event.reason == "requested" and not reading:
                return
            what = f"{event.reason}; it is being restarted"
            if event.reason == "requested":
                what = "restarts as requested"
            if reading or role not in _EPOCH_ROLES:
                what += _LOST_WITH.get(role, "")
            what += f".{cause}" if cause else ""
            self.notice("warning", what, task=event.task, fix=fix if memory_limit else None)
        elif event.state is TaskState.HUNG:
            self.notice("warning", f"hung, {event.reason}", task=event.task, fix=fix)
        elif event.state is TaskState.READY and before and before.state is TaskState.HUNG:
            self.notice("info", event.reason, task=event.task)

    def _update_measurement(self, event: TaskMeasured) -> bool:
        """Update the row of a running task, and return True if there is one."""
        row = self._rows.get(event.task)
        if row is None or row.pid is None:
            return False
        values = {name: value for name in _MEASURED if (value := getattr(event, name)) is not None}
        if event.bytes_sent is not None:
            window = self._sent.setdefault(event.task, RateWindow(_RATE_SECONDS))
            if not window.add(time.monotonic(), event.bytes_sent):
                self._working.pop(event.task, None)
                self._late.pop(event.task, None)
        sent = self._sent.get(event.task)
        rate = None if sent is None else sent.rate
        late = self._late.setdefault(event.task, deque(maxlen=JUDGED_REPLIES))
        if event.late is not None:
            late.append(event.late)
        if rate is not None and row.role is not Role.DISPATCHER:
            self._task_rates.add(event.task, time.time(), rate)
        self._rows[event.task] = replace(
            row,
            **values,
            bytes_per_s=rate,
            rates=() if sent is None else sent.rates,
            working=self._mean_share(event.task, event.working),
            late=sum(late),
        )
        return True

    def _mean_share(self, task: str, sampled: float | None) -> float | None:
        """Return the mean share of the last measurements, or None if there are too few."""
        history = self._working.setdefault(task, deque(maxlen=round(_RATE_SECONDS)))
        if sampled is not None:
            history.append(sampled)
        return sum(history) / len(history) if len(history) >= _LEAST_SHARES else None

    def _replace_reason(self, host: str, before: str, reason: str) -> None:
        """Replace the reason `before` of a host's running tasks."""
        for name, row in self._rows.items():
            if row.host == host and row.reason == before and not row.state.ended:
                self._rows[name] = replace(row, reason=reason)

    def _tasks_on(self, host: str) -> str:
        return ", ".join(row.task for row in self.rows() if row.host == host)


def memory_cause(registered: Mapping[str, Registered]) -> str:
    """Return a sentence about the largest buffer of the datasets, after a space, or ""."""
    buffers = [buffer for known in list(registered.values()) for buffer in known.buffers]
    if not buffers:
        return ""
    return f" The likely cause is {max(buffers, key=lambda buffer: buffer.bytes or 0).words}"


def _deadline(seconds: float | None) -> Deadline | None:
    return None if seconds is None else Deadline(seconds)
