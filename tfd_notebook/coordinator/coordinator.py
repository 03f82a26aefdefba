"""`Coordinator`: TensorFlow's ClusterCoordinator, watched, and with a hand on the brake."""

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
from tfd_notebook.errors import (
    StateError,
    TfdError,
    TimeLimit,
    UnknownName,
    Unsupported,
    UsageError,
)
from tfd_notebook.model.closure_gate import Gate
from tfd_notebook.model.closure_store import Store, function_names
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import CoordinatorRow, TaskRow

#: Seconds for a failure handler that waits for a lost worker to hear that it is gone.
_STOP_SECONDS = 5.0


class Coordinator(closure_queue.ClusterCoordinator):
    """Schedules functions on the workers of a cluster, where each of them can be followed.

    What TensorFlow promises of its class holds here, errors included: this is one, with more.
    Made by ``cluster.coordinator()``, which also connects it with the tables of a cluster. There is
    one for each strategy, which Keras uses, too. If TensorFlow has made it already, that object
    becomes one of this class.

    Parameters
    ----------
    strategy : tf.distribute.ParameterServerStrategy
    keep : int
        Closures of which all is known; of earlier ones only their number is. Default 200,000.

    Attributes
    ----------
    values : Values
        Every RemoteValue: ``counts()``, ``to_frame()``, ``value(id)``.

    Raises
    ------
    UsageError
        The strategy is not a ``ParameterServerStrategy``; this is a ValueError.
    StateError
        TensorFlow made its coordinator, and functions that it scheduled have not ended.

    See Also
    --------
    tf.distribute.coordinator.ClusterCoordinator
    """

    def __new__(cls, strategy: Any, keep: int = 200_000) -> Coordinator:
        if not adoption.is_supported(strategy):
            raise UsageError(
                f"invalid strategy {type(strategy).__name__}: a coordinator works with "
                "tf.distribute.ParameterServerStrategy only",
                fix="make one: cluster.strategy()",
            )
        existing = adoption.made_by_tensorflow(strategy)
        if existing is not None:
            return cls._adopt(existing, keep)
        made: Coordinator = super().__new__(cls, strategy)
        return made

    def __init__(self, strategy: Any, keep: int = 200_000) -> None:
        if connection.is_made(self):
            return
        self._prepare(keep)
        if self._queue is not None:
            closure_queue.with_queue(
                self._queue, lambda: super(Coordinator, self).__init__(strategy)
            )
        else:
            super().__init__(strategy)
        quieten(self._workers)

    def _prepare(self, keep: int) -> None:
        """Set what TensorFlow's class does not have."""
        self._store = Store(keep)
        self._outside = fallback.RemoteValueFollower(self._store)
        self._stopped = False
        self._tasks: Callable[[], Sequence[TaskRow]] = lambda: ()
        self._ps_bytes: Callable[[], Mapping[str, int]] = dict
        self._on_ps_lost: Callable[[str], None] = lambda tasks: None
        self._lost = False
        self._tell: Callable[[str, str], None] = lambda severity, what: None
        self._bury_lost: Callable[[], None] = lambda: None
        self._owner: object = None
        self._look = CoordinatorMetrics(self._store)
        #: Whether every transition is seen; otherwise only what can be told from outside.
        self.full = fallback.recognised()
        self._queue: closure_queue.WatchedQueue | None = None
        if self.full:
            self._queue = closure_queue.WatchedQueue(self._store, error_hints.explain)
        queue = self._queue
        self.values = Values(self._store, lambda: queue is not None and queue.gate.closed)

    @classmethod
    def _adopt(cls, made: Any, keep: int) -> Coordinator:
        """Make TensorFlow's coordinator one of this class: a strategy can have only one."""
        cls._prepare(made, keep)
        if made._queue is not None:
            adoption.replace_queue(connection.cluster_of(made), made._queue)
        made.__class__ = cls
        quieten(made._workers)
        return made  # type: ignore[no-any-return]

    def __del__(self) -> None:
        if connection.cluster_of(self) is not None:
            self.stop()

    @property
    def _workers(self) -> Sequence[Any]:
        workers: Sequence[Any] = connection.cluster_of(self).workers
        return workers

    def bind_cluster(
        self,
        tasks: Callable[[], Sequence[TaskRow]],
        ps_bytes: Callable[[], Mapping[str, int]],
        on_ps_lost: Callable[[str], None],
        tell: Callable[[str, str], None],
        serve_errors_for_lost_workers: Callable[[], None],
        cluster: object = None,
    ) -> None:
        """Connect the coordinator with its cluster: tasks, sizes of variables, and listeners.

        `serve_errors_for_lost_workers` starts error servers at the addresses of lost tasks. Advice
        names the variable that holds `cluster`.
        """
        self._tasks, self._ps_bytes, self._on_ps_lost = tasks, ps_bytes, on_ps_lost
        self._tell, self._bury_lost = tell, serve_errors_for_lost_workers
        self._owner = cluster

    # TensorFlow's

    def schedule(self, fn: Any, args: Any = None, kwargs: Any = None) -> Any:
        """Queue `fn` for any worker and return its RemoteValue at once, as TensorFlow does.

        Another thread may call this during `join`, which then waits for that closure, too.

        Raises
        ------
        TypeError
            `fn` is no ``tf.function``.
        ValueError
            A RemoteValue is among the arguments.
        StateError
            The coordinator is stopped.
        PausedError
            It is paused, and its queue (262,144 closures) is full.
        Exception
            The error of a closure that was scheduled before.
        """
        if self._stopped:
            raise StateError("this coordinator is stopped", fix="cluster.coordinator() makes one")
        args, kwargs = closure_queue.with_defaults(fn, args, kwargs)
        try:
            value = super().schedule(fn, args=args, kwargs=kwargs)
        except BaseException as error:
            self._explain(error)
            raise
        finally:
            # TensorFlow leaves the strategy in this state when tracing fails.
            if closure_queue.is_tracing_left(self.strategy):
                closure_queue.end_tracing(self.strategy)
        if not self.full:
            self._outside.watch(fn, value)
        return value

    def join(self, timeout: float | None = None) -> None:
        """Wait until all closures have ended; answers Ctrl-C.

        Parameters
        ----------
        timeout : float, optional
            Seconds. Default: no limit.

        Raises
        ------
        PausedError
            Without a limit: the coordinator is paused, nothing runs any more, and no live control
            is open that could resume it.
        TimeLimit
            Closures still wait or run after `timeout` seconds.
        Exception
            The error of a closure; the others are cancelled then, and nothing runs any more.
        """
        if timeout is not None and (isinstance(timeout, bool) or not timeout >= 0):
            raise UsageError(f"timeout={timeout!r} must be 0 or more seconds")
        try:
            ended = self._wait(timeout)
        except BaseException as error:
            self._explain(error)
            raise
        if not ended:
            waiting, running = self._store.unfinished()
            raise TimeLimit(
                f"after {timeout:g} s {waiting} closure(s) wait and {running} run",
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
        """Have a thread `join`; what came of it is in the object returned, and in a notice.

        While the coordinator is paused that thread waits: the caller is free to resume.

        Parameters
        ----------
        timeout : float, optional
            Seconds. Default: no limit.

        Returns
        -------
        Joining
            With ``state``, ``error`` and ``wait(timeout)``.
        """
        self._watched("join_in_background")
        return BackgroundJoin(self, timeout, self._tell)

    def done(self) -> bool:
        """Whether all closures have ended.

        Raises
        ------
        Exception
            The error of a closure; the others are cancelled then.
        """
        try:
            return bool(super().done())
        except BaseException as error:
            self._explain(error)
            raise

    def fetch(self, val: Any) -> Any:
        """Return the results of a RemoteValue or of a structure of them, and wait for them.

        Raises
        ------
        PausedError
            The coordinator is paused, and nobody is there to resume it.
        Exception
            The error of a closure.
        """
        try:
            return super().fetch(val)
        except BaseException as error:
            self._explain(error)
            raise

    def _explain(self, error: BaseException) -> None:
        if error_hints.explain(error) and error_hints.is_loss(error) and not self._lost:
            self._lost = True
            self._on_ps_lost(error_hints.lost_tasks(error))

    # Stepping

    def pause(self, reason: str = "by request") -> None:
        """Give no closure to any worker from now on; those that run go on to their end.

        Parameters
        ----------
        reason : str
            Who asks, for those who see it paused.
        """
        self._watched("pause").pause(reason)

    def resume(self) -> None:
        """Go on; breakpoints and workers that are paused on their own stay."""
        self._watched("resume").resume()

    @property
    def paused(self) -> str:
        """Why nothing moves: by request, or what a breakpoint met; empty while all moves."""
        return self._queue.gate.reason if self._queue is not None else ""

    def step(self, n: int = 1, timeout: float | None = 60.0) -> int:
        """Let the next `n` closures run, and wait until they have ended.

        Parameters
        ----------
        n : int
            Default 1. With fewer in the queue, these.
        timeout : float, optional
            Seconds to wait; they run on afterwards. Default 60; 0 does not wait, None waits for
            ever.

        Returns
        -------
        int
            How many of them have ended.

        Raises
        ------
        UsageError
            `n` is not 1 or more.
        StateError
            The coordinator is not paused.
        """
        return self._watched("step").step(n, timeout)

    def pause_worker(self, i: int) -> None:
        """Give no closure to worker `i` from now on."""
        self._watched("pause_worker").hold(self._worker(i), True)

    def resume_worker(self, i: int) -> None:
        """Give closures to worker `i` again."""
        self._watched("resume_worker").hold(self._worker(i), False)

    @property
    def paused_workers(self) -> tuple[int, ...]:
        """The workers that get no closure."""
        return tuple(sorted(self._queue.gate.workers)) if self._queue is not None else ()

    def break_on(
        self,
        failure: bool = True,
        worker: int | Iterable[int] | None = None,
        function: Any = None,
    ) -> None:
        """Pause by itself at certain closures; replaces what was set before.

        Parameters
        ----------
        failure : bool
            When a closure fails: the others stay as they are until the next ``schedule``, ``join``
            or ``done``, which raises the error. A ``join`` that runs already raises it at once, or,
            where somebody is there who can resume, when that one does. Default true.
        worker : int or iterable of int, optional
            Before a closure goes to one of these workers.
        function : tf.function, str or iterable, optional
            Before a closure of one of these functions runs.
        """
        queue = self._watched("break_on")
        workers = () if worker is None else (worker,) if isinstance(worker, int) else worker
        names = function_names(function)
        queue.break_on(bool(failure), {self._worker(i) for i in workers}, names)

    @property
    def breakpoints(self) -> tuple[bool, tuple[int, ...], tuple[str, ...]]:
        """What `break_on` set: whether failures, which workers, functions of which names."""
        gate = self._queue.gate if self._queue is not None else Gate()
        workers, functions = sorted(gate.break_workers), sorted(gate.break_functions)
        return gate.break_failure, tuple(workers), tuple(functions)

    def cancel(self, value: Any) -> bool:
        """Cancel a closure that is queued or runs; its RemoteValue raises ``CancelledError``.

        Nobody else's closure is cancelled, and it is no error of ``join``.

        Parameters
        ----------
        value : RemoteValue or int
            What ``schedule`` returned, or its id in `values`.

        Returns
        -------
        bool
            False if it has ended already.
        """
        queue = self._watched("cancel")
        key = value if isinstance(value, int) else getattr(value, "_tfd_key", None)
        if not isinstance(value, int) and getattr(value, "_tfd_queue", None) is not queue:
            key = None  # of an earlier coordinator, whose numbers were the same
        if key is None or isinstance(value, bool) or self._store.state_of(key) is None:
            raise UnknownName(
                f"{value!r} is no closure of this coordinator",
                fix="pass what schedule() returned, or an id of coordinator.values",
            )
        return queue.cancel(key, "The function was cancelled by coordinator.cancel().")

    def stop(self) -> None:
        """Stop for good: nothing runs any more, and who waits for a result is told at once."""
        if self._stopped:
            return
        self._stopped = True
        stopped = connection.stop(connection.cluster_of(self))
        self._outside.close()
        if not stopped:
            with contextlib.suppress(TfdError):  # the agent may be gone, too
                self._bury_lost()
            connection.await_stopped(_STOP_SECONDS)

    @property
    def stopped(self) -> bool:
        """Whether it was stopped."""
        return self._stopped

    @property
    def limit(self) -> Limit:
        """Why it is not faster, in one sentence."""
        return self._limit(self._tasks())

    def _limit(self, tasks: Sequence[TaskRow]) -> Limit:
        queue = self._queue
        if queue is None:
            return NOTHING
        closures_run = self._store, len(self._workers), queue.fetch_waits, queue.fetch_seconds
        surroundings = tasks, self._ps_bytes(), queue.reads_input, bool(self.paused)
        return judge(*closures_run, *surroundings, cluster=self._owner, coordinator=self)

    def row(self, tasks: Sequence[TaskRow] | None = None) -> CoordinatorRow:
        """Return the coordinator as it is now, for a snapshot.

        Parameters
        ----------
        tasks : sequence of TaskRow, optional
            Those of its cluster, where they are at hand.
        """
        queue = self._queue
        known = self._tasks() if tasks is None else tasks
        return self._look.row(
            gate=None if queue is None else queue.gate,
            in_flight={} if queue is None else dict(queue.in_flight),
            stopped=self._stopped,
            workers=len(self._workers),
            counts=self.values.counts(),
            tasks=known,
            limit=lambda: self._limit(known),
            ps_bytes=self._ps_bytes,
        )

    @property
    def store(self) -> Store:
        """What is known of every closure, in columns."""
        return self._store

    @contextlib.contextmanager
    def control(self) -> Iterator[None]:
        """Say, in a ``with`` block, that somebody can resume this coordinator meanwhile.

        ``join`` without a limit waits for that somebody then, instead of raising `PausedError`.
        """
        queue = self._watched("control")
        queue.control(True)
        try:
            yield
        finally:
            queue.control(False)

    def control_for(self, seconds: float) -> None:
        """Say that somebody afar, such as a terminal, can resume this for so many seconds more.

        Parameters
        ----------
        seconds : float
            May be infinite: until the next `resume`.

        See Also
        --------
        control
        """
        gate = self._watched("control_for").gate
        gate.controlled_until = max(gate.controlled_until, time.monotonic() + seconds)

    def _worker(self, i: int) -> int:
        count = len(self._workers)
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count:
            raise UnknownName(f"there is no worker {i!r}", fix=f"the workers are 0 to {count - 1}")
        return i

    def _watched(self, what: str) -> closure_queue.WatchedQueue:
        if self._queue is None:
            raise Unsupported(
                f"{what} needs hooks into TensorFlow that this version may not have",
                fix="use TensorFlow 2.15 to 2.21; scheduling works without them",
            )
        if self._stopped:
            raise StateError("this coordinator is stopped", fix="cluster.coordinator() makes one")
        return self._queue

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return views.coordinator_bundle(self.row())

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else f"paused ({self.paused})" if self.paused else "on"
        return f"<Coordinator {state}: {len(self._workers)} workers, {self.values!r}>"
