"""Core of a cluster on Spark: its state, its nodes' messages, and its end."""

from __future__ import annotations

import os
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tfd_notebook import errors, views
from tfd_notebook.cluster.registry import notify_change
from tfd_notebook.model.events import Notice
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.snapshot import Snapshot, SparkRow
from tfd_notebook.net import agent_protocol
from tfd_notebook.net.secure_channel import Secret
from tfd_notebook.spark import roles
from tfd_notebook.spark.driver import feeding, jobs, node_registry, registry, startup
from tfd_notebook.spark.driver.application import Application
from tfd_notebook.spark.driver.jobs import Job
from tfd_notebook.spark.driver.node_registry import Node, NodeServer
from tfd_notebook.spark.driver.phases import Phase, Phases
from tfd_notebook.spark.executor.launch_plan import Plan
from tfd_notebook.spark.roles import InputMode
from tfd_notebook.views.formatting import plural

#: Timeout in seconds for TensorBoard to report its address.
_BOARD_SECONDS = 60.0
#: Timeout in seconds for the nodes to end after the cluster has failed.
_END_SECONDS = 10.0
#: The value of attributes on the class, as in TensorFlowOnSpark: `run` sets them.
_UNSET: Any = None
#: Maximum age in seconds of the nodes' counters. Counters may be older than the end of a `train`.
_STALE_COUNT_SECONDS = 3.0


class _InstanceProperty(property):
    """A property whose value on the class is None."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return None if instance is None else super().__get__(instance, owner)


class SparkClusterBase(Handle):
    """State and life cycle of a `TFCluster`.

    Parameters
    ----------
    application : Application
    plan_of : callable
        Returns the `Plan` of this object. It is called when the node server listens.
    assignments : sequence of Assignment
    input_mode : InputMode
    name : str, optional
    heartbeat_limit : float
    secret : Secret
    """

    cluster_id: int = _UNSET
    cluster_meta: dict[str, Any] = _UNSET
    defaultFS: str = _UNSET  # noqa: N815 - the name of TensorFlowOnSpark
    input_mode: InputMode = _UNSET
    nodeRDD: Any = _UNSET  # noqa: N815 - the name of TensorFlowOnSpark
    num_executors: int = _UNSET
    queues: list[str] = _UNSET
    sc: Any = _UNSET
    server: NodeServer = _UNSET
    working_dir: str = _UNSET

    def __init__(
        self,
        application: Application,
        plan_of: Callable[[Any], Plan],
        assignments: Sequence[roles.Assignment],
        input_mode: InputMode,
        name: str | None,
        heartbeat_limit: float,
        secret: Secret,
    ) -> None:
        self.sc = application.sc
        self._application = application
        self.cluster_id = secrets.randbits(63)
        self.input_mode = input_mode
        self.num_executors = len(assignments)
        self.working_dir = os.getcwd()
        self.defaultFS = application.default_fs
        self.error: errors.TfdError | None = None
        self.name = ""
        self._version = 0
        self._fed_by_action = False
        self._trained = float("-inf")
        #: The current phase, and the wait for changes.
        self.phases = Phases(self._increment_version)
        self._jobs: set[Job] = set()
        #: Errors of Spark tasks by stage id, packed.
        self._stage_errors: dict[int, dict[str, Any]] = {}
        self._events: list[Notice] = []
        #: True if the nodes run TensorFlow servers for this process: their functions never return.
        self.serves = False
        self.server = NodeServer(
            *application.addresses(),
            assignments,
            heartbeat_limit,
            self._on_node_message,
            self._on_task_message,
            secret,
        )
        try:
            plan = plan_of(self)
            self.queues = list(plan.queues)
            self._has_board = bool(plan.tensorboard)
            self.cluster_meta = {
                "id": self.cluster_id,
                "cluster_template": roles.template(assignments),
                "num_executors": self.num_executors,
                "default_fs": self.defaultFS,
                "working_dir": self.working_dir,
                "server_addr": self.server.address,
                "release_port": plan.release_port,
            }
            self._launch = startup.Launch(application, plan, self.server)
        except BaseException:
            self.server.close()
            raise
        self.nodeRDD = self._launch.numbers
        #: The adapter of this cluster for views and commands.
        self.adapter = registry.SparkClusterAdapter(self)
        self.name = registry.add(self, name)
        self._launch.begin().add_done_callback(self._launch_ended)

    # State

    @abstractmethod
    def shutdown(
        self, ssc: Any = None, grace_secs: float = 0, timeout: float = 259200
    ) -> Future[None] | None:
        """Wait until the nodes finish, then stop them."""

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self.phases.now

    @property
    def nodes(self) -> list[Node]:
        """All nodes, as known to the driver."""
        return list(self.server.nodes.values())

    @property
    def fed(self) -> list[Node]:
        """The nodes that receive rows."""
        return [node for node in self.nodes if node.assignment.is_fed]

    @property
    def slots_held(self) -> int:
        """Number of Spark slots that the nodes hold; 0 after the end of the cluster."""
        return 0 if self.phase.is_end else self._launch.slots_held

    @_InstanceProperty
    def cluster_info(self) -> list[dict[str, Any]]:
        """Description of each node that has registered; see `TFCluster`."""
        return [
            {
                "executor_id": node.assignment.node,
                "host": node.host,
                "job_name": node.assignment.role,
                "task_index": node.assignment.index,
                "port": int(node.address.rpartition(":")[2]),
                "pid": node.pid,
                "executor": node.executor,
                "state": node.state,
                "addr": node.path,
                # The key is the cluster's secret, which also opens the driver's channels.
                "authkey": b"",
                "tb_pid": node.board_pid,
                "tb_port": int(node.board.rpartition(":")[2] or 0),
            }
            for node in self.nodes
            if node.address
        ]

    @property
    def cluster_spec(self) -> dict[str, list[str]]:
        """Addresses of the nodes by role."""
        known = {n.assignment.node: n.address for n in self.nodes if n.address}
        return roles.cluster_spec(
            [n.assignment for n in self.nodes if n.assignment.node in known], known
        )

    @property
    def version(self) -> int:
        """A number that increases with each change of `snapshot`."""
        return self._version

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the cluster for views.

        The call is cheap, and safe in any thread.
        """
        with self.server.lock:
            rows = tuple(node_registry.node_row(node) for node in self.nodes if node.state)
        phases = self.phases
        order = {node.assignment.name: n for n, node in enumerate(self.nodes)}
        spark = SparkRow(
            phase=str(phases.now),
            since=phases.since,
            reserved=len(rows),
            needed=self.num_executors,
            input_mode=self.input_mode.name,
            application=self._application.id,
            nodes=tuple(sorted(rows, key=lambda row: order[row.node])),
            reason=phases.reason,
            error=str(self.error) if self.error is not None else "",
            tensorboard=next((n.board for n in self.nodes if n.board and self._has_board), ""),
        )
        return Snapshot(
            self._version,
            time.time(),
            self.name,
            launcher="spark",
            state=spark.state,
            events=tuple(self._events),
            spark=spark,
        )

    def logs(self, node: str | None = None, lines: int = 100) -> str:
        """Return the latest lines of the nodes' output.

        Parameters
        ----------
        node : str, optional
            Name of a node, such as ``"worker:0"``. Default: all nodes, with the name of the node
            before each line.
        lines : int
            Number of lines per node.

        Raises
        ------
        UnknownName
        """
        names = [each.assignment.name for each in self.nodes]
        if node is not None and node not in names:
            raise errors.UnknownName(f"unknown node {node!r}", fix=f"use one of {', '.join(names)}")
        with self.server.lock:
            tails = {
                each.assignment.name: each.last_lines(lines)
                for each in self.nodes
                if node in (None, each.assignment.name)
            }
        if node is not None:
            return "\n".join(tails[node])
        return "\n".join(f"{name}: {line}" for name, tail in tails.items() for line in tail)

    def tensorboard_url(self, *, wait: bool = True) -> Any:
        """Return the address of TensorBoard, or None if the cluster has none.

        Parameters
        ----------
        wait : bool
            If true (default), wait until TensorBoard listens; otherwise return a future.

        Returns
        -------
        str or None, or concurrent.futures.Future of it

        Raises
        ------
        LaunchError
            TensorBoard has ended. The error has its output.
        TimeLimit
            TensorBoard did not start within 60 s.
        StateError
            The cluster has ended, and TensorBoard with it. If the cluster failed, its error is
            raised instead.

        See Also
        --------
        tensorflowonspark.TFCluster.TFCluster.tensorboard_url
        """
        return self._board_url() if wait else jobs.in_background(self._board_url, "board")

    def _board_url(self) -> str | None:
        def board_node() -> Node | None:
            return next((node for node in self.nodes if node.board or node.board_error), None)

        if not self._has_board:
            return None
        self.phases.wait_until(lambda: board_node() or self.phase.is_end, _BOARD_SECONDS)
        node = board_node()
        if self.phase.is_end:
            raise self.error or errors.StateError(
                f"cluster {self.name!r} has ended, and its TensorBoard with it",
                fix="start a TensorBoard on log_dir= yourself",
            )
        if node is None:
            raise errors.TimeLimit(
                f"TensorBoard did not start within {_BOARD_SECONDS:g} s",
                fix="check the load of the executor's host",
            )
        if node.board_error:
            raise errors.LaunchError(
                f"TensorBoard {node.board_error}",
                task=node.assignment.name,
                fix="remove the cause, or start TensorBoard on log_dir= yourself",
            )
        return node.board

    def __repr__(self) -> str:
        return f"<TFCluster {self.name!r}: {self.phase}, {plural(self.num_executors, 'node')}>"

    # Events

    def _increment_version(self) -> None:
        self._version += 1
        notify_change()

    def _on_node_message(self, node: Node, kind: str) -> None:
        """React to a message of a node; called by the threads of the channels."""
        self._increment_version()
        if (problem := self._error_from(node, kind)) is not None:
            self.fail(problem)
        else:
            self._advance_phase()
        self._detect_feeds()
        self.phases.wake_waiters()

    def _error_from(self, node: Node, kind: str) -> errors.TfdError | None:
        """Return the error that the cluster fails with after a node's message, or None."""
        if kind == "start_failed":
            return self.server.problem or errors.LaunchError("a node could not be started")
        if kind == "reserved_again":
            return startup.started_twice(node)
        if node.error:
            return startup.failed(node)
        return startup.lost(node) if node.state == "lost" else None

    def _advance_phase(self) -> None:
        """Enter the next phase of the start when all nodes have reached it."""
        reserved = self.phase is Phase.RESERVING and all(node.state for node in self.nodes)
        # `move` returns true for one of two threads that handle the last two nodes' messages.
        if (
            reserved
            and self.phases.move(Phase.STARTING)
            and (placement_error := self._launch.placement_error())
        ):
            self.fail(placement_error)
            return
        not_running = ("", "reserved", "starting")
        if self.phase is Phase.STARTING and all(
            node.state not in not_running for node in self.nodes
        ):
            self.phases.move(Phase.RUNNING)

    def _detect_feeds(self) -> None:
        """Enter the feeding phase for rows without a `train` call: an action on an inference."""
        # Counts arrive once a second, so a count may include a `train` that has just ended.
        no_recent_train = not self._jobs and time.monotonic() - self._trained > _STALE_COUNT_SECONDS
        with self.server.lock:
            has_feeders = any(
                node.numbers.get("feeders") and not node.function_ended for node in self.fed
            )
            is_fed = no_recent_train and has_feeders
            if is_fed is self._fed_by_action:
                return
            self._fed_by_action = is_fed
        if is_fed:
            self.phases.feed_began()
        else:
            self.phases.feed_ended()

    def _on_task_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Cancel the stage of a Spark task that reports an error, so that Spark does not retry.

        A report that Spark runs a task again becomes a notice.
        """
        if message["type"] == "feed_repeated":
            self._events.append(
                Notice(
                    "warning",
                    feeding.retry_message(message),
                    fix="see Spark's log of the first attempt; the function must accept rows that "
                    "arrive twice",
                )
            )
            self._increment_version()
            return {}
        stage = message["stage"]
        if "error" not in message:
            return {"error": self._stage_errors.get(stage)}
        self._stage_errors[stage] = message["error"]
        # The node also reports its error to the driver, with more detail: wait for that.
        self.phases.wait(lambda phase: phase.is_end, 2.0)
        problem = self.error or agent_protocol.unpack_error(message["error"])
        self._application.cancel_stage(stage, str(problem))
        return {}

    def _launch_ended(self, future: Future[Any]) -> None:
        error = future.exception()
        # Running nodes report their own errors.
        if error is not None and self.phase in (Phase.RESERVING, Phase.STARTING):
            self.fail(startup.launch_error(error))

    def fail(self, error: errors.TfdError) -> None:
        """Fail with `error`: stop all nodes and jobs. Return at once."""
        with self.server.lock:
            if self.error is None and not self.phase.is_end:
                self.error = error
        if self.error is error and self.phases.move(Phase.FAILED, error.what.split("\n")[0]):
            self.end(_END_SECONDS, "the cluster has failed")

    def stop_coordinator(self) -> None:
        """Stop the coordinator that uses the nodes; none in this class."""

    def end(self, seconds: float, reason: str) -> Future[None]:
        """Stop nodes and jobs, then close the node server; return the future of the end."""
        self.server.order("stop", reason=reason)
        for job in list(self._jobs):
            job.cancel()
        return jobs.in_background(lambda: self._end(seconds), "end")

    def _end(self, seconds: float) -> None:
        self.stop_coordinator()
        self.phases.wait(lambda _: all(n.ended or n.attempt is None for n in self.nodes), seconds)
        try:
            self._launch.close()
        finally:
            self.server.close()
            registry.remove(self)

    def _repr_html_(self) -> str:
        return views.html(self.snapshot())
