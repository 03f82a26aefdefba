"""The part of `Cluster` that trains: resolver, strategy and coordinator, and their recovery."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfd_notebook import errors
from tfd_notebook.cluster.reports import ClusterReports
from tfd_notebook.launchers.base import Launcher
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import CoordinatorRow, TaskRow
from tfd_notebook.model.spec import ClusterConfig, Endpoint, Role

if TYPE_CHECKING:
    from tfd_notebook.coordinator.coordinator import Coordinator
    from tfd_notebook.resolvers.cluster import OwnResolver

_PROBE_SECONDS = 5.0
NO_KERAS = "Keras 3 cannot train, evaluate or predict under ParameterServerStrategy"
KERAS_2 = (
    "use Keras 2: pip install tf-keras, and set TF_USE_LEGACY_KERAS=1 before TensorFlow is "
    "imported; or train with functions of your own, see docs/coordinator.md"
)


class ParameterServerTraining(ClusterReports):
    """The part of `Cluster` that coordinates workers and parameter servers."""

    def _initialize(self, config: ClusterConfig, launcher: Launcher) -> None:
        super()._initialize(config, launcher)
        self._strategy: Any = None
        #: What the user gave for it.
        self._strategy_options: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._coordinator: Coordinator | None = None
        #: The variables of the present strategy, with their task and bytes.
        self._variables: list[tuple[weakref.ref[Any], str, int]] = []
        #: Whether a coordinator has used the tasks since they were started.
        self._used = False
        #: What builds the model, where that is known.
        self._build: Callable[[Coordinator], Any] | None = None
        self._monitor.coordinator = self._coordinator_row

    @property
    def resolver(self) -> OwnResolver:
        """A ClusterResolver of the workers and parameter servers, whose answers are always fresh.

        A strategy that you make with it becomes one of this cluster by `coordinator`.

        See Also
        --------
        tf.distribute.cluster_resolver.ClusterResolver
        """
        from tfd_notebook.coordinator import connection as coordinator_connection

        coordinator_connection.require()
        from tfd_notebook.resolvers.cluster import OwnResolver

        self._require_running()
        return OwnResolver(self._task_manager.cluster_spec, self._handle_connection, self.name)

    def strategy(self, *args: Any, **options: Any) -> Any:
        """Return a fresh ``ParameterServerStrategy`` on this cluster.

        The coordinator that was there before is stopped, and what it made is gone. Then the tasks
        are started afresh (``Policy(recycle=False)`` keeps them), because TensorFlow keeps the
        variables of a dead coordinator for ever.

        Parameters
        ----------
        *args, **options
            What ``tf.distribute.ParameterServerStrategy`` takes after the resolver, such as
            ``variable_partitioner``.

        Returns
        -------
        tf.distribute.ParameterServerStrategy
            Its coordinator is ours, for Keras, too.

        Raises
        ------
        StateError
            There is no worker or no parameter server, or this process has connected too often.
        TasksMissing
            A task does not answer; TensorFlow would wait for it for ever.

        See Also
        --------
        tf.distribute.ParameterServerStrategy
        """
        import tensorflow as tf

        from tfd_notebook.coordinator import connection as coordinator_connection

        coordinator_connection.require()
        with self._lock:
            self._require_running()
            self._require_servers()
            coordinator_connection.await_readers()
            self._stop_coordinator()
            if self._used and self.policy.recycle:
                self._restart_servers()
            self.check_servers()
            self._strategy_options = (args, options)
            coordinator_connection.prepare(self._task_manager.cluster_spec())
            self._used = True
            strategy = tf.distribute.ParameterServerStrategy(self.resolver, *args, **options)
            self._bind_strategy(strategy)
            return strategy

    def coordinator(self, strategy: Any = None) -> Coordinator:
        """Return the coordinator of a strategy: TensorFlow's, with more.

        Parameters
        ----------
        strategy : tf.distribute.ParameterServerStrategy, optional
            From `strategy`, or made with `resolver`: then the coordinator that was there before is
            stopped. Default: the one that this cluster has, or a fresh one.

        Raises
        ------
        StateError
            The strategy's coordinator was stopped, or TensorFlow made it and functions that it
            scheduled have not ended. One of TensorFlow's that is idle is adopted.
        UsageError
            The strategy is one of another cluster.

        See Also
        --------
        tf.distribute.coordinator.ClusterCoordinator
        """
        from tfd_notebook.coordinator import connection as coordinator_connection

        coordinator_connection.require()
        from tfd_notebook._compat.tf_coordinator import connection

        with self._lock:
            self._require_running()
            if strategy is None:
                if self._coordinator is None or self._coordinator.stopped:
                    self.strategy()
                assert self._coordinator is not None
                return self._coordinator
            if strategy is not self._strategy or self._coordinator is None:
                self._require_local(strategy)
                self._bind_strategy(strategy)
                self._strategy_options = ((), connection.options_of(strategy))
            elif self._coordinator.stopped:
                raise _stopped()
            assert self._coordinator is not None
            return self._coordinator

    def recover(
        self, checkpoint: str | None = None, build: Callable[[Coordinator], Any] | None = None
    ) -> Coordinator:
        """Bring everything back after a parameter server was lost: tasks, strategy, coordinator.

        The variables are gone with their server, so the model is to be built again: by `build`, or
        by running the cell that did it; then a notice says what is to be restored.

        Parameters
        ----------
        checkpoint : str, optional
            A checkpoint, or a directory of them whose latest is taken, to restore into what `build`
            returns.
        build : callable, optional
            Takes the new coordinator, called in its strategy's scope; returns the
            ``tf.train.Checkpoint`` of what it built. Default: with a checkpoint the last one that
            was given here or, as a part of `Work`, to `tfd_notebook.training_loop`, if any.

        Returns
        -------
        Coordinator
            The new one.

        Raises
        ------
        LaunchError
            A task does not come back.
        UsageError
            There is no checkpoint at that path, or `build` returned none to restore into.
        """
        path = _latest(checkpoint) if checkpoint is not None else None
        if build is None and path is not None:
            build = self._build
        with self._lock:
            self._require_running()
            self._require_servers()
            self._stop_coordinator()
            self._task_manager.await_servers()
            args, options = self._strategy_options
            self.strategy(*args, **options)
            coordinator = self._coordinator
            assert coordinator is not None
        if build is not None:
            with coordinator.strategy.scope():
                built = build(coordinator)
            if path is not None:
                _restore(built, path)
            self.remember_build(build)
        elif path is not None:
            self._monitor.notice(
                "warning",
                "the cluster is back, and its variables are gone: the model is to be built again "
                f"under the new strategy, and restored from {path}",
                fix="run the cell that builds it with cluster.coordinator(), then "
                f"tf.train.Checkpoint(model=model, ...).restore({path!r})",
            )
        return coordinator

    def remember_build(self, build: Callable[[Coordinator], Any]) -> None:
        """Have `recover` build the model again with `build`, which it describes."""
        self._build = build

    @property
    def can_build(self) -> bool:
        """Whether `recover` knows how to build the model again."""
        return self._build is not None

    def check_servers(self) -> None:
        """Ask every worker and parameter server whether it is there.

        Raises
        ------
        TasksMissing
            One does not answer within 5 seconds.
        """
        from tfd_notebook.net.probe import probe_many

        rows = (*self._task_manager.rows_of(Role.WORKER), *self._task_manager.rows_of(Role.PS))
        living = [row for row in rows if not row.state.ended]
        found = probe_many([row.address for row in living], timeout=_PROBE_SECONDS)
        ended = [f"{row.task} ({row.state}: {row.reason})" for row in rows if row.state.ended]
        silent = [
            f"{row.task} at {row.address} ({answer.state}: {answer.reason or answer.kind})"
            for row, answer in zip(living, found, strict=True)
            if not answer.alive or answer.kind != "server"
        ]
        if ended or silent:
            names = [name.partition(" ")[0] for name in (*ended, *silent)]
            raise errors.TasksMissing(
                "these do not answer, and TensorFlow would wait for them for ever: "
                + ", ".join((*ended, *silent)),
                task=names[0],
                fix=f"cluster.restart({names[0]!r}), or see cluster.logs({names[0]!r})",
            )

    # How it is done

    def _hide_gpus_from_kernel(self) -> None:
        """Leave the GPUs to the workers, where there are both workers and parameter servers."""
        from tfd_notebook.coordinator import connection as coordinator_connection

        if not (self._task_manager.rows_of(Role.WORKER) and self._task_manager.rows_of(Role.PS)):
            return
        shared = self._task_manager.on_this_host and self._task_manager.gives_gpus
        if shared and not coordinator_connection.hide_gpus_from_kernel():
            self._monitor.notice(
                "warning",
                "this kernel has begun to use TensorFlow, and its memory on the GPUs is not the "
                "workers'",
                fix="restart the kernel, and start the cluster first: it leaves the GPUs to the "
                "workers then",
            )

    def _handle_connection(self) -> None:
        """Do what every new connection of this process to the tasks needs, whoever made it."""
        from tfd_notebook._compat.tf_coordinator import connection
        from tfd_notebook.coordinator import connection as coordinator_connection

        with coordinator_connection.new_connection_event() as is_new:
            if not is_new:
                return
            self._used = True
            known = {
                Endpoint.parse(address).host
                for tasks in self._task_manager.cluster_spec().values()
                for address in tasks
            }
            host = "localhost" if known == {"localhost"} else None
            coordinator_connection.close(self._config.allow, host)
            connection.send_functions()

    def _require_local(self, strategy: Any) -> None:
        """Raise UsageError unless a strategy is one of this cluster."""
        from tfd_notebook._compat.tf_coordinator import connection

        resolver = connection.resolver_of(strategy)
        spec = {} if resolver is None else resolver.cluster_spec().as_dict()
        known = {
            address for tasks in self._task_manager.cluster_spec().values() for address in tasks
        }
        if not known.intersection((*spec.get("worker", ()), *spec.get("ps", ()))):
            raise errors.UsageError(
                f"this strategy is not one of cluster {self.name!r}",
                fix="make it with cluster.strategy(), or with cluster.resolver",
            )

    def _bind_strategy(self, strategy: Any) -> None:
        """Make a strategy the one of this cluster, with a coordinator of ours."""
        from tfd_notebook._compat.tf_coordinator import connection
        from tfd_notebook.coordinator.coordinator import Coordinator

        self._handle_connection()
        coordinator = Coordinator(strategy)
        if coordinator.stopped:
            raise _stopped()
        self._stop_coordinator()
        self._variables = made = []
        connection.watch_variables(strategy, lambda one: made.append(_variable_size(one)))
        connection.refuse_keras(strategy, lambda: errors.Unsupported(NO_KERAS, fix=KERAS_2))
        if not coordinator.full:
            self._monitor.notice(
                "warning",
                "the coordinator of this TensorFlow is none that was tried: scheduling works "
                "as ever, but not every transition is seen, and nothing can be paused",
                fix="TensorFlow 2.15 to 2.21 are known",
            )
        coordinator.bind_cluster(
            self._monitor.tasks,
            self._bytes_on_ps,
            self._strategy_lost,
            self._monitor.notice,
            self._task_manager.serve_errors_for_lost_workers,
            self,
        )
        self._strategy, self._coordinator = strategy, coordinator

    def _require_servers(self) -> None:
        for role, name in ((Role.PS, "parameter server"), (Role.WORKER, "worker")):
            if not self._task_manager.rows_of(role):
                raise errors.StateError(
                    f"cluster {self.name!r} has no {name}, and ParameterServerStrategy needs one",
                    fix="make a cluster with both: tfd.Cluster(workers=2, ps=1)",
                )

    def _stop_coordinator(self) -> None:
        """Stop the coordinator that is there; nobody waits for its results any more."""
        coordinator, self._coordinator, self._strategy = self._coordinator, None, None
        if coordinator is not None:
            coordinator.stop()

    def _scale(self, counts: Mapping[Role, int]) -> None:
        """Scale the tasks, and the coordinator that runs with them."""
        coordinator, wanted = self._coordinator, counts.get(Role.WORKER)
        before = len(self._task_manager.rows_of(Role.WORKER))
        if coordinator is None or coordinator.stopped or wanted is None or wanted == before:
            self._task_manager.scale(counts)
            return
        from tfd_notebook._compat.tf_coordinator import connection
        from tfd_notebook.coordinator import connection as coordinator_connection

        if wanted < 1:
            raise errors.StateError(
                "a coordinator needs a worker", fix="coordinator.stop() first, or keep one worker"
            )
        if wanted < before:
            addresses = self._task_manager.cluster_spec()["worker"][:wanted]
            connection.resize(coordinator, addresses)
            self._task_manager.scale(counts)
        else:
            self._task_manager.scale(counts)
            connection.resize(coordinator, self._task_manager.cluster_spec()["worker"])
        with coordinator_connection.new_connection_event():
            pass  # not the connection of a strategy

    def _restart_servers(self) -> None:
        rows = (*self._task_manager.rows_of(Role.PS), *self._task_manager.rows_of(Role.WORKER))
        self._task_manager.restart_all([row.task for row in rows])

    def _strategy_lost(self, tasks: str) -> None:
        self._monitor.notice(
            "error",
            f"{tasks} was lost, and the variables on it with it",
            fix="cluster.recover(checkpoint, build), or make a new strategy and build the model "
            "again",
        )

    def _bytes_on_ps(self) -> dict[str, int]:
        """Return the bytes of the variables of the present strategy, by parameter server."""
        found: dict[str, int] = {}
        for variable, task, size in list(self._variables):
            if variable() is not None:
                found[task] = found.get(task, 0) + size
        return found

    @property
    def coordinator_limit(self) -> Limit:
        """What limits the coordinator now."""
        return self.present_coordinator().limit

    @property
    def has_coordinator(self) -> bool:
        """Whether a coordinator was made, and not stopped since."""
        return self._coordinator is not None and not self._coordinator.stopped

    def present_coordinator(self) -> Coordinator:
        """Return the coordinator that there is; unlike `coordinator` it makes none.

        Raises
        ------
        StateError
            There is none.
        """
        if self._coordinator is None:
            raise errors.StateError(
                f"cluster {self.name!r} has no coordinator", fix="cluster.coordinator() makes one"
            )
        return self._coordinator

    def _coordinator_row(self, tasks: tuple[TaskRow, ...]) -> CoordinatorRow | None:
        coordinator = self._coordinator
        return None if coordinator is None else coordinator.row(tasks)


def _stopped() -> errors.StateError:
    return errors.StateError(
        "the coordinator of this strategy was stopped",
        fix="make a new strategy: cluster.strategy()",
    )


def _restore(built: Any, path: str) -> None:
    restore = getattr(built, "restore", None)
    if restore is None:
        raise errors.UsageError(
            f"build returned a {type(built).__name__}, into which nothing can be restored",
            fix="have it return tf.train.Checkpoint(model=model, ...)",
        )
    restore(path)


def _variable_size(variable: Any) -> tuple[weakref.ref[Any], str, int]:
    """Return a variable with the task that holds it and its bytes.

    To be asked when it is made: the device of one whose server is gone crashes the process.
    """
    found = re.search(r"/job:(\w+).*?/task:(\d+)", variable.device)
    size = (variable.shape.num_elements() or 0) * variable.dtype.size
    return weakref.ref(variable), f"{found[1]}:{found[2]}" if found else "", size


def _latest(checkpoint: str) -> str:
    import tensorflow as tf

    found = tf.train.latest_checkpoint(checkpoint) or checkpoint
    if not tf.io.gfile.exists(f"{found}.index"):
        raise errors.UsageError(
            f"there is no checkpoint at {checkpoint!r}",
            fix="give the path that save() returned, or its directory",
        )
    return str(found)
