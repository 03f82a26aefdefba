"""Immutable tables that describe a cluster at one moment. Views are pure functions of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from tfd_notebook.model.events import Event, Notice
from tfd_notebook.model.spec import Role, TaskState

if TYPE_CHECKING:
    import pandas as pd

#: Number of replies of a task among which ``TaskRow.late`` counts the late ones.
JUDGED_REPLIES = 3


def _columns(row: type, *left_out: str) -> tuple[str, ...]:
    return tuple(f.name for f in fields(row) if f.name not in left_out)


@dataclass(frozen=True)
class TaskRow:
    """Current state of one task.

    Memory is in MB (10**6 bytes), CPU in percent of one core. ``bytes_sent`` counts the bytes sent
    from the task's port since the task's process started. ``bytes_per_s`` is its rate over the last
    seconds, and ``rates`` has one rate per measurement in that time, latest last. ``working`` is
    the share of that time in which a data worker was busy. ``late`` is the number of late ones
    among its last three replies. ``gpu`` lists each GPU that the task can use with its index,
    utilization and used memory, summed over all processes.
    """

    task: str
    role: Role
    index: int
    host: str = "localhost"
    address: str = ""
    pid: int | None = None
    state: TaskState = TaskState.PLANNED
    reason: str = ""
    cpu_percent: float | None = None
    rss_mb: float | None = None
    pss_mb: float | None = None
    gpu: str = ""
    open_to: str = ""
    restarts: int = 0
    bytes_sent: int | None = None
    bytes_per_s: float | None = None
    rates: tuple[float, ...] = ()
    working: float | None = None
    late: int = 0


#: Columns of ``Cluster.to_frame()``. They are part of the public interface.
TASK_COLUMNS = _columns(TaskRow, "bytes_sent", "bytes_per_s", "rates", "working", "late")


@dataclass(frozen=True)
class GpuRow:
    """One GPU that tasks of the cluster can use.

    Parameters
    ----------
    host : str
        Display name of the host.
    index : int
        Index on the host, in the order of ``nvidia-smi``.
    name : str
        Product name from the driver, such as ``"NVIDIA H100 80GB HBM3"``.
    task : str
        Task of this cluster that uses the GPU. Empty without one.
    use_percent : float, optional
        Share of the last second in which any process computed on it. None while unknown.
    used_mb, memory_mb : float, optional
        Memory used by any process, and total memory, in MB (10**6 bytes).
    """

    host: str
    index: int
    name: str = ""
    task: str = ""
    use_percent: float | None = None
    used_mb: float | None = None
    memory_mb: float | None = None

    @property
    def words(self) -> str:
        """Index, utilization and memory, such as ``0: 35 %, 2.1 of 80 GB`` (GB: 10**9 bytes)."""
        parts = [] if self.use_percent is None else [f"{self.use_percent:.0f} %"]
        if self.used_mb is not None and self.memory_mb is not None:
            parts.append(f"{self.used_mb / 1e3:.1f} of {self.memory_mb / 1e3:.0f} GB")
        return f"{self.index}: {', '.join(parts)}" if parts else ""


GPU_COLUMNS = _columns(GpuRow)


@dataclass(frozen=True)
class StreamRow:
    """One consumer of the cluster's data: a `Stream`, or a dataset that a loop or Keras reads.

    Parameters
    ----------
    name : str
    kind : {"stream", "dataset"}
    state : {"new", "running", "paused", "finished", "failed", "stopped"}
    elements, bytes : int
        Delivered so far. Bytes are computed from the static shapes, and are 0 if these are unknown.
    elements_per_s, bytes_per_s : float
        Over the last seconds.
    wait_fraction : float, optional
        Share of the time that the consumer waited for data, 0 to 1. None while unknown.
    history : tuple of float
        Elements per second, one value per second, latest last, at most 60.
    limit : str
        Its current bottleneck, in words. Empty while unknown.
    epoch : str
        Deviation of the last complete epoch from the dataset. Empty without one.
    job : str
        Its ``job_name``. Empty without one.
    error : str
        The error that ended it. Empty without one.
    """

    name: str
    kind: str
    state: str
    elements: int = 0
    bytes: int = 0
    elements_per_s: float = 0.0
    bytes_per_s: float = 0.0
    wait_fraction: float | None = None
    history: tuple[float, ...] = ()
    limit: str = ""
    epoch: str = ""
    job: str = ""
    error: str = ""


STREAM_COLUMNS = _columns(StreamRow, "history")


@dataclass(frozen=True)
class RankRow:
    """The process in which `Cluster.run` calls a function for one training worker.

    Parameters
    ----------
    task : str
        The worker.
    rank : int
    host : str
    state : {"starting", "running", "finished", "failed", "lost", "stopped"}
    function : str
        Name of the function.
    attempt : int
        1, and one more for each restart after a lost process.
    reason : str
        The error of the function, or the end of the process. Empty without one.
    started, ended : float, optional
        Seconds since the epoch. None before.
    """

    task: str
    rank: int
    host: str
    state: str
    function: str = ""
    attempt: int = 1
    reason: str = ""
    started: float | None = None
    ended: float | None = None


@dataclass(frozen=True)
class CoordinatedRow:
    """State of one worker as its coordinator reports it.

    Parameters
    ----------
    index : int
    state : {"running", "idle", "paused", "lost"}
    id : int, optional
        The closure that it has now. None if it is idle.
    function : str
        The function of that closure.
    seconds : float, optional
        Time since it got the closure.
    done, failed, lost : int
        Closures that became ready, that raised, and that were queued again when the worker was
        lost.
    built, unbuilt : int
        Resources, such as iterators of its dataset, that were built there or failed to build.
    """

    index: int
    state: str
    id: int | None = None
    function: str = ""
    seconds: float | None = None
    done: int = 0
    failed: int = 0
    lost: int = 0
    built: int = 0
    unbuilt: int = 0


@dataclass(frozen=True)
class CoordinatorRow:
    """State of the coordinator of workers and parameter servers.

    Parameters
    ----------
    state : {"idle", "running", "paused", "stopped"}
    reason : str
        Why it is paused. Empty otherwise.
    counts : mapping of str to int
        Number of all scheduled closures by state.
    closures_per_s : float
        Closures that ended, over the last 5 seconds.
    queue_ms, run_ms : tuple of float, optional
        p50, p90 and p99 of the waiting and running time of the latest closures.
    left_s : tuple of float, optional
        Estimated seconds until all scheduled closures have ended, with the bounds of the 80 %
        interval. They assume the speed of the last seconds. None while unknown.
    workers : tuple of CoordinatedRow
    traces : mapping of str to int
        Number of traces of each function.
    ps_bytes : mapping of str to int
        Bytes of the variables on each parameter server.
    limit : str
        Its current bottleneck, in words.
    held : tuple of int
        Workers that get no closures, whether or not the coordinator is paused.
    break_on_failure : bool
        Whether a failure pauses it.
    reduced : bool
        Whether this TensorFlow version is unsupported, so that only results are observed.
    """

    state: str
    reason: str = ""
    counts: Mapping[str, int] = field(default_factory=dict, hash=False)
    closures_per_s: float = 0.0
    queue_ms: tuple[float, float, float] | None = None
    run_ms: tuple[float, float, float] | None = None
    left_s: tuple[float, float, float] | None = None
    workers: tuple[CoordinatedRow, ...] = ()
    traces: Mapping[str, int] = field(default_factory=dict, hash=False)
    ps_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)
    limit: str = ""
    held: tuple[int, ...] = ()
    break_on_failure: bool = False
    reduced: bool = False


@dataclass(frozen=True)
class AdaptationRow:
    """Range and latest decision of adaptive data workers.

    Parameters
    ----------
    minimum, maximum : int
        Range of the number of data workers.
    workers : int, optional
        The number that the latest decision requested. None before the first.
    reason : str
        Its reason. Empty before the first decision.
    since : float, optional
        Its time, seconds since the epoch.
    """

    minimum: int
    maximum: int
    workers: int | None = None
    reason: str = ""
    since: float | None = None


#: Phases of a cluster on Spark in their order, each with the value of `Snapshot.state`.
SPARK_PHASES: Mapping[str, str] = {
    "reserving": "starting",
    "starting": "starting",
    "running": "ready",
    "feeding": "ready",
    "draining": "stopping",
    "stopped": "stopped",
    "failed": "failed",
}


@dataclass(frozen=True)
class NodeRow:
    """One node of a cluster on Spark: the process that runs the user's function.

    Parameters
    ----------
    role : {"ps", "chief", "master", "evaluator", "worker"}
    index : int
        Index among the nodes of its role.
    executor : str
        Spark's id of its executor. ``"driver"`` for a node on the driver's host.
    host : str
    address : str
        Address for its TensorFlow peers, ``"host:port"``. Empty while unknown.
    pid : int, optional
        Process id. None before the process exists.
    state : {"reserved", "starting", "running", "finished", "failed", "lost", "stopped"}
    gpu : str
        Its GPUs, such as ``"0,1"``. Empty without GPUs.
    rows, results : int
        Number of rows that its function has read, and of results that it has returned.
    rows_per_s : float
        Rows read per second, over the last seconds.
    queue_depth, queue_capacity : int, optional
        Number of chunks of rows in its queue, and the limit. None without feeding.
    batch_age_s : float, optional
        Seconds since its function last took a batch. None before the first.
    log : tuple of str
        The latest lines of its log, latest last.
    error : str
        The error that ended it, with its traceback. Empty without one.
    """

    role: str
    index: int
    executor: str = ""
    host: str = ""
    address: str = ""
    pid: int | None = None
    state: str = "reserved"
    gpu: str = ""
    rows: int = 0
    results: int = 0
    rows_per_s: float = 0.0
    queue_depth: int | None = None
    queue_capacity: int | None = None
    batch_age_s: float | None = None
    log: tuple[str, ...] = ()
    error: str = ""

    @property
    def node(self) -> str:
        """The node's name, such as ``worker:0``."""
        return f"{self.role}:{self.index}"


NODE_COLUMNS = ("node", *_columns(NodeRow, "log"))


@dataclass(frozen=True)
class SparkRow:
    """State of a cluster on Spark and of its nodes.

    Parameters
    ----------
    phase : str
        One of `SPARK_PHASES`.
    since : float
        Start of the phase, seconds since the epoch.
    reserved, needed : int
        Number of nodes that have reported from their executors, and the planned number.
    input_mode : {"SPARK", "TENSORFLOW"}
        Whether Spark feeds the data or the user's function reads it.
    application : str
        Spark's id of the application.
    nodes : tuple of NodeRow
        Nodes that have reported, by role and index.
    reason : str
        Condition that the cluster waits for, or why it ended. Empty if the phase is enough.
    error : str
        The error that made the cluster fail, with the node's traceback. Empty without one.
    tensorboard : str
        Address of its TensorBoard. Empty without one.
    """

    phase: str
    since: float
    reserved: int = 0
    needed: int = 0
    input_mode: str = "SPARK"
    application: str = ""
    nodes: tuple[NodeRow, ...] = ()
    reason: str = ""
    error: str = ""
    tensorboard: str = ""

    @property
    def state(self) -> str:
        """The value of `Snapshot.state`. ``degraded`` if a node has failed or is lost."""
        return spark_state(self.phase, (node.state for node in self.nodes))

    @property
    def rows_per_s(self) -> float:
        """The sum of the rows per second of all nodes."""
        return sum(node.rows_per_s for node in self.nodes)


def spark_state(phase: str, nodes: Iterable[str]) -> str:
    """Return the state of a cluster on Spark in this phase, with nodes in these states."""
    state = SPARK_PHASES[phase]
    if state == "ready" and any(node in ("failed", "lost") for node in nodes):
        return "degraded"
    return state


@dataclass(frozen=True)
class Snapshot:
    """A cluster at one moment.

    Parameters
    ----------
    version : int
        Increases with every change.
    time : float
        Seconds since the epoch.
    name, launcher : str
    state : str
        ``new``, ``starting``, ``ready``, ``degraded``, ``stopping``, ``stopped``, ``failed``,
        ``lost``, or ``left``: this process has detached, and the tasks keep running.
    tasks : tuple of TaskRow
        Dispatcher first, then by role and index.
    streams : tuple of StreamRow
    ranks : tuple of RankRow
        The processes of the latest `Cluster.run`.
    gpus : tuple of GpuRow
        GPUs that tasks can use, by host and index, including GPUs without a task.
    planned, requested, observed : mapping of Role to int
        Number of tasks that the user planned, that the launcher requested, and that answered a
        probe.
    events : tuple of Event
        The latest events, oldest first.
    journal_bytes : int, optional
        Size of the dispatcher's journal.
    expires : float, optional
        When the cluster stops because of its time limit, seconds since the epoch.
    lease : float, optional
        When the cluster stops unless its lease is renewed, seconds since the epoch. None if it
        stops with its kernel.
    coordinator : CoordinatorRow, optional
        None without a coordinator.
    spark : SparkRow, optional
        State of a cluster on Spark, whose nodes are not in `tasks`. Else None.
    adaptation : AdaptationRow, optional
        None unless the number of data workers adapts.
    """

    version: int
    time: float
    name: str
    launcher: str
    state: str
    tasks: tuple[TaskRow, ...] = ()
    streams: tuple[StreamRow, ...] = ()
    ranks: tuple[RankRow, ...] = ()
    gpus: tuple[GpuRow, ...] = ()
    planned: Mapping[Role, int] = field(default_factory=dict, hash=False)
    requested: Mapping[Role, int] = field(default_factory=dict, hash=False)
    observed: Mapping[Role, int] = field(default_factory=dict, hash=False)
    events: tuple[Event, ...] = ()
    journal_bytes: int | None = None
    expires: float | None = None
    lease: float | None = None
    coordinator: CoordinatorRow | None = None
    spark: SparkRow | None = None
    adaptation: AdaptationRow | None = None

    @property
    def notices(self) -> tuple[Notice, ...]:
        """The notices among the events, oldest first."""
        return tuple(event for event in self.events if isinstance(event, Notice))

    def task(self, name: str) -> TaskRow | None:
        """Return the row of the task `name`, or None."""
        return next((row for row in self.tasks if row.task == name), None)

    def to_frame(self) -> pd.DataFrame:
        """Return the tasks as a DataFrame with the columns `TASK_COLUMNS`."""
        return _frame(self.tasks, TASK_COLUMNS)

    def nodes_frame(self) -> pd.DataFrame:
        """Return the nodes on Spark as a DataFrame with the columns `NODE_COLUMNS`."""
        return _frame(self.spark.nodes if self.spark is not None else (), NODE_COLUMNS)


def _frame(rows: tuple[object, ...], columns: tuple[str, ...]) -> pd.DataFrame:
    import pandas as pd

    records = [
        {
            name: str(value) if isinstance(value, (Role, TaskState)) else value
            for name in columns
            for value in (getattr(row, name),)
        }
        for row in rows
    ]
    return pd.DataFrame.from_records(records, columns=list(columns))


def as_dict(snapshot: Snapshot) -> dict[str, object]:
    """Return `snapshot` as JSON values (for the command line and front ends)."""

    def plain(value: object) -> object:
        if isinstance(value, (Role, TaskState)):
            return str(value)
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        if hasattr(value, "__dataclass_fields__"):
            return {f.name: plain(getattr(value, f.name)) for f in fields(value)}  # type: ignore[arg-type]
        return value

    result = plain(snapshot)
    assert isinstance(result, dict)
    return result
