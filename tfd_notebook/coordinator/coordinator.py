"""`Coordinator`: TensorFlow's ClusterCoordinator with tracing of closures, pause and step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfd_notebook import views
from tfd_notebook._compat.tf_coordinator import adoption, closure_queue, connection, fallback
from tfd_notebook._compat.tf_coordinator.cancellation import quieten
from tfd_notebook.coordinator import error_hints
from tfd_notebook.coordinator.background_join import BackgroundJoin
from tfd_notebook.coordinator.limit import NOTHING, judge
from tfd_notebook.coordinator.metrics import CoordinatorMetrics
from tfd_notebook.coordinator.values import Values
from tfd_notebook.data.consume import memory_datasets
from tfd_notebook.errors import (
    StateError,
    TfdError,
    TimeLimit,
    UnknownName,
    Unsupported,
    UsageError,
)
from tfd_notebook.model.closure_gate import Gate
from tfd_notebook.model.closure_store import DEFAULT_KEEP, Store, function_names
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import CoordinatorRow, TaskRow
from tfd_notebook.model.spec import check_timeout
from tfd_notebook.views.formatting import plural

#: Seconds to wait for TensorFlow's failure handlers, which end when a lost worker responds.
_STOP_SECONDS = 5.0


# First TensorFlow's class: Python can only convert its objects if the layout comes from it.
class Coordinator(closure_queue.ClusterCoordinator, Handle):
    """A ClusterCoordinator that records the state of each closure and can pause and step.

    It keeps the full contract of TensorFlow's class, including its errors. Create it with
    ``cluster.coordinator()``, which also shows it in the tables of the cluster. A strategy has only
    one coordinator, even for Keras. If TensorFlow has created it, it is converted to this class.

    Parameters
    ----------
    strategy : tf.distribute.ParameterServerStrategy
    keep : int
        Number of closures with a full record. Earlier ones are only counted. Default 1,000,000.

    Attributes
    ----------
    values : Values
        All RemoteValues: ``counts()``, ``to_frame()``, ``value(id)``.
    build : callable or None
        Builds the model again in `Cluster.recover`.

    Raises
    ------
    UsageError
        The strategy is not a ``ParameterServerStrategy``; this is a ValueError.
    StateError
        TensorFlow created the strategy's coordinator, and it has unfinished functions.

    See Also
    --------
    tf.distribute.coordinator.ClusterCoordinator
    """

    _instead = "pass tensors and RemoteValues to the functions that it schedules"

    def __new__(cls, strategy: Any, keep: int = DEFAULT_KEEP) -> Coordinator:
        if not adoption.is_supported(strategy):
            raise UsageError(
                f"invalid strategy {type(strategy).__name__}: a coordinator works with "
                "tf.distribute.ParameterServerStrategy only",
                fix="create one: cluster.strategy()",
            )
        existing = adoption.made_by_tensorflow(strategy)
        if existing is not None:
            return cls._convert(existing, keep)
        coordinator: Coordinator = super().__new__(cls, strategy)
        return coordinator

    def __init__(self, strategy: Any, keep: int = DEFAULT_KEEP) -> None:
        if connection.is_constructed(self):
            return
        self._set_attributes(keep)
        if self._queue is not None:
            closure_queue.with_queue(
                self._queue, lambda: super(Coordinator, self).__init__(strategy)
            )
        else:
            super().__init__(strategy)
        quieten(self._workers)

    def _set_attributes(self, keep: int) -> None:
        """Set the attributes that TensorFlow's class does not have."""
        self._store = Store(keep)
        self._value_follower = fallback.RemoteValueFollower(self._store)
        self._stopped = False
        self._tasks: Callable[[], Sequence[TaskRow]] = lambda: ()
        self._ps_bytes: Callable[[], Mapping[str, int]] = dict
        self._on_ps_lost: Callable[[str], None] = lambda tasks: None
        self._ps_lost = False
        self._notify: Callable[[str, str], None] = lambda severity, what: None
        self._serve_errors_for_lost_workers: Callable[[], None] = lambda: None
        self._bound_cluster: object = None
        self._metrics = CoordinatorMetrics(self._store)
        #: Whether every transition is recorded. Otherwise only those visible in RemoteValues are.
        self.full = fallback.recognized()
        queue = (
            closure_queue.WatchedQueue(self._store, error_hints.explain, _check_reads)
            if self.full
            else None
        )
        self._queue = queue
        self.build: Callable[[Coordinator], Any] | None = None
        self.values = Values(self._store, lambda: queue is not None and queue.gate.closed)

    @classmethod
    def _convert(cls, existing: Any, keep: int) -> Coordinator:
        """Convert TensorFlow's coordinator to this class, because a strategy has only one."""
        cls._set_attributes(existing, keep)
        if existing._queue is not None:
            adoption.replace_queue(connection.cluster_of(existing), existing._queue)
        existing.__class__ = cls
        quieten(existing._workers)
        return existing  # type: ignore[no-any-return]

    def __del__(self) -> None:
        if connection.cluster_of(self) is not None:
            self.stop()

    @property
    def _workers(self) -> Sequence[Any]:
        return connection.cluster_of(self).workers  # type: ignore[no-any-return]

    def bind_cluster(
        self,
        tasks: Callable[[], Sequence[TaskRow]],
        ps_bytes: Callable[[], Mapping[str, int]],
        on_ps_lost: Callable[[str], None],
        notify: Callable[[str, str], None],
        serve_errors_for_lost_workers: Callable[[], None],
        cluster: object = None,
    ) -> None:
        """Connect the coordinator with the tasks, variable sizes and callbacks of its cluster.

        `serve_errors_for_lost_workers` starts error servers at the addresses of lost tasks. Advice
        uses the name of the user's variable that holds `cluster`.
        """
        self._tasks, self._ps_bytes, self._on_ps_lost = tasks, ps_bytes, on_ps_lost
        self._notify, self._bound_cluster = notify, cluster
        self._serve_errors_for_lost_workers = serve_errors_for_lost_workers

    # TensorFlow's interface

    def schedule(self, fn: Any, args: Any = None, kwargs: Any = None) -> Any:
        """Queue `fn` for any worker and return its RemoteValue at once, as TensorFlow does.

        During a `join` in another thread, that `join` also waits for the new closure.

        Raises
        ------
        TypeError
            `fn` is not a ``tf.function``.
        ValueError
            The arguments contain a RemoteValue.
        StateError
            The coordinator is stopped.
        NoWorkers
            `fn` reads from the memory of data workers in this process, and a training worker is
            another process.
        PausedError
            The coordinator is paused, and its queue (262,144 closures) is full.
        Exception
            The error of an earlier closure.
        """
        if self._stopped:
            raise _stopped_error()
        args, kwargs = closure_queue.with_defaults(fn, args, kwargs)
        try:
            with self._explained():
                value = super().schedule(fn, args=args, kwargs=kwargs)
        finally:
            # TensorFlow does not reset this state of the strategy when tracing fails.
            if closure_queue.is_tracing_left(self.strategy):
                closure_queue.end_tracing(self.strategy)
        if not self.full:
            self._value_follower.watch(fn, value)
        return value

    def create_per_worker_dataset(self, dataset_fn: Any) -> Any:
        """Create a dataset on each worker from a dataset, or from a function that returns one.

        Raises
        ------
        NoWorkers
            The dataset reads from the memory of data workers in this process, and a training
            worker is another process.
        Exception
            TensorFlow cannot send the dataset.
        """
        with self._explained():
            dataset = super().create_per_worker_dataset(dataset_fn)
            if (function := connection.dataset_function(dataset)) is not None:
                _check_reads(function)
            return dataset

    def join(self, timeout: float | None = None) -> None:
        """Wait until all closures have ended. Ctrl-C interrupts the wait.

        Parameters
        ----------
        timeout : float, optional
            Seconds. Default: no limit.

        Raises
        ------
        PausedError
            No timeout is set, the coordinator is paused, and no closure runs. No live control is
            open that could resume it.
        TimeLimit
            Closures are still queued or running after `timeout` seconds.
        Exception
            The error of a closure. All other closures are cancelled.
        """
        check_timeout(timeout)
        with self._explained():
            ended = self._wait(timeout)
        if not ended:
            waiting, running = self._store.unfinished()
            raise TimeLimit(
                f"after {timeout:g} s, {waiting} closure(s) are queued and {running} are running",
                fix="see coordinator.values and coordinator.limit, or wait longer",
            )

    def _wait(self, timeout: float | None) -> bool:
        if self._queue is not None:
            return self._queue.wait(timeout)
        if timeout is not None:
            return fallback.wait(super().done, timeout)
        super().join()
        return True

    def join_in_background(self, timeout: float | None = None) -> BackgroundJoin:
        """Call `join` in a thread. The returned object and a notice report the outcome.

        While the coordinator is paused, the thread waits, because the caller can resume.

        Parameters
        ----------
        timeout : float, optional
            Seconds. Default: no limit.

        Returns
        -------
        BackgroundJoin
            Has ``state``, ``error`` and ``wait(timeout)``.
        """
        self._require_queue("join_in_background")
        check_timeout(timeout)
        return BackgroundJoin(self, timeout, self._notify)

    def done(self) -> bool:
        """Return True if all closures have ended.

        Raises
        ------
        Exception
            The error of a closure. All other closures are cancelled.
        """
        with self._explained():
            return bool(super().done())

    def fetch(self, val: Any) -> Any:
        """Wait for a RemoteValue, or a structure of them, and return the results.

        Raises
        ------
        PausedError
            The coordinator is paused, and no live control is open that could resume it.
        Exception
            The error of a closure.
        """
        with self._explained():
            return super().fetch(val)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Add the cause and the next step to an error of TensorFlow."""
        try:
            yield
        except BaseException as error:
            self._explain_error(error)
            raise

    def _explain_error(self, error: BaseException) -> None:
        if error_hints.explain(error) and error_hints.is_loss(error) and not self._ps_lost:
            self._ps_lost = True
            self._on_ps_lost(error_hints.lost_tasks(error))

    # Stepping

    def pause(self, reason: str = "by request") -> None:
        """Stop dispatching closures. Running closures finish.

        Parameters
        ----------
        reason : str
            Shown in views and in `PausedError`.
        """
        self._require_queue("pause").pause(reason)

    def resume(self) -> None:
        """Dispatch closures again. Breakpoints and individually paused workers stay as they are."""
        self._require_queue("resume").resume()

    @property
    def paused(self) -> str:
        """The reason of the pause: a request or a breakpoint. Empty if not paused."""
        return self._queue.gate.reason if self._queue is not None else ""

    def step(self, n: int = 1, timeout: float | None = 60.0) -> int:
        """Run the next `n` closures, and wait until they have ended.

        Parameters
        ----------
        n : int
            Default 1. If fewer are queued, all of them run.
        timeout : float, optional
            Seconds to wait; the closures keep running afterwards. Default 60. None: no limit.

        Returns
        -------
        int
            The number of closures that have ended.

        Raises
        ------
        UsageError
            `n` is not 1 or more.
        StateError
            The coordinator is not paused.
        """
        check_timeout(timeout)
        return self._require_queue("step").step(n, timeout)

    def pause_worker(self, i: int) -> None:
        """Stop dispatching closures to worker `i`."""
        self._require_queue("pause_worker").hold(self._check_worker(i), True)

    def resume_worker(self, i: int) -> None:
        """Dispatch closures to worker `i` again."""
        self._require_queue("resume_worker").hold(self._check_worker(i), False)

    @property
    def paused_workers(self) -> tuple[int, ...]:
        """The workers that get no closures."""
        return tuple(sorted(self._queue.gate.workers)) if self._queue is not None else ()

    def break_on(
        self,
        failure: bool = True,
        worker: int | Iterable[int] | None = None,
        function: Any = None,
    ) -> None:
        """Set the breakpoints at which the coordinator pauses, replacing the previous ones.

        Parameters
        ----------
        failure : bool
            Pause when a closure fails. The next ``schedule``, ``join`` or ``done`` raises it.
            A running ``join`` raises it at once, or on `resume` if a live control is open.
            Default true.
        worker : int or iterable of int, optional
            Pause before a closure is dispatched to one of these workers.
        function : tf.function, str or iterable, optional
            Pause before a closure of one of these functions runs.
        """
        queue = self._require_queue("break_on")
        workers = () if worker is None else (worker,) if isinstance(worker, int) else worker
        names = function_names(function)
        queue.break_on(bool(failure), {self._check_worker(i) for i in workers}, names)

    @property
    def breakpoints(self) -> tuple[bool, tuple[int, ...], tuple[str, ...]]:
        """The breakpoints of `break_on`: failures, workers, and names of functions."""
        gate = self._queue.gate if self._queue is not None else Gate()
        workers, functions = sorted(gate.break_workers), sorted(gate.break_functions)
        return gate.break_failure, tuple(workers), tuple(functions)

    def cancel(self, value: Any) -> bool:
        """Cancel a queued or running closure. Its RemoteValue raises ``CancelledError``.

        Other closures are not cancelled, and ``join`` does not raise an error for it.

        Parameters
        ----------
        value : RemoteValue or int
            The result of ``schedule``, or its id in `values`.

        Returns
        -------
        bool
            False if the closure has ended already.
        """
        queue = self._require_queue("cancel")
        key = value if isinstance(value, int) else getattr(value, "_tfd_key", None)
        if not isinstance(value, int) and getattr(value, "_tfd_queue", None) is not queue:
            key = None  # a closure of an earlier coordinator, which used the same ids
        if key is None or isinstance(value, bool) or self._store.state_of(key) is None:
            raise UnknownName(
                f"unknown closure {value!r}",
                fix="pass the result of schedule(), or an id from coordinator.values",
            )
        return queue.cancel(key, "The function was cancelled by coordinator.cancel().")

    def stop(self) -> None:
        """Stop the coordinator permanently. Calls that wait for results raise at once."""
        if self._stopped:
            return
        self._stopped = True
        stopped = connection.stop(connection.cluster_of(self))
        self._value_follower.close()
        self._store.touch()
        if not stopped:
            with contextlib.suppress(TfdError):  # the agent may be lost, too
                self._serve_errors_for_lost_workers()
            connection.await_stopped(_STOP_SECONDS)

    @property
    def stopped(self) -> bool:
        """True if the coordinator was stopped."""
        return self._stopped

    @property
    def limit(self) -> Limit:
        """The current bottleneck of the coordinator."""
        return self._limit(self._tasks())

    def _limit(self, tasks: Sequence[TaskRow]) -> Limit:
        queue = self._queue
        if queue is None:
            return NOTHING
        closures_run = self._store, len(self._workers), queue.fetch_waits, queue.fetch_seconds
        cluster_state = tasks, self._ps_bytes(), queue.reads_input, bool(self.paused)
        return judge(*closures_run, *cluster_state, cluster=self._bound_cluster, coordinator=self)

    def row(self, tasks: Sequence[TaskRow] | None = None) -> CoordinatorRow:
        """Return the row of a snapshot. Without `tasks`, the tasks of the cluster are queried."""
        queue = self._queue
        current_tasks = self._tasks() if tasks is None else tasks
        return self._metrics.row(
            gate=None if queue is None else queue.gate,
            in_flight={} if queue is None else dict(queue.in_flight),
            stopped=self._stopped,
            workers=len(self._workers),
            counts=self.values.counts(),
            tasks=current_tasks,
            limit=lambda: self._limit(current_tasks),
            ps_bytes=self._ps_bytes,
        )

    @property
    def store(self) -> Store:
        """The records of the closures, in columns."""
        return self._store

    @contextlib.contextmanager
    def control(self) -> Iterator[None]:
        """Keep a live control open in a ``with`` block, which can resume this coordinator.

        Meanwhile, ``join`` without a timeout waits instead of raising `PausedError`.
        """
        queue = self._require_queue("control")
        queue.control(True)
        try:
            yield
        finally:
            queue.control(False)

    def control_for(self, seconds: float) -> None:
        """Keep a live control open for a few seconds, for a remote client such as a terminal.

        Parameters
        ----------
        seconds : float
            Duration. Infinity lasts until the next `resume`.

        See Also
        --------
        control
        """
        gate = self._require_queue("control_for").gate
        gate.controlled_until = max(gate.controlled_until, time.monotonic() + seconds)

    def _check_worker(self, i: int) -> int:
        count = len(self._workers)
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count:
            raise UnknownName(f"unknown worker {i!r}", fix=f"use 0 to {count - 1}")
        return i

    def _require_queue(self, method: str) -> closure_queue.WatchedQueue:
        if self._queue is None:
            raise Unsupported(
                f"{method} requires TensorFlow internals that this version lacks",
                fix="use TensorFlow 2.15 to 2.21; scheduling works without them",
            )
        if self._stopped:
            raise _stopped_error()
        return self._queue

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return views.coordinator_bundle(self.row())

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else f"paused ({self.paused})" if self.paused else "on"
        return f"<Coordinator {state}: {plural(len(self._workers), 'worker')}, {self.values!r}>"


def _check_reads(function: Any) -> None:
    """Raise NoWorkers if a concrete function would wait for elements of another process."""
    memory_datasets.check_sent(function, connection.worker_addresses())


def _stopped_error() -> StateError:
    return StateError("this coordinator is stopped", fix="create one: cluster.coordinator()")
