"""A cluster on Spark while it lives: what is known of it, and what becomes of it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tfd_notebook import errors, views
from tfd_notebook.model.events import EventLog, Notice
from tfd_notebook.model.snapshot import Snapshot, SparkRow
from tfd_notebook.net import agent_protocol
from tfd_notebook.spark.driver import feeding, jobs, node_registry, registry, roles, startup
from tfd_notebook.spark.driver.application import Application
from tfd_notebook.spark.driver.jobs import Job
from tfd_notebook.spark.driver.launch_plan import Plan
from tfd_notebook.spark.driver.node_registry import Node, NodeServer
from tfd_notebook.spark.driver.phases import Phase, Phases
from tfd_notebook.spark.modes import InputMode

#: Seconds for TensorBoard to report its address.
_BOARD_SECONDS = 60.0
#: Seconds for nodes to end when the cluster has failed.
_END_SECONDS = 10.0
#: The value of attributes on the class, as in TensorFlowOnSpark: `run` sets them.
_UNSET: Any = None
#: Seconds after which what a node counted is no longer what was before.
_COUNTED_SECONDS = 3.0


class _InstanceProperty(property):
    """A property whose value on the class is None."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return None if instance is None else super().__get__(instance, owner)


class SparkClusterBase:
    """The part of `TFCluster` that lives: it hears its nodes, fails with them, and is seen.

    Parameters
    ----------
    application : Application
    plan_of : callable
        Makes the `Plan` of this object, once that listens.
    assignments : sequence of Assignment
    input_mode : InputMode
    name : str, optional
    heartbeat_limit : float
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
        self._is_fed = False
        self._trained = float("-inf")
        self._phases = Phases(self._changed)
        self._jobs: set[Job] = set()
        #: Errors of tasks, by the numbers of their stages.
        self._given_up: dict[int, dict[str, Any]] = {}
        self._events = EventLog()
        #: Whether its nodes run servers for this process, and come to no end by themselves.
        self.serves = False
        self.server = NodeServer(
            *application.addresses(), assignments, heartbeat_limit, self._heard, self._asked
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
        self.name = registry.add(self, name)
        self._launch.begin().add_done_callback(self._launch_ended)

    # What it is

    @property
    def phase(self) -> Phase:
        """What it is doing."""
        return self._phases.now

    @property
    def nodes(self) -> list[Node]:
        """The nodes as the driver knows them."""
        return list(self.server.nodes.values())

    @property
    def fed(self) -> list[Node]:
        """Those that take rows."""
        return [node for node in self.nodes if node.assignment.is_fed]

    @property
    def slots_held(self) -> int:
        """How many slots of Spark its nodes keep while they live; they are free when it ends."""
        return 0 if self.phase.is_end else self._launch.slots_held

    @_InstanceProperty
    def cluster_info(self) -> list[dict[str, Any]]:
        """Description of each node that has reported; see `TFCluster`."""
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

    def snapshot(self) -> Snapshot:
        """Return the cluster as it is now, for views; from any thread, and cheap."""
        with self.server.lock:
            rows = tuple(node_registry.node_row(node) for node in self.nodes if node.state)
        phases = self._phases
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
            tensorboard=next((node.board for node in self.nodes if node.board), ""),
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
        """Return the latest lines that nodes wrote.

        Parameters
        ----------
        node : str, optional
            Such as ``"worker:0"``. Default: all, each line with its node.
        lines : int
            Of each node.

        Raises
        ------
        UnknownName
        """
        names = [each.assignment.name for each in self.nodes]
        if node is not None and node not in names:
            raise errors.UnknownName(f"there is no node {node!r}", fix=f"one of {', '.join(names)}")
        with self.server.lock:
            found = {
                each.assignment.name: each.last_lines(lines)
                for each in self.nodes
                if node in (None, each.assignment.name)
            }
        if node is not None:
            return "\n".join(found[node])
        return "\n".join(f"{name}: {line}" for name, tail in found.items() for line in tail)

    def tensorboard_url(self, *, wait: bool = True) -> Any:
        """Return the address of TensorBoard, None where the cluster has none.

        Parameters
        ----------
        wait : bool
            Whether to wait until it listens (default), or return the future of it.

        Returns
        -------
        str or None, or concurrent.futures.Future of it

        Raises
        ------
        LaunchError
            It has ended; with what it wrote.
        TimeLimit
            It has not come up within a minute.
        StateError
            The cluster has ended, and TensorBoard with it; where it failed, that error.

        See Also
        --------
        tensorflowonspark.TFCluster.TFCluster.tensorboard_url
        """
        return self._board_url() if wait else jobs.in_background(self._board_url, "board")

    def _board_url(self) -> str | None:
        def said() -> Node | None:
            return next((node for node in self.nodes if node.board or node.no_board), None)

        if not self._has_board:
            return None
        self.wait_until(lambda: said() or self.phase.is_end, _BOARD_SECONDS)
        node = said()
        if self.phase.is_end:
            raise self.error or errors.StateError(
                f"the cluster {self.name!r} has ended, and its TensorBoard with it",
                fix="start one of your own on log_dir=",
            )
        if node is None:
            raise errors.TimeLimit(
                f"TensorBoard has not come up within {_BOARD_SECONDS:g} s",
                fix="is the executor's host overloaded?",
            )
        if node.no_board:
            raise errors.LaunchError(
                f"TensorBoard {node.no_board}",
                task=node.assignment.name,
                fix="remove that cause, or start TensorBoard yourself on log_dir=",
            )
        return node.board

    def __repr__(self) -> str:
        return f"<TFCluster {self.name!r}: {self.phase}, {self.num_executors} nodes>"

    # What happens to it

    def _changed(self) -> None:
        self._version += 1

    def _heard(self, node: Node, kind: str) -> None:
        """React to what a node said; called by the threads of the channels."""
        self._version += 1
        if (problem := self._problem(node, kind)) is not None:
            self.fail(problem)
        else:
            self._advance()
        self._note_feeders()
        self._phases.wake_waiters()

    def _problem(self, node: Node, kind: str) -> errors.TfdError | None:
        """Return what the cluster fails of, by what a node said."""
        if kind == "unable":
            return self.server.problem or errors.LaunchError("a node could not be started")
        if kind == "again":
            return startup.twice(node)
        if node.error:
            return startup.failed(node)
        return startup.lost(node) if node.state == "lost" else None

    def _advance(self) -> None:
        """Enter the next phase of the start, when all nodes are so far."""
        reserved = self.phase is Phase.RESERVING and all(node.state for node in self.nodes)
        # Of two that hear of the last two nodes at the same time, one gets true.
        if reserved and self._phases.move(Phase.STARTING):
            if unfed := self._launch.unfed():
                self.fail(unfed)
                return
            self._start_beside()
        coming = ("", "reserved", "starting")
        if self.phase is Phase.STARTING and all(node.state not in coming for node in self.nodes):
            self._phases.move(Phase.RUNNING)

    def _note_feeders(self) -> None:
        """Enter the phase for rows that come by nobody's `train`: by an action on an inference."""
        # What nodes counted is a second old, and may be of a `train` that has just ended.
        others = not self._jobs and time.monotonic() - self._trained > _COUNTED_SECONDS
        with self.server.lock:
            counted = any(node.numbers.get("feeders") and not node.is_over for node in self.fed)
            fed = others and counted
            if fed is self._is_fed:
                return
            self._is_fed = fed
        if fed:
            self._phases.feed_began()
        else:
            self._phases.feed_ended()

    def _asked(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """End the jobs of a task that has met an error, which Spark would else try again.

        A task that Spark does run again is a notice.
        """
        if said["say"] == "fed again":
            self._events.append(
                Notice(
                    "warning",
                    feeding.retry_message(said),
                    fix="see Spark's log of the first attempt; write functions that can take a "
                    "row twice",
                )
            )
            self._changed()
            return {}
        stage = said["stage"]
        if "error" not in said:
            return {"gave_up": self._given_up.get(stage)}
        self._given_up[stage] = said["error"]
        # The driver hears of a node's error by itself, and that says more.
        self._phases.wait(lambda phase: phase.is_end, 2.0)
        problem = self.error or agent_protocol.unpack_error(said["error"])
        self._application.cancel_stage(stage, str(problem))
        return {}

    def _start_beside(self) -> None:
        try:
            self._launch.start_beside()
        except errors.TfdError as error:
            self.fail(error)
        except Exception as error:
            self.fail(
                errors.LaunchError(
                    f"the nodes beside the notebook cannot be started: "
                    f"{type(error).__name__}: {error}"
                )
            )

    def _launch_ended(self, future: Future[Any]) -> None:
        error = future.exception()
        # Once the nodes run, what becomes of them is heard from themselves.
        if error is not None and self.phase in (Phase.RESERVING, Phase.STARTING):
            self.fail(startup.why_it_failed(error))

    def fail(self, error: errors.TfdError) -> None:
        """Give the cluster up because of `error`: end all nodes and jobs. Returns at once."""
        with self.server.lock:
            if self.error is None and not self.phase.is_end:
                self.error = error
        if self.error is error and self._phases.move(Phase.FAILED, error.what.split("\n")[0]):
            self.end(_END_SECONDS, "the cluster has failed")

    def let_go(self) -> None:
        """Let go of what uses the nodes from here."""

    def end(self, seconds: float, reason: str) -> Future[None]:
        """Have nodes and jobs ended, and listen no more; the future is that of it."""
        self.server.order("stop", reason=reason)
        for job in list(self._jobs):
            job.cancel()
        return jobs.in_background(lambda: self._end(seconds), "end")

    def _end(self, seconds: float) -> None:
        self.let_go()
        self._phases.wait(lambda _: all(n.ended or n.attempt is None for n in self.nodes), seconds)
        try:
            self._launch.close()
        finally:
            self.server.close()
            registry.remove(self)

    def move(self, to: Phase, reason: str) -> bool:
        """Enter a phase; False where it may not follow the present one."""
        return self._phases.move(to, reason)

    def wait_until(self, reached: Any, timeout: float | None) -> bool:
        """Wait until `reached` says so, asked whenever something has happened."""
        limit = None if timeout in (None, float("inf")) else timeout
        return self._phases.wait_until(reached, limit)

    def wake_waiters(self) -> None:
        """Have those that wait look again."""
        self._phases.wake_waiters()

    def _repr_html_(self) -> str:
        return views.html(self.snapshot())
