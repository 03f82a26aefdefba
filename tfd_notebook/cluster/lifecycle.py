"""The life of a cluster: start, changes of its tasks, and the ways in which it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable

from tfd_notebook import errors
from tfd_notebook.cluster import control_socket, registry
from tfd_notebook.cluster.adaptation_loop import Adaptation, check_bounds
from tfd_notebook.cluster.data_service import ClusterDataService
from tfd_notebook.cluster.servers import ClusterServers
from tfd_notebook.cluster.training import ParameterServerTraining
from tfd_notebook.cluster.watchdog import Watchdog
from tfd_notebook.data.bottleneck.advice import dataset_variable
from tfd_notebook.data.bottleneck.usage import use_in
from tfd_notebook.data.consume.observe import FEWER_WORKERS
from tfd_notebook.data.service.protocols import TaskEnvironment
from tfd_notebook.launchers import base
from tfd_notebook.model.events import ExpiryChanged, StateChanged
from tfd_notebook.model.spec import Role, check_count, check_timeout, count_name

_STOP_SECONDS = 10.0


class Lifecycle:
    """Starts, changes and ends the tasks of a `Cluster`.

    Parameters
    ----------
    servers : ClusterServers
    data_service : ClusterDataService
    training : ParameterServerTraining
    """

    def __init__(
        self,
        servers: ClusterServers,
        data_service: ClusterDataService,
        training: ParameterServerTraining,
    ) -> None:
        self._servers, self._data_service, self._training = servers, data_service, training
        self._monitor, self._task_manager = servers.monitor, servers.task_manager
        self._consumers = servers.consumers
        self._adaptation: Adaptation | None = None
        self._pid = os.getpid()
        #: True once the cluster has begun to end.
        self.is_ending = False
        self._ending_thread: threading.Thread | None = None
        self._has_ended = threading.Event()

    def start(self) -> None:
        """Start all tasks and return when they are ready.

        Raises
        ------
        StateError
            The cluster was stopped. Create a new `Cluster` instead.
        LaunchError
            A task failed to start. All tasks are stopped again.
        """
        with self._servers.lock:
            if self._monitor.state in ("ready", "degraded"):
                return
            if self._monitor.state != "new":
                raise errors.StateError(
                    f"cluster {self._servers.name!r} is {self._monitor.state} and cannot be "
                    "started again",
                    fix="create a new one with tfd.Cluster(...)",
                )
            self._data_service.task_environment = TaskEnvironment.now()
            self._start_monitoring()
            self._servers.notify_of_namesake()
            try:
                self._task_manager.start_all()
                if self.is_ending:
                    raise errors.LaunchError(
                        f"cluster {self._servers.name!r} was stopped while it started"
                    )
                if self._servers.policy.time_limit is not None:
                    self._monitor.apply(ExpiryChanged(self._servers.policy.time_limit))
            except BaseException as error:
                was_ending = self.is_ending
                self._end("failed")
                if was_ending:  # `stop` cannot see tasks that started after it
                    self._task_manager.close(_STOP_SECONDS)
                    # The error of a start that lost its agent has the cause of the loss.
                    if isinstance(error, errors.TfdError) and not self._monitor.why_lost:
                        notices = [notice.what for notice in self._monitor.snapshot().notices][-1:]
                        raise errors.LaunchError(
                            f"cluster {self._servers.name!r} ended while it started"
                            + "".join(f": {what}" for what in notices)
                        ) from None
                raise
            self._training.hide_gpus_from_kernel()
            self._monitor.apply(StateChanged("ready"))
            self._servers.store_description()

    def _start_monitoring(self) -> None:
        """Publish the cluster to other processes and start its monitor."""
        # Before the socket opens, because a cluster in the state "new" does not keep it open.
        self._monitor.apply(StateChanged("starting"))
        try:
            control_socket.ensure_started()
        except BaseException:
            self._monitor.apply(StateChanged("new"))
            raise
        registry.notify_cluster_start()
        policy, notice = self._servers.policy, self._servers.policy.time_limit_notice
        watchdog = Watchdog(
            self._task_manager,
            self._monitor,
            self._consumers,
            self._servers.policy.hang_seconds,
            # A limit that is shorter than that has no notice.
            0.0 if policy.time_limit is not None and policy.time_limit <= notice else notice,
            self._end,
        )

        def tick(stopped: str) -> None:
            watchdog(stopped)
            self._check_waiting()

        self._monitor.start(on_tick=tick)

    def _check_waiting(self) -> None:
        """Start the data workers whose hosts have joined the cluster, in another thread."""
        # Another change of the tasks may hold the lock for minutes.
        if self._monitor.state != "degraded" or not self._servers.lock.acquire(blocking=False):
            return
        try:
            if self._task_manager.has_joined():
                threading.Thread(
                    target=self._start_joined, name=f"tfd-join-{self._servers.name}", daemon=True
                ).start()
        finally:
            self._servers.lock.release()

    def _start_joined(self) -> None:
        with self._servers.lock:
            if self.is_ending or not self._task_manager.has_joined():
                return
            try:
                self._task_manager.start_joined()
            except errors.TfdError as error:
                self._monitor.notice(
                    "warning",
                    f"starting the data workers of a host that has joined failed: {error.what}",
                    fix=error.fix or "cluster.scale(data_workers=...) tries again",
                )
            finally:
                self._servers.store_description()

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
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        self._consumers.wait_idle(timeout)
        if self._training.has_coordinator:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._training.current_coordinator().join(left)
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
            A StateError also if a dataset exists whose elements a second data worker would join
            wrongly, or lose.
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
        if Role.DATA_WORKER in counts:
            self._stop_adaptation("scale has set it")
        with self._servers.lock:
            self._servers.require_running()
            ps_count = len(self._task_manager.rows_of(Role.PS))
            if counts.pop(Role.PS, ps_count) != ps_count:
                raise errors.Unsupported(
                    f"scaling from {ps_count} to {ps} ps failed: the variables of a running "
                    "cluster are placed on its parameter servers",
                    fix=f"save a checkpoint, create a new cluster with ps={ps}, restore it there",
                )
            if Role.DATA_WORKER in counts:
                self._check_reads(counts[Role.DATA_WORKER])
            try:
                self._training.scale(counts)
            finally:
                self._servers.store_description()
            if Role.DATA_WORKER in counts:
                self._warn_of_few_files(counts[Role.DATA_WORKER])

    def _warn_of_few_files(self, count: int) -> None:
        """Publish a notice for each dataset whose next epoch fails with `count` data workers."""
        for known in tuple(self._data_service.registered.values()):
            read = None if known.read is None else known.read()
            use = None if read is None else use_in(read)
            if use is not None and (failure := use.delivery.failure(count)):
                name = dataset_variable(read, "a distributed dataset")
                self._monitor.notice("warning", f"{name}: {failure}", fix=FEWER_WORKERS)

    def _check_reads(self, count: int) -> None:
        """Raise StateError for a dataset that `count` data workers would join wrongly, or lose."""
        present = len(self._data_service.data_workers())
        for name, consumer in self._consumers.running():
            use = None if consumer.meter is None else consumer.meter.use
            if use is None or consumer.state == "new":
                continue
            if use.cached and count < present:
                raise errors.StateError(
                    f"scaling to {count} data workers failed: {name} is being read, and each data "
                    "worker repeats the elements that it has cached. Those of one that leaves "
                    "would not arrive again",
                    fix="finish the epoch first, or cluster.interrupt(). Then call repeat() after "
                    "distribute",
                )
            if use.one_worker and count > max(1, present):
                raise errors.StateError(
                    f"scaling to {count} data workers failed: {name} is being read, and a second "
                    "data worker would join its elements wrongly, or lose some",
                    fix="finish the epoch first, or cluster.interrupt(). Then distribute the "
                    'dataset with semantics="same"',
                )
        if count <= max(1, present):
            return
        # A loop inside a tf.function does not check it before an epoch.
        registered = list(self._data_service.registered.values())
        alone = [each for known in registered for each in known.alone if each[0]() is not None]
        if alone:
            gc.collect()  # an iterator that was deleted can refer to its dataset
        for variant, change in alone:
            if variant() is not None:  # in no variable, because IPython keeps those of a traceback
                name = dataset_variable(variant(), "a dataset")
                raise errors.StateError(
                    f"scaling to {count} data workers failed: {name} exists, which was "
                    f"distributed to one data worker. {change}",
                    fix="delete the dataset, and distribute it again after scaling. With "
                    'semantics="same" or "tensorflow", it does not prevent scaling',
                )

    def adapt(self, minimum: int | None, maximum: int | None = None) -> None:
        """Adapt the number of data workers to the demand of the consumers in this process.

        Data workers are added about a second after a consumer begins to wait for data. They are
        removed after a cool-down in which fewer were enough. It lasts twice the start time of a
        data worker, and 5 seconds at least. Half of it is enough while nothing reads. Each
        decision is a notice with its reason.

        The number changes only while a stream or an observed dataset reads from the cluster. It
        is not reduced during an epoch that would lose elements by that. It is not changed at all
        during a finite epoch in mode ``"off"``. None is added while a dataset exists whose elements
        a second data worker would join wrongly. A second call sets a new range. `scale` ends it,
        and so does the end of this process: `tfd_notebook.attach` does not continue it.

        Parameters
        ----------
        minimum, maximum : int
            Range of the number of data workers, from 1. With a `minimum` of None, the current
            number is kept from now on.

        Raises
        ------
        UsageError
            Invalid range.
        StateError
            The cluster is not running, or its data is sharded by file or data.
        Unsupported
            The cluster was not started by tfd, or its launcher runs no data workers.
        Refused
            The policy of the administrator allows fewer tasks.
        """
        if minimum is None and maximum is None:
            self._stop_adaptation("adapt was ended")
            return
        bounds = check_bounds(self._servers, minimum, maximum)
        with self._servers.lock:
            self._servers.require_running()
            self._stop_adaptation()
            adaptation = Adaptation(self._servers, bounds, self._scale_data_workers)
            self._adaptation = adaptation
            adaptation.start()

    def _scale_data_workers(self, count: int) -> None:
        """Request `count` data workers, as long as their number adapts."""
        with self._servers.lock:
            if self._adaptation is None or self._adaptation.stopped or self.is_ending:
                return
            self._servers.require_running()
            self._check_reads(count)
            try:
                # Their start is not awaited, so that the next decision can follow meanwhile.
                self._task_manager.scale({Role.DATA_WORKER: count}, minimum=0)
            finally:
                self._servers.store_description()

    def _stop_adaptation(self, reason: str = "") -> None:
        if self._adaptation is not None:
            self._adaptation.stop(reason)

    def restart(self, task: str) -> None:
        """Start a new process for `task` on the same port. Returns when it is ready.

        Raises
        ------
        UnknownName
            The cluster has no such task.
        LaunchError
            The new process failed to start.
        """
        self._servers.require_running()
        self._task_manager.restart(task, {})

    def kill(self, task: str) -> int | None:
        """Kill the process of `task`, like a crash. The policy determines if it is restarted.

        Returns
        -------
        int or None
            The pid of the killed process, or None if the task had no process.
        """
        self._servers.require_running()
        return self._task_manager.task_host.kill(task)

    def interrupt(self) -> None:
        """Cancel all reads of this process from the cluster. The tasks keep running."""
        self._consumers.cancel_all(
            errors.Interrupted(
                f"reading from cluster {self._servers.name!r} was interrupted", fix="iterate again"
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
        if not self._servers.detached:
            self.stop()
        elif not self.ended:
            self._end("left")

    @property
    def ended(self) -> bool:
        """True if the cluster has ended, or if this process has left it."""
        return self._monitor.state in ("stopped", "failed", "lost", "left")

    def adopt(
        self,
        adopt: Callable[[base.OnEvent], tuple[base.TaskHost, base.AdoptedCluster]],
        connect: bool,
    ) -> None:
        """Manage tasks that are running already.

        Parameters
        ----------
        adopt : callable
            Connects to the tasks. It takes a function that it calls with their events.
        connect : bool
            Whether this process may coordinate the workers.
        """
        with self._servers.lock:
            self._start_monitoring()
            try:
                self._task_manager.adopt(*adopt(self._monitor.apply))
                if connect:
                    self._training.hide_gpus_from_kernel()
            except BaseException:
                self._end("left")
                raise
            self._monitor.apply(StateChanged("ready"))

    def _end(self, state: str) -> None:
        with registry.locked():
            if self.is_ending:
                return
            self.is_ending, self._ending_thread = True, threading.current_thread()
        self._stop_adaptation()
        if state not in ("lost", "left"):
            self._monitor.apply(StateChanged("stopping"))
        kind = errors.AgentLost if state == "lost" else errors.Interrupted
        why = f": {self._monitor.why_lost}" if state == "lost" else ""
        self._consumers.cancel_all(
            kind(
                f"cluster {self._servers.name!r} is {state}{why}",
                fix="create a new one: tfd.Cluster(...)",
            )
        )
        for stream in self._data_service.streams.values():
            with contextlib.suppress(errors.TfdError):
                stream.stop()
        self._training.stop_coordinator()
        if state == "stopped" and self._task_manager.is_external:
            state = "left"
        if state == "left":
            self._task_manager.detach()
        else:
            self._task_manager.close(_STOP_SECONDS)
        self._monitor.apply(StateChanged(state))
        if self._adaptation is not None:
            self._adaptation.join(_STOP_SECONDS)
        self._monitor.close()
        registry.remove_ended()
        control_socket.stop_if_unused()
        self._has_ended.set()
