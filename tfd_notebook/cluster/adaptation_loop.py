"""The thread that adapts the number of data workers of a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tfd_notebook import errors
from tfd_notebook.cluster.adaptation import (
    Bounds,
    Decision,
    History,
    Load,
    Measurement,
    decide,
    failed,
)
from tfd_notebook.cluster.servers import ClusterServers
from tfd_notebook.data.bottleneck.usage import Delivery
from tfd_notebook.data.consume.consumers import Consumer
from tfd_notebook.model.events import AdaptationChanged, WorkersAdapted
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role, TaskState, check_count

_CHECK_SECONDS = 0.5
#: Seconds after which a data worker without measurements counts as serving. The launcher then
#: measures none.
_UNMEASURED_SECONDS = 5.0
#: Why the number is fixed under static sharding.
_STATIC_SHARDING = (
    "sharding by file or data gives each data worker its share of the data in advance"
)
#: Cardinality of an infinite dataset, and of one that a stage such as ``batch`` makes unknown.
_INFINITE = -1
#: Bottlenecks that more data workers do not remove.
_NOT_WORKERS = ("source", "stage", "python", "device_copy", "transfer")


class Adaptation:
    """Adapts the number of data workers until `stop`.

    Parameters
    ----------
    servers : ClusterServers
    bounds : Bounds
    scale : callable
        Changes the number of data workers. It takes the number and returns when they are
        requested. It raises a TfdError.
    """

    def __init__(
        self, servers: ClusterServers, bounds: Bounds, scale: Callable[[int], None]
    ) -> None:
        self._servers, self._bounds, self._scale = servers, bounds, scale
        self._monitor, self._task_manager = servers.monitor, servers.task_manager
        self._history = History()
        self._ready_since: dict[str, float] = {}
        self._served: set[str] = set()
        self._ended: frozenset[str] = frozenset()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"tfd-adapt-{servers.name}", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._monitor.apply(AdaptationChanged(self._bounds.minimum, self._bounds.maximum))
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """True after `stop`."""
        return self._stop.is_set()

    def stop(self, reason: str = "") -> None:
        """Make no further decision. A change that is running is completed."""
        if not self.stopped:
            self._stop.set()
            self._monitor.apply(AdaptationChanged(None, None, reason))

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stop.wait(_CHECK_SECONDS):
            try:
                self._check()
            except Exception as error:
                self._monitor.notice(
                    "error",
                    f"adapting the data workers failed: {type(error).__name__}: {error}",
                    fix="cluster.adapt(minimum, maximum) tries again",
                )
                self.stop("a check failed")

    def _check(self) -> None:
        if self._task_manager.has_static_sharding:
            self.stop(_STATIC_SHARDING)
            return
        now = self._measure()
        ended = frozenset(row.task for row in self._rows() if row.state.ended)
        if ended - self._ended:
            self._history = failed(self._history, now)
        self._ended = ended
        self._history, decision = decide(self._bounds, self._history, now)
        if decision is not None and not self.stopped:
            self._apply(decision, now)

    def _apply(self, decision: Decision, now: Measurement) -> None:
        event = WorkersAdapted(now.workers, decision.workers, decision.reason)
        self._monitor.apply(event)
        try:
            self._scale(decision.workers)
        except errors.TfdError as error:
            self._history = failed(self._history, now)
            if not self.stopped:
                seconds = self._history.blocked - now.time
                self._monitor.notice(
                    "warning",
                    f"changing to {decision.workers} data workers failed: {error.what}. No data "
                    f"worker is added for {seconds:.0f} s",
                    fix=error.fix or "see %tfd_cluster logs",
                )

    def _rows(self) -> tuple[TaskRow, ...]:
        return self._task_manager.rows_of(Role.DATA_WORKER)

    def _measure(self) -> Measurement:
        now, rows = time.monotonic(), [row for row in self._rows() if not row.state.ended]
        requested = self._monitor.requested_at()
        pending = [requested[row.task] for row in rows if row.task in requested]
        return Measurement(
            time=now,
            workers=len(rows),
            serving=self._count_serving(rows, now),
            pending=len(pending),
            pending_seconds=now - min(pending, default=now),
            start_seconds=self._monitor.start_seconds,
            loads=tuple(
                load
                for name, consumer in self._servers.consumers.running()
                if (load := self._load(name, consumer)) is not None
            ),
        )

    def _count_serving(self, rows: list[TaskRow], now: float) -> int:
        """Return the number of data workers from which a consumer has read.

        The first read of a data worker increases its total of bytes.
        """
        ready = {row.task: row for row in rows if row.state is TaskState.READY}
        self._ready_since = {task: self._ready_since.get(task, now) for task in ready}
        self._served &= ready.keys()
        for task, row in ready.items():
            # Elements inside this process pass no socket.
            unmeasured = row.bytes_sent is None or self._task_manager.in_process
            if (unmeasured and now - self._ready_since[task] >= _UNMEASURED_SECONDS) or any(
                rate > 0 for rate in row.rates
            ):
                self._served.add(task)
        return len(self._served)

    def _load(self, name: str, consumer: Consumer) -> Load | None:
        """Return the load of a consumer. None if it does not read from the data workers."""
        meter, state = consumer.meter, consumer.state
        use = None if meter is None else meter.use
        if use is None or state == "new":
            return None
        bottleneck = consumer.live.limit.kind if consumer.live.history else ""
        return Load(
            name,
            consumer.series.sampled,
            consumer.series.latest.elements,
            consumer.series.latest.waited,
            paused=state == "paused",
            useful=None if use.shared is None else use.shared.count,
            bottleneck=bottleneck if bottleneck in _NOT_WORKERS else "",
            keeps=kept(use, self._servers.policy.on_loss),
        )


def kept(use: Delivery, on_loss: str) -> str:
    """Return which changes would damage the epoch that a consumer reads; see `Load`.

    A data worker that leaves takes elements along. With mode "off", each one delivers all
    elements. A second one can join elements wrongly. Each one can repeat its share. An infinite
    dataset has no end at which elements could be missing.
    """
    if use.one_worker or use.cached:
        return "all"
    if use.cardinality == _INFINITE and use.shared is None:
        return ""
    if use.mode == "OFF":
        return "all"
    return "" if on_loss == "warn" else "fewer"


def check_bounds(servers: ClusterServers, minimum: object, maximum: object) -> Bounds:
    """Return the valid range of `minimum` to `maximum` data workers.

    Raises
    ------
    UsageError, StateError, Unsupported
    Refused
        The policy of the administrator allows fewer tasks.
    """
    if maximum is None:
        raise errors.UsageError(
            "adapt needs a minimum and a maximum",
            fix="cluster.adapt(1, 8), or cluster.adapt(None) to keep the current number",
        )
    low = check_count("minimum", minimum, minimum=1)
    high = check_count("maximum", maximum, minimum=1)
    if low > high:
        raise errors.UsageError(
            f"invalid range: the minimum {low} is larger than the maximum {high}",
            fix=f"cluster.adapt({high}, {low})",
        )
    servers.require_running()
    if servers.task_manager.has_static_sharding:
        raise errors.StateError(
            f"the number of data workers cannot adapt: {_STATIC_SHARDING}",
            fix='use processing_mode="dynamic" in a new cluster',
        )
    servers.task_manager.check_scale({Role.DATA_WORKER: high, Role.DISPATCHER: 1})
    return Bounds(low, high, servers.policy.start_timeout)
