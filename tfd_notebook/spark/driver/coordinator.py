"""Coordinator in the notebook for workers and parameter servers on Spark."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tfd_notebook import errors
from tfd_notebook.agent import tf_servers
from tfd_notebook.coordinator import connection
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.spark.driver.cluster import SparkClusterBase
from tfd_notebook.spark.driver.node_registry import Node
from tfd_notebook.spark.executor import launch_plan

if TYPE_CHECKING:
    from tfd_notebook.coordinator.coordinator import Coordinator

#: Timeout in seconds for TensorFlow's servers in the nodes to listen.
_LISTEN_SECONDS = 60.0


def serve(args: Any, ctx: Any) -> None:
    """Run TensorFlow's server in a node, for a coordinator in the notebook; used as ``map_fun``.

    Parameters
    ----------
    args
        Not used.
    ctx : TFNodeContext

    See Also
    --------
    tf.distribute.Server
    """
    cluster = {job: tasks for job, tasks in ctx.cluster_spec.items() if job != "evaluator"}
    settings = {"cluster": cluster, "job": ctx.job_name, "index": ctx.task_index}
    server = tf_servers.Server(Role(ctx.job_name), ctx.port).start(settings)
    threading.Event().wait()
    del server


class CoordinatedSparkCluster(SparkClusterBase):
    """A `SparkClusterBase` with a coordinator in the notebook."""

    _coordinator: Coordinator | None = None
    _strategy: Any = None

    @property
    def resolver(self) -> Any:
        """A ClusterResolver of the workers and parameter servers, with their current addresses.

        See Also
        --------
        tf.distribute.cluster_resolver.ClusterResolver
        """
        connection.require()
        # Imports TensorFlow.
        from tfd_notebook.resolvers.cluster import OwnResolver

        return OwnResolver(
            self._servers,
            self._connected,
            lambda: connection.closing(self._allowed_networks()),
            self.name,
        )

    def strategy(self, *args: Any, **options: Any) -> Any:
        """Return a ``ParameterServerStrategy`` for the nodes, which must run `serve`.

        Parameters
        ----------
        *args, **options
            Arguments of ``tf.distribute.ParameterServerStrategy`` after the resolver.

        Raises
        ------
        StateError
            The cluster has no worker or no parameter server, or it has ended. Or a thread of this
            process runs a TensorFlow operation that does not end.
        TasksMissing
            A node does not listen. TensorFlow would wait for it without a timeout.

        See Also
        --------
        tf.distribute.ParameterServerStrategy
        """
        import tensorflow as tf

        connection.require()
        # Imports TensorFlow.
        from tfd_notebook.coordinator.coordinator import Coordinator

        self._require_servers()
        connection.await_readers()
        self.stop_coordinator()
        connection.prepare(self._servers())
        strategy = tf.distribute.ParameterServerStrategy(self.resolver, *args, **options)
        coordinator = Coordinator(strategy)
        coordinator.bind_cluster(
            self._task_rows, dict, lambda tasks: None, lambda severity, what: None, lambda: None
        )
        self._strategy, self._coordinator = strategy, coordinator
        self.serves = True
        return strategy

    def coordinator(self, strategy: Any = None) -> Coordinator:
        """Return the coordinator of the nodes, with the members of `Coordinator`.

        Parameters
        ----------
        strategy : tf.distribute.ParameterServerStrategy, optional
            A strategy from `strategy`. Default: the current one, or a new one.

        Raises
        ------
        UsageError
            The strategy belongs to another cluster, or was replaced.

        See Also
        --------
        tf.distribute.coordinator.ClusterCoordinator
        """
        has_none = self._coordinator is None or self._coordinator.stopped
        if strategy is not None and (has_none or strategy is not self._strategy):
            raise errors.UsageError(
                "invalid strategy: expected this cluster's current strategy",
                fix="create one with cluster.strategy()",
            )
        if has_none:
            self.strategy()
        assert self._coordinator is not None
        return self._coordinator

    def stop_coordinator(self) -> None:
        """Stop the current coordinator, if there is one."""
        coordinator, self._coordinator, self._strategy = self._coordinator, None, None
        if coordinator is not None:
            coordinator.stop()

    def _connected(self) -> None:
        # Imports TensorFlow.
        from tfd_notebook._compat.tf_coordinator import connection as tf_coordinator_connection

        with connection.consume_new_connection() as is_new:
            if is_new:
                connection.close(self._allowed_networks())
                tf_coordinator_connection.send_functions()

    def _allowed_networks(self) -> list[str]:
        return launch_plan.networks(node.address for node in self.nodes if node.address)

    def _servers(self) -> dict[str, list[str]]:
        return {job: tasks for job, tasks in self.cluster_spec.items() if job in ("ps", "worker")}

    def _require_servers(self) -> None:
        if self.error is not None:
            raise self.error
        missing = {"ps", "worker"} - self._servers().keys()
        if missing or self.phase.is_end:
            raise errors.StateError(
                f"cluster {self.name!r} is {self.phase} and has no {' and no '.join(missing)}"
                if missing
                else f"cluster {self.name!r} is {self.phase}",
                fix="start one with TFCluster.run(sc, TFCluster.serve, None, 3, num_ps=1)",
            )
        self.phases.wait_until(
            lambda: self.phase.is_end or not self._not_listening(), _LISTEN_SECONDS
        )
        if self.error is not None:
            raise self.error
        if not_listening := self._not_listening():
            names = ", ".join(node.assignment.name for node in not_listening)
            raise errors.TasksMissing(
                f"TensorFlow does not listen on {names}",
                fix="run TFCluster.serve in the nodes, or a function that creates a "
                "tf.distribute.Server",
            )

    def _not_listening(self) -> list[Node]:
        return [n for n in self.nodes if n.assignment.role in ("ps", "worker") and not n.open_to]

    def _task_rows(self) -> tuple[TaskRow, ...]:
        with self.server.lock:
            return tuple(
                TaskRow(
                    task=node.assignment.name,
                    role=Role(node.assignment.role),
                    index=node.assignment.index,
                    host=node.host,
                    address=node.address,
                    pid=node.pid,
                    state=TaskState.READY if node.state == "running" else TaskState.LOST,
                    open_to=node.open_to,
                )
                for node in self.nodes
                if node.assignment.role in ("ps", "worker")
            )
