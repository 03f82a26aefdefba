"""`Cluster`: a group of TensorFlow server processes that a user starts and controls."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tfd_notebook import errors
from tfd_notebook.cluster import control_socket, registry
from tfd_notebook.cluster.config import build_config
from tfd_notebook.cluster.handles import ClusterDispatcher, TaskHandle
from tfd_notebook.cluster.lease import LeasedCluster
from tfd_notebook.cluster.watchdog import Watchdog
from tfd_notebook.data.service.protocols import TaskEnvironment
from tfd_notebook.launchers import base
from tfd_notebook.model.spec import (
    ClusterConfig,
    Policy,
    Role,
    Service,
    check_count,
    count_name,
    is_same,
)
from tfd_notebook.net.clock import Deadline

if TYPE_CHECKING:
    pass

_STOP_SECONDS = 10.0


class Cluster(LeasedCluster):
    """A cluster of TensorFlow servers, started by a launcher and supervised from this process.

    The tasks form a tf.data service, a parameter server training, or both.

    The same call again returns the running cluster, so a cell can be run repeatedly. A cluster
    ends by `stop`, at the end of its ``with`` block, at its time limit or when its kernel exits.
    Rebinding the variable does not end it. After `detach`, it outlives the block and the kernel.

    Parameters
    ----------
    data_workers : int
        Number of tf.data service workers. Default 0. The first one adds the dispatcher. Without
        any task, as in ``Cluster()``, only a dispatcher is started.
    workers, ps : int
        Number of training workers and of parameter servers. Each is a ``tf.distribute.Server``.
        Default 0. ``ParameterServerStrategy`` needs at least one of each.
    evaluator : bool
        Whether to start an evaluator. It is a ``tf.distribute.Server`` in a separate cluster
        specification. Default false.
    gpus : {"auto", 0}, list of int or mapping
        The GPUs that the workers see on their host. ``"auto"`` (default) divides all of them
        evenly and 0 gives none. A list gives GPUs by index, numbered as in ``nvidia-smi``. A
        mapping gives counts per task: ``{"worker": 1, "evaluator": 1}``. Every worker gets the
        same number; a role that the mapping omits gets none. If the cluster has workers and
        parameter servers, the kernel itself does not use the GPUs. Otherwise it keeps its view.
    launcher : str or Launcher
        Where the tasks run. Default ``"local"`` (child processes). Also ``"inprocess"``, another
        name from ``%tfd_cluster launchers``, or an object from `tfd_notebook.launchers`.
    name : str, optional
        Up to 64 letters, digits, ``.``, ``_`` and ``-``. Default ``"cluster"``.
    if_exists : {"reuse", "replace", "error"}
        What to do if a cluster of that name is running. ``"reuse"`` (default) returns it if its
        specification is the same, ``"replace"`` stops it first, and ``"error"`` raises
        `NameTaken`.
    env : mapping of str to str, optional
        Environment variables for the tasks, in addition to the kernel's environment at the start.
    preload : iterable of str
        Modules and op libraries (``*.so``) that each task loads before its server starts.
    policy : Policy
        Restarts, timeouts and other supervision of the tasks.
    service : Service
        Configuration of the tf.data service.
    start : bool
        Whether to start at once. Default true; otherwise call `start`.

    Raises
    ------
    UsageError
        Invalid argument.
    NameTaken
        A cluster of that name is running with another specification.
    LaunchError
        A task failed to start. All tasks are stopped again.

    See Also
    --------
    tf.data.experimental.service, tf.distribute.Server : The underlying TensorFlow APIs.
    """

    def __new__(
        cls, *, name: str | None = None, if_exists: str = "reuse", **options: Any
    ) -> Cluster:
        if if_exists not in ("reuse", "replace", "error"):
            raise errors.UsageError(
                f"invalid if_exists {if_exists!r}", fix="use reuse, replace or error"
            )
        config, launcher = build_config(name, options)
        stopped: Cluster | None = None
        while True:
            with registry.locked() as known:
                existing = registry.clusters().get(config.name)
                if existing is None or existing is stopped:
                    cluster = super().__new__(cls)
                    cluster._initialize(config, launcher)
                    known[config.name] = cluster
                    return cluster
                if not existing._is_ending and if_exists != "replace":
                    same = is_same(existing._config, config)
                    if if_exists == "error" or not same:
                        raise errors.NameTaken(
                            f"cluster {config.name!r} is already running"
                            + ("" if same else " with another specification"),
                            fix="scale that cluster (cluster.scale, %tfd_cluster scale), stop it, "
                            'pass if_exists="replace", or choose another name=',
                        )
                    return existing
            # Not under the lock: the thread that ends the cluster acquires it.
            existing.stop()
            stopped = existing

    def __init__(
        self,
        *,
        data_workers: int = 0,
        workers: int = 0,
        ps: int = 0,
        evaluator: bool = False,
        gpus: str | int | Iterable[int] | Mapping[str, int] = "auto",
        launcher: str | base.Launcher = "local",
        name: str | None = None,
        if_exists: str = "reuse",
        env: Mapping[str, str] | None = None,
        preload: Iterable[str] = (),
        policy: Policy | None = None,
        service: Service | None = None,
        start: bool = True,
    ) -> None:
        if start and self.state == "new":
            self.start()

    #: Without this, `inspect.signature` shows the parameters of `__new__`, which names only two.
    __signature__ = inspect.signature(__init__).replace(
        parameters=list(inspect.signature(__init__).parameters.values())[1:]
    )

    def _initialize(self, config: ClusterConfig, launcher: base.Launcher) -> None:
        super()._initialize(config, launcher)
        self._pid = os.getpid()
        self._is_ending = False
        self._ending_thread: threading.Thread | None = None
        self._has_ended = threading.Event()
        for role, count in config.counts.items():
            self._monitor.plan(role, count)
        # atexit runs callbacks in reverse order: register again, to run before the launchers'.
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)

    # Start and end

    def start(self) -> Cluster:
        """Start all tasks and return when they are ready.

        Raises
        ------
        StateError
            The cluster was stopped. Create a new `Cluster` instead.
        LaunchError
            A task failed to start. All tasks are stopped again.
        """
        with self._lock:
            if self.state in ("ready", "degraded"):
                return self
            if self.state != "new":
                raise errors.StateError(
                    f"cluster {self.name!r} is {self.state} and cannot be started again",
                    fix="create a new one with tfd.Cluster(...)",
                )
            self._environment = TaskEnvironment.now()
            self._start_monitoring()
            self._notify_of_detached_namesake()
            try:
                self._task_manager.start_all()
                if self._is_ending:
                    raise errors.LaunchError(f"cluster {self.name!r} was stopped while it started")
                if self.policy.time_limit is not None:
                    self._monitor.expires = Deadline(self.policy.time_limit)
            except BaseException as error:
                was_ending = self._is_ending
                self._end("failed")
                if was_ending:  # `stop` cannot see tasks that started after it
                    self._task_manager.close(_STOP_SECONDS)
                    if isinstance(error, errors.TfdError):
                        notices = [notice.what for notice in self._monitor.snapshot().notices][-1:]
                        raise errors.LaunchError(
                            f"cluster {self.name!r} ended while it started"
                            + "".join(f": {what}" for what in notices)
                        ) from None
                raise
            self._hide_gpus_from_kernel()
            self._monitor.set_state("ready")
            self._store_description()
        return self

    def _start_monitoring(self) -> None:
        """Publish the cluster to other processes and start its monitor."""
        control_socket.ensure_started()
        registry.notify_cluster_start()
        self._monitor.set_state("starting")
        watchdog = Watchdog(
            self._task_manager, self._monitor, self._consumers, self.policy.hang_seconds, self._end
        )
        self._monitor.start(on_tick=watchdog)

    @classmethod
    def _from_running_tasks(
        cls,
        config: ClusterConfig,
        launcher: base.Launcher,
        adopt: Callable[[Cluster], tuple[base.Node, Mapping[str, Any]]],
    ) -> Cluster:
        """Return a cluster of tasks that are running already.

        `adopt` connects to the tasks and sends their events to the cluster's monitor.
        """
        with registry.locked() as known:
            if config.name in registry.clusters():
                raise errors.NameTaken(
                    f"another cluster {config.name!r} is running in this process",
                    fix="stop or leave that cluster first",
                )
            cluster = object.__new__(cls)
            cluster._initialize(config, launcher)
            known[config.name] = cluster
        with cluster._lock:
            cluster._start_monitoring()
            try:
                cluster._adopt_tasks(*adopt(cluster))
            except BaseException:
                cluster._end("left")
                raise
            cluster._monitor.set_state("ready")
        return cluster

    def stop(self) -> None:
        """Stop the streams, then all tasks. No-op if the cluster is already stopped.

        Workers and evaluator stop first, then parameter servers, data workers and the dispatcher.

        Consumers blocked in this process raise `Interrupted`. If another thread is already
        stopping the cluster, this call waits until it has finished.
        """
        if os.getpid() == self._pid and not self.ended:
            self._end("stopped")
            if threading.current_thread() is not self._ending_thread:
                self._has_ended.wait(2 * _STOP_SECONDS)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until no consumer reads from the cluster and all closures have finished.

        Ctrl-C interrupts the wait.

        Parameters
        ----------
        timeout : float, optional
            Seconds. Default: no limit.

        Returns
        -------
        bool
            True.

        Raises
        ------
        TimeLimit
            After `timeout` seconds, a consumer still reads, or a closure is queued or running.
        PausedError
            No timeout is set and the coordinator is paused; see its `join`.
        Exception
            The error of a closure.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._consumers.wait_idle(timeout)
        if self.has_coordinator:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self.present_coordinator().join(left)
        return True

    def scale(
        self,
        *,
        data_workers: int | None = None,
        workers: int | None = None,
        ps: int | None = None,
    ) -> None:
        """Change the number of tasks. Returns when new tasks are ready.

        Tasks with the highest index are removed first.

        Parameters
        ----------
        data_workers : int, optional
            Elements that a removed worker has buffered for a running epoch are not delivered. A
            notice reports this. The first data worker also adds the dispatcher.
        workers : int, optional
            An added worker can reach all others. It gets the same number of GPUs as they have.
        ps : int, optional
            Cannot change while the cluster is running.

        Raises
        ------
        UsageError, StateError, LaunchError
        Unsupported
            The number of parameter servers would change. Variables are placed on them.
        """
        requested = {Role.DATA_WORKER: data_workers, Role.WORKER: workers, Role.PS: ps}
        counts = {
            role: check_count(count_name(role), count)
            for role, count in requested.items()
            if count is not None
        }
        if not counts:
            raise errors.UsageError(
                "scale needs the number of tasks of a role", fix="cluster.scale(data_workers=4)"
            )
        with self._lock:
            self._require_running()
            ps_count = len(self._task_manager.rows_of(Role.PS))
            if counts.pop(Role.PS, ps_count) != ps_count:
                raise errors.Unsupported(
                    f"scaling from {ps_count} to {ps} ps failed: the variables of a running "
                    "cluster are placed on its parameter servers",
                    fix=f"save a checkpoint, create a new cluster with ps={ps}, restore it there",
                )
            self._scale(counts)

    def restart(self, task: str) -> None:
        """Start a new process for `task` on the same port. Returns when it is ready.

        Raises
        ------
        UnknownName
            The cluster has no such task.
        LaunchError
            The new process failed to start.
        """
        self._require_running()
        self._task_manager.restart(task, {})

    def kill(self, task: str) -> int | None:
        """Kill the process of `task`, like a crash. The policy determines if it is restarted.

        Returns
        -------
        int or None
            The pid of the killed process, or None if the task had no process.
        """
        self._require_running()
        pid: int | None = self._task_manager.ask("kill", task=task)
        return pid

    def interrupt(self) -> None:
        """Cancel all reads of this process from the cluster. The tasks keep running."""
        self._consumers.cancel_all(
            errors.Interrupted(
                f"reading from cluster {self.name!r} was interrupted", fix="iterate again"
            )
        )

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the cluster has ended and return True, or False after `timeout` seconds.

        Ctrl-C interrupts the wait.
        """
        limit = float("inf") if timeout is None else timeout
        return self._monitor.wait(lambda _: self.ended, limit)

    def leave(self) -> None:
        """Disconnect this process from a detached cluster. Otherwise, stop the cluster.

        The tasks of a detached cluster keep running. Consumers in this process raise
        `Interrupted`, and the coordinator stops. `tfd_notebook.attach` connects again.
        """
        if os.getpid() != self._pid:
            return  # in a forked child, the cluster belongs to the parent
        if not self.detached:
            self.stop()
        elif not self.ended:
            self._end("left")

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.leave()

    # State

    @property
    def ended(self) -> bool:
        """True if the cluster has ended, or if this process has left it."""
        return self.state in ("stopped", "failed", "lost", "left")

    @property
    def tasks(self) -> tuple[TaskHandle, ...]:
        """The current tasks, the dispatcher first."""
        return tuple(
            TaskHandle(
                row.task,
                row.role,
                row.state,
                row.address,
                row.pid,
                self._task_manager,
                self._worker_limit,
            )
            for row in self.snapshot().tasks
        )

    @property
    def dispatcher(self) -> ClusterDispatcher:
        """The dispatcher, with the contract of TensorFlow's ``DispatchServer``.

        Raises
        ------
        StateError
            The cluster has no data worker, and therefore no dispatcher.
        """
        self._require_dispatcher()
        return ClusterDispatcher(self)

    def command(self, work: Callable[[], Any]) -> None:
        """Call `work` in the monitor's thread. An exception becomes a notice."""
        self._monitor.command(work)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from tfd_notebook import views

        return views.mimebundle(self.snapshot())

    def __repr__(self) -> str:
        snapshot = self.snapshot()
        ready = ", ".join(f"{count} {role}" for role, count in snapshot.observed.items())
        state = f"{snapshot.state} on {snapshot.launcher}"
        return f"<Cluster {self.name!r} {state}: {ready or 'no task'} ready>"

    # Internals

    def _end(self, state: str) -> None:
        with registry.locked():
            if self._is_ending:
                return
            self._is_ending, self._ending_thread = True, threading.current_thread()
        if state not in ("lost", "left"):
            self._monitor.set_state("stopping")
        kind = errors.AgentLost if state == "lost" else errors.Interrupted
        why = f": {self._monitor.why_lost}" if state == "lost" else ""
        self._consumers.cancel_all(
            kind(f"cluster {self.name!r} is {state}{why}", fix="create a new one: tfd.Cluster(...)")
        )
        for stream in self._streams.values():
            with contextlib.suppress(errors.TfdError):
                stream.stop()
        self._stop_coordinator()
        if state == "stopped" and self._task_manager.is_foreign:
            state = "left"
        if state == "left":
            self._task_manager.leave()
        else:
            self._task_manager.close(_STOP_SECONDS)
        self._monitor.set_state(state)
        self._monitor.close()
        with registry.locked() as known:
            if known.get(self.name) is self:
                del known[self.name]
            last = not registry.running_clusters()
        if last:
            control_socket.stop()
        self._has_ended.set()


def _stop_all() -> None:
    for cluster in registry.clusters().values():
        with contextlib.suppress(Exception):
            cluster.leave()
