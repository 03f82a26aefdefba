"""Parameter server training on a cluster: resolver, strategy, coordinator and recovery."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tfd_notebook import errors
from tfd_notebook._compat.keras import refuse_keras
from tfd_notebook.cluster import registry
from tfd_notebook.cluster.servers import ClusterServers
from tfd_notebook.coordinator import connection as coordinator_connection
from tfd_notebook.model.spec import Endpoint, Role
from tfd_notebook.net.task_probe import is_same_job, probe_tasks

if TYPE_CHECKING:
    from tfd_notebook.coordinator.coordinator import Coordinator
    from tfd_notebook.resolvers.cluster import OwnResolver

_PROBE_SECONDS = 5.0
NO_KERAS = "Keras 3 cannot train, evaluate or predict under ParameterServerStrategy"
KERAS_2 = (
    "use Keras 2: pip install tf-keras, and set TF_USE_LEGACY_KERAS=1 before TensorFlow is "
    "imported; or train with a custom training loop, see docs/coordinator.md"
)


class ParameterServerTraining:
    """Parameter server training on a `Cluster`: its resolver, strategy and coordinator.

    Parameters
    ----------
    servers : ClusterServers
    """

    def __init__(self, servers: ClusterServers) -> None:
        self._servers = servers
        self._monitor, self._task_manager = servers.monitor, servers.task_manager
        self._strategy: Any = None
        self._variable_partitioner: Any = None
        #: The variables of the current strategy, with their task and bytes.
        self._variables: list[tuple[weakref.ref[Any], str, int]] = []
        #: The `build` of the latest coordinator.
        self._build: Callable[[Coordinator], Any] | None = None

    @property
    def resolver(self) -> OwnResolver:
        """A ClusterResolver of the workers and parameter servers, always up to date.

        `coordinator` accepts a strategy that you create with it.

        See Also
        --------
        tf.distribute.cluster_resolver.ClusterResolver
        """
        coordinator_connection.require()
        self._servers.require_running()
        return self._resolver

    @cached_property
    def _resolver(self) -> OwnResolver:
        # Imports TensorFlow.
        from tfd_notebook.resolvers.cluster import OwnResolver

        return OwnResolver(
            self._task_manager.cluster_spec,
            self._handle_connection,
            lambda: coordinator_connection.closing(*self._allowed_peers()),
            self._servers.name,
        )

    def strategy(self, variable_partitioner: Any = None) -> Any:
        """Return a new ``ParameterServerStrategy`` on this cluster.

        This stops the previous coordinator; its variables and results are lost. Then it restarts
        the tasks, because TensorFlow never frees the variables of a dead coordinator.
        ``Policy(recycle=False)`` keeps the tasks running.

        Parameters
        ----------
        variable_partitioner : tf.distribute.experimental.partitioners.Partitioner, optional
            Divides large variables among the parameter servers. Default: they are not divided.

        Returns
        -------
        tf.distribute.ParameterServerStrategy
            Its coordinator is a `tfd_notebook.Coordinator`, even when Keras uses it.

        Raises
        ------
        StateError
            The cluster has no worker or no parameter server, or this process has connected too
            often.
        TasksMissing
            A task does not respond. TensorFlow would wait for it without a timeout.

        See Also
        --------
        tf.distribute.ParameterServerStrategy
        """
        import tensorflow as tf

        coordinator_connection.require()
        with self._servers.lock:
            self._servers.require_running()
            self._require_servers()
            coordinator_connection.await_readers()
            self.stop_coordinator()
            if self._task_manager.used and self._servers.policy.recycle:
                self._restart_servers()
            self._check_servers()
            self._variable_partitioner = variable_partitioner
            coordinator_connection.prepare(self._task_manager.cluster_spec())
            self._task_manager.used = True
            strategy = tf.distribute.ParameterServerStrategy(self.resolver, variable_partitioner)
            self._bind_strategy(strategy)
        self._servers.store_description()
        return strategy

    def coordinator(self, strategy: Any = None) -> Coordinator:
        """Return the coordinator of a strategy, an extended ClusterCoordinator.

        Parameters
        ----------
        strategy : tf.distribute.ParameterServerStrategy, optional
            A strategy from `strategy`, or one created with `resolver`. The latter stops the
            previous coordinator. Default: the current strategy, or a new one.

        Raises
        ------
        StateError
            The strategy's coordinator was stopped, or it is a plain TensorFlow coordinator with
            unfinished functions. An idle one is converted.
        UsageError
            The strategy belongs to another cluster.

        See Also
        --------
        tf.distribute.coordinator.ClusterCoordinator
        """
        coordinator_connection.require()
        # Imports TensorFlow.
        from tfd_notebook._compat.tf_coordinator import connection

        with self._servers.lock:
            self._servers.require_running()
            if strategy is None:
                if self._monitor.coordinator is None or self._monitor.coordinator.stopped:
                    self.strategy()
                assert self._monitor.coordinator is not None
                return self._monitor.coordinator
            if strategy is not self._strategy or self._monitor.coordinator is None:
                self._require_local(strategy)
                self._bind_strategy(strategy)
                self._variable_partitioner = connection.partitioner_of(strategy)
            elif self._monitor.coordinator.stopped:
                raise _stopped()
            assert self._monitor.coordinator is not None
            return self._monitor.coordinator

    def recover(
        self, checkpoint: str | None = None, build: Callable[[Coordinator], Any] | None = None
    ) -> Coordinator:
        """Restore tasks, strategy and coordinator after a parameter server was lost.

        The variables are lost with their server, so the model must be built again. Either `build`
        does this, or you run the cell again that builds it; then a notice shows how to restore.

        Parameters
        ----------
        checkpoint : str, optional
            A checkpoint, or a directory whose latest checkpoint is used. It is restored into the
            result of `build`.
        build : callable, optional
            Called with the new coordinator, in its strategy's scope. Returns the
            ``tf.train.Checkpoint`` of the model that it built. Default, with a checkpoint: the last
            function passed here or to `tfd_notebook.training_loop` (in `Work`), if any.

        Returns
        -------
        Coordinator
            The new coordinator.

        Raises
        ------
        LaunchError
            A task failed to start.
        UsageError
            No checkpoint exists at that path, or `build` did not return a checkpoint object.
        """
        path = _latest(checkpoint) if checkpoint is not None else None
        if build is None and path is not None:
            build = (
                self._monitor.coordinator.build
                if self._monitor.coordinator is not None
                else self._build
            )
        with self._servers.lock:
            self._servers.require_running()
            self._require_servers()
            self.stop_coordinator()
            self._task_manager.await_servers()
            self.strategy(self._variable_partitioner)
            coordinator = self._monitor.coordinator
            assert coordinator is not None
        if build is not None:
            with coordinator.strategy.scope():
                built = build(coordinator)
            if path is not None:
                _restore(built, path)
            coordinator.build = build
        elif path is not None:
            self._monitor.notice(
                "warning",
                "the cluster has recovered without its variables: build the model again with the "
                f"new strategy, and restore it from {path}",
                fix="run the cell that builds it with cluster.coordinator(), then "
                f"tf.train.Checkpoint(model=model, ...).restore({path!r})",
            )
        return coordinator

    def _check_servers(self) -> None:
        """Probe every worker and parameter server.

        Raises
        ------
        TasksMissing
            A server does not respond within 5 seconds.
        """
        rows = (*self._task_manager.rows_of(Role.WORKER), *self._task_manager.rows_of(Role.PS))
        running: dict[str, dict[int, str]] = {}
        for row in rows:
            if not row.state.ended:
                running.setdefault(str(row.role), {})[row.index] = row.address
        statuses = probe_tasks(running, _PROBE_SECONDS, is_same_job)
        ended = [f"{row.task} ({row.state}: {row.reason})" for row in rows if row.state.ended]
        silent = [status.trouble for status in statuses if status.is_missing]
        if ended or silent:
            reasons = {row.task: row.reason for row in rows if row.state.ended}
            reasons |= {status.name: status.reason for status in statuses if status.is_missing}
            task, reason = next(iter(reasons.items()))
            raise errors.TasksMissing(
                "these tasks do not respond, and TensorFlow would wait for them without a timeout: "
                + ", ".join((*ended, *silent)),
                task=task,
                fix=self._servers.config.restart_step(task, reason, logs=True),
            )

    # Internals

    def hide_gpus_from_kernel(self) -> None:
        """Hide the GPUs from this kernel if the cluster has workers and parameter servers."""
        if not (self._task_manager.rows_of(Role.WORKER) and self._task_manager.rows_of(Role.PS)):
            return
        shared = self._task_manager.on_this_host and self._task_manager.gives_gpus
        if shared and not coordinator_connection.hide_gpus_from_kernel():
            self._monitor.notice(
                "warning",
                "TensorFlow in this kernel already uses the GPUs, so the workers have less GPU "
                "memory",
                fix="restart the kernel, and start the cluster first: then the kernel does not use "
                "the GPUs",
            )

    def _handle_connection(self) -> None:
        """Set up a new connection of this process to the tasks. No-op if it is set up already."""
        # Imports TensorFlow.
        from tfd_notebook._compat.tf_coordinator import connection

        with coordinator_connection.consume_new_connection() as is_new:
            if not is_new:
                return
            self._task_manager.used = True
            coordinator_connection.close(*self._allowed_peers())
            connection.send_functions()

    def _allowed_peers(self) -> tuple[tuple[str, ...], str | None]:
        """Return the networks that the port of this process lets in, and its host name."""
        known = {
            Endpoint.parse(address).host
            for tasks in self._task_manager.cluster_spec().values()
            for address in tasks
        }
        return self._servers.config.allow, "localhost" if known == {"localhost"} else None

    def _require_local(self, strategy: Any) -> None:
        """Raise UsageError unless a strategy belongs to this cluster."""
        # Imports TensorFlow.
        from tfd_notebook._compat.tf_coordinator import connection

        resolver = connection.resolver_of(strategy)
        spec = {} if resolver is None else resolver.cluster_spec().as_dict()
        known = {
            address for tasks in self._task_manager.cluster_spec().values() for address in tasks
        }
        if not known.intersection((*spec.get("worker", ()), *spec.get("ps", ()))):
            raise errors.UsageError(
                f"invalid strategy: it does not belong to cluster {self._servers.name!r}",
                fix="create it with cluster.strategy(), or with cluster.resolver",
            )

    def _bind_strategy(self, strategy: Any) -> None:
        """Set the current strategy of this cluster, and create its coordinator."""
        # Imports TensorFlow.
        from tfd_notebook._compat.tf_coordinator import connection
        from tfd_notebook.coordinator.coordinator import Coordinator

        self._handle_connection()
        coordinator = Coordinator(strategy)
        if coordinator.stopped:
            raise _stopped()
        self.stop_coordinator()
        self._variables = variables = []
        connection.watch_variables(strategy, lambda new: variables.append(_variable_size(new)))
        refuse_keras(strategy, lambda: errors.Unsupported(NO_KERAS, fix=KERAS_2))
        if not coordinator.full:
            self._monitor.notice(
                "warning",
                "the coordinator of this TensorFlow version is untested: scheduling works, but "
                "not every transition is recorded, and pausing is not possible",
                fix="use TensorFlow 2.15 to 2.21",
            )
        coordinator.bind_cluster(
            self._monitor.tasks,
            self._bytes_on_ps,
            self._report_lost_strategy,
            self._monitor.notice,
            self._task_manager.serve_errors_for_lost_workers,
            self._servers.cluster,
        )
        coordinator.build = self._build
        coordinator.store.on_change = registry.notify_change
        self._strategy, self._monitor.coordinator = strategy, coordinator
        registry.notify_change()

    def _require_servers(self) -> None:
        for role, name in ((Role.PS, "parameter server"), (Role.WORKER, "worker")):
            if not self._task_manager.rows_of(role):
                raise errors.StateError(
                    f"cluster {self._servers.name!r} has no {name}, and ParameterServerStrategy "
                    "needs one",
                    fix="create a cluster with both: tfd.Cluster(workers=2, ps=1)",
                )

    def stop_coordinator(self) -> None:
        """Stop the current coordinator, if any. Calls that wait for its results raise."""
        coordinator, self._monitor.coordinator, self._strategy = (
            self._monitor.coordinator,
            None,
            None,
        )
        if coordinator is not None:
            self._build = coordinator.build
            coordinator.stop()

    def scale(self, counts: Mapping[Role, int]) -> None:
        """Scale the tasks and the workers of the current coordinator."""
        coordinator, workers = self._monitor.coordinator, counts.get(Role.WORKER)
        before = len(self._task_manager.rows_of(Role.WORKER))
        if coordinator is None or coordinator.stopped or workers is None or workers == before:
            self._task_manager.scale(counts)
            return
        # Imports TensorFlow.
        from tfd_notebook._compat.tf_coordinator import connection

        if workers < 1:
            raise errors.StateError(
                "scaling to 0 workers failed: the coordinator needs one",
                fix="coordinator.stop() first, or keep one worker",
            )
        if workers < before:
            addresses = self._task_manager.cluster_spec()["worker"][:workers]
            connection.resize(coordinator, addresses)
            self._task_manager.scale(counts)
        else:
            self._task_manager.scale(counts)
            connection.resize(coordinator, self._task_manager.cluster_spec()["worker"])
        with coordinator_connection.consume_new_connection():
            pass  # mark the connection as handled: it is not for a new strategy

    def _restart_servers(self) -> None:
        rows = (*self._task_manager.rows_of(Role.PS), *self._task_manager.rows_of(Role.WORKER))
        self._task_manager.restart_all([row.task for row in rows])

    def _report_lost_strategy(self, tasks: str) -> None:
        self._monitor.notice(
            "error",
            f"{tasks} was lost with its variables",
            fix="cluster.recover(checkpoint, build), or create a new strategy and build the model "
            "again",
        )

    def _bytes_on_ps(self) -> dict[str, int]:
        """Return the bytes of the current strategy's variables by parameter server."""
        sizes: dict[str, int] = {}
        for variable, task, size in list(self._variables):
            if variable() is not None:
                sizes[task] = sizes.get(task, 0) + size
        return sizes

    @property
    def has_coordinator(self) -> bool:
        """True if the cluster has a coordinator that is not stopped."""
        coordinator = self._monitor.coordinator  # another thread may stop it
        return coordinator is not None and not coordinator.stopped

    def current_coordinator(self) -> Coordinator:
        """Return the existing coordinator. Unlike `coordinator`, never create one.

        Raises
        ------
        StateError
            The cluster has no coordinator.
        """
        if self._monitor.coordinator is None:
            raise errors.StateError(
                f"cluster {self._servers.name!r} has no coordinator",
                fix="create one: cluster.coordinator()",
            )
        return self._monitor.coordinator


def _stopped() -> errors.StateError:
    return errors.StateError(
        "the coordinator of this strategy was stopped",
        fix="create a new strategy: cluster.strategy()",
    )


def _restore(built: Any, path: str) -> None:
    restore = getattr(built, "restore", None)
    if restore is None:
        raise errors.UsageError(
            f"invalid result of build: {type(built).__name__} has no restore method",
            fix="return tf.train.Checkpoint(model=model, ...) from build",
        )
    restore(path)


def _variable_size(variable: Any) -> tuple[weakref.ref[Any], str, int]:
    """Return a variable with its task and its size in bytes.

    Call this when the variable is created. After its server is lost, reading ``device`` crashes the
    process.
    """
    match = re.search(r"/job:(\w+).*?/task:(\d+)", variable.device)
    size = (variable.shape.num_elements() or 0) * variable.dtype.size
    return weakref.ref(variable), f"{match[1]}:{match[2]}" if match else "", size


def _latest(checkpoint: str) -> str:
    import tensorflow as tf

    path = tf.train.latest_checkpoint(checkpoint) or checkpoint
    if not tf.io.gfile.exists(f"{path}.index"):
        raise errors.UsageError(
            f"no checkpoint at {checkpoint!r}",
            fix="pass the path that save() returned, or its directory",
        )
    return str(path)
