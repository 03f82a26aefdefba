"""`Cluster`: the one object that a user holds."""

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
    """Tasks of TensorFlow's distributed runtime that run where the launcher puts them.

    They are a tf.data service, or the workers and parameter servers of a training, or both.

    Running the same call again returns the cluster that lives already, so that a cell can be run
    twice. A cluster ends by `stop`, at the end of a ``with`` block, at its time limit or with its
    kernel; never because a variable was bound anew. After `detach` it outlives block and kernel.

    Parameters
    ----------
    data_workers : int
        How many tf.data service workers to start. Default 0. With them comes the service's
        dispatcher; a cluster without any task but it is what ``Cluster()`` makes.
    workers, ps : int
        How many training workers and parameter servers to start, each a
        ``tf.distribute.Server``. Default 0. ``ParameterServerStrategy`` needs some of both.
    evaluator : bool
        Whether to start an evaluator, a ``tf.distribute.Server`` that is a cluster of its own.
        Default false.
    gpus : {"auto", 0}, list of int or mapping
        Which GPUs of their host the workers see: all, evenly (the default), none, those of these
        numbers (as ``nvidia-smi`` counts), or so many each: ``{"worker": 1, "evaluator": 1}``.
        Every worker gets as many as the others; what is not named here gets none. The kernel
        leaves them to the workers where those have parameter servers, and keeps its view otherwise.
    launcher : str or Launcher
        Where the tasks run: ``"local"`` (child processes, the default), ``"inprocess"``, or
        another name from ``%tfd_cluster launchers``, or an object from `tfd_notebook.launchers`.
    name : str, optional
        Up to 64 letters, digits, ``.``, ``_`` and ``-``. Default ``"cluster"``.
    if_exists : {"reuse", "replace", "error"}
        What to do when a cluster of that name lives: use it if its specification is the same
        (the default), stop it first, or raise `NameTaken`.
    env : mapping of str to str, optional
        Variables for the tasks, besides the kernel's environment as it is at the start.
    preload : iterable of str
        Modules and op libraries (``*.so``) that each task loads before its server starts.
    policy : Policy
        How the tasks are looked after.
    service : Service
        How the tf.data service is set up.
    start : bool
        Whether to start at once. Default true; otherwise call `start`.

    Raises
    ------
    UsageError
        An argument cannot be meant.
    NameTaken
        A cluster of that name lives with another specification.
    LaunchError
        A task did not come up; nothing is left running then.

    See Also
    --------
    tf.data.experimental.service, tf.distribute.Server : TensorFlow's side of it.
    """

    def __new__(
        cls, *, name: str | None = None, if_exists: str = "reuse", **options: Any
    ) -> Cluster:
        if if_exists not in ("reuse", "replace", "error"):
            raise errors.UsageError(
                f"if_exists={if_exists!r} is not known", fix="use reuse, replace or error"
            )
        config, launcher = build_config(name, options)
        stopped: Cluster | None = None
        while True:
            with registry.locked() as known:
                living = registry.clusters().get(config.name)
                if living is None or living is stopped:
                    made = super().__new__(cls)
                    made._initialize(config, launcher)
                    known[config.name] = made
                    return made
                if not living._is_ending and if_exists != "replace":
                    same = is_same(living._config, config)
                    if if_exists == "error" or not same:
                        raise errors.NameTaken(
                            f"a cluster {config.name!r} lives already"
                            + ("" if same else ", with another specification"),
                            fix="scale that one (cluster.scale, %tfd_cluster scale), stop it, pass "
                            'if_exists="replace", or give this one another name=',
                        )
                    return living
            # Without the lock: whoever ends it needs it, too.
            living.stop()
            stopped = living

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

    #: `inspect.signature` would show the parameters of `__new__`, which reads only two of them.
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
        # Registered anew, to be called before what launchers registered meanwhile.
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)

    # Life

    def start(self) -> Cluster:
        """Start all tasks and return when they are ready.

        Raises
        ------
        StateError
            If the cluster was stopped: a new one is a new object.
        LaunchError
            A task did not come up; nothing is left running then.
        """
        with self._lock:
            if self.state in ("ready", "degraded"):
                return self
            if self.state != "new":
                raise errors.StateError(
                    f"cluster {self.name!r} is {self.state} and cannot be started again",
                    fix="make a new one with tfd.Cluster(...)",
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
                ended = self._is_ending
                self._end("failed")
                if ended:  # what came up since then is not to stay
                    self._task_manager.close(_STOP_SECONDS)
                    if isinstance(error, errors.TfdError):
                        why = [notice.what for notice in self._monitor.snapshot().notices][-1:]
                        raise errors.LaunchError(
                            f"cluster {self.name!r} ended while it started"
                            + "".join(f": {what}" for what in why)
                        ) from None
                raise
            self._hide_gpus_from_kernel()
            self._monitor.set_state("ready")
            self._store_description()
        return self

    def _start_monitoring(self) -> None:
        """Be seen, and look after what there is."""
        control_socket.ensure_started()
        registry.notify_cluster_start()
        self._monitor.set_state("starting")
        upkeep = Watchdog(
            self._task_manager, self._monitor, self._consumers, self.policy.hang_seconds, self._end
        )
        self._monitor.start(on_tick=upkeep)

    @classmethod
    def _from_running_tasks(
        cls,
        config: ClusterConfig,
        launcher: base.Launcher,
        adopt: Callable[[Cluster], tuple[base.Node, Mapping[str, Any]]],
    ) -> Cluster:
        """Return a cluster whose tasks run already; `adopt` finds them, and has it told of them."""
        with registry.locked() as known:
            if config.name in registry.clusters():
                raise errors.NameTaken(
                    f"another cluster {config.name!r} lives in this process",
                    fix="stop or leave that one first",
                )
            made = object.__new__(cls)
            made._initialize(config, launcher)
            known[config.name] = made
        with made._lock:
            made._start_monitoring()
            try:
                made._adopt_tasks(*adopt(made))
            except BaseException:
                made._end("left")
                raise
            made._monitor.set_state("ready")
        return made

    def stop(self) -> None:
        """Stop streams, then all tasks; does nothing when already stopped.

        Workers and evaluator go first, then parameter servers, data workers, the dispatcher.

        Consumers that are blocked in this process get `Interrupted`. Where somebody else stops it
        already, this waits until that is done.
        """
        if os.getpid() == self._pid and not self.ended:
            self._end("stopped")
            if threading.current_thread() is not self._ending_thread:
                self._has_ended.wait(2 * _STOP_SECONDS)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until nothing reads from the cluster, and no closure waits or runs, any more.

        Answers Ctrl-C.

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
            Something still reads, or a closure waits or runs, after `timeout` seconds.
        PausedError
            Without a limit: the coordinator is paused, see its `join`.
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
        """Have so many tasks from now on; returns when new ones are ready.

        Those that go are the ones with the highest index.

        Parameters
        ----------
        data_workers : int, optional
            What workers that go had buffered for an epoch that runs is not delivered; a notice
            says so. The first data worker brings the dispatcher with it.
        workers : int, optional
            A worker that is added knows all others; each gets as many GPUs as those that run.
        ps : int, optional
            Cannot change while the cluster lives.

        Raises
        ------
        UsageError, StateError, LaunchError
        Unsupported
            Another number of parameter servers, over which variables are laid out.
        """
        wishes = {Role.DATA_WORKER: data_workers, Role.WORKER: workers, Role.PS: ps}
        counts = {
            role: check_count(count_name(role), count)
            for role, count in wishes.items()
            if count is not None
        }
        if not counts:
            raise errors.UsageError("scale to how many?", fix="cluster.scale(data_workers=4)")
        with self._lock:
            self._require_running()
            living = len(self._task_manager.rows_of(Role.PS))
            if counts.pop(Role.PS, living) != living:
                raise errors.Unsupported(
                    f"the {living} ps of a cluster that lives cannot become {ps}: variables are "
                    "laid out over them",
                    fix=f"save a checkpoint, make a new cluster with ps={ps}, restore it there",
                )
            self._scale(counts)

    def restart(self, task: str) -> None:
        """Start a fresh process for `task` on its own port; returns when it is ready.

        Raises
        ------
        UnknownName
            There is no such task.
        LaunchError
            It did not come up.
        """
        self._require_running()
        self._task_manager.restart(task, {})

    def kill(self, task: str) -> int | None:
        """Kill the process of `task` as a crash would; the policy decides what follows.

        Returns
        -------
        int or None
            The pid that was killed; None if the task had no process.
        """
        self._require_running()
        pid: int | None = self._task_manager.ask("kill", task=task)
        return pid

    def interrupt(self) -> None:
        """Cancel every read that this process does from the cluster; its tasks live on."""
        self._consumers.cancel_all(
            errors.Interrupted(
                f"reading from cluster {self.name!r} was interrupted", fix="iterate again"
            )
        )

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the cluster has ended; False after `timeout` seconds. Answers Ctrl-C."""
        limit = float("inf") if timeout is None else timeout
        return self._monitor.wait(lambda _: self.ended, limit)

    def leave(self) -> None:
        """Have no more to do with a detached cluster, which goes on; one that is not is stopped.

        What reads from it in this process gets `Interrupted`, and its coordinator here is stopped.
        `tfd_notebook.attach` takes it up again.
        """
        if os.getpid() != self._pid:
            return  # a forked child does not end the cluster of its parent
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

    # Seeing

    @property
    def ended(self) -> bool:
        """Whether the cluster has ended, at least for this process, and stays so."""
        return self.state in ("stopped", "failed", "lost", "left")

    @property
    def tasks(self) -> tuple[TaskHandle, ...]:
        """The tasks as they are now, the dispatcher first."""
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
            The cluster has none, because it has no data worker.
        """
        self._require_dispatcher()
        return ClusterDispatcher(self)

    def command(self, work: Callable[[], Any]) -> None:
        """Have the cluster's own thread call `work`; what it raises becomes a notice."""
        self._monitor.command(work)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from tfd_notebook import views

        return views.mimebundle(self.snapshot())

    def __repr__(self) -> str:
        seen = self.snapshot()
        ready = ", ".join(f"{count} {role}" for role, count in seen.observed.items())
        return (
            f"<Cluster {self.name!r} {seen.state} on {seen.launcher}: {ready or 'no task'} ready>"
        )

    # How it is done

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
            kind(f"cluster {self.name!r} is {state}{why}", fix="make a new one: tfd.Cluster(...)")
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
