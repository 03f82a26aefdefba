"""What is: frozen tables that every view is a pure function of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from tfd_notebook.model.events import Event, Notice
from tfd_notebook.model.spec import Role, TaskState

if TYPE_CHECKING:
    import pandas as pd

#: Columns of ``Cluster.to_frame()``, promised to other programs.
TASK_COLUMNS = (
    "task",
    "role",
    "index",
    "host",
    "address",
    "pid",
    "state",
    "reason",
    "cpu_percent",
    "rss_mb",
    "pss_mb",
    "gpu",
    "open_to",
    "restarts",
)

STREAM_COLUMNS = (
    "name",
    "kind",
    "state",
    "elements",
    "bytes",
    "elements_per_s",
    "bytes_per_s",
    "wait_fraction",
    "limit",
    "epoch",
    "job",
    "error",
)


GPU_COLUMNS = ("host", "index", "name", "task", "use_percent", "used_mb", "memory_mb")

NODE_COLUMNS = (
    "node",
    "role",
    "index",
    "executor",
    "host",
    "address",
    "pid",
    "state",
    "gpu",
    "rows",
    "results",
    "rows_per_s",
    "queue_depth",
    "queue_capacity",
    "batch_age_s",
    "error",
)


@dataclass(frozen=True)
class TaskRow:
    """One task as it is seen now.

    Memory is in MB (10**6 bytes), CPU in percent of one core, ``bytes_sent`` counts what the
    task's port has sent to its peers since the task's process started, ``bytes_per_s`` is its
    rate over the last seconds, ``rates`` has one rate for each measurement in that time, the
    latest last. ``working`` is the share of that time in which a data worker worked. ``gpu`` has
    for each GPU that the task sees its number, utilisation and used memory, of all processes.
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


@dataclass(frozen=True)
class GpuRow:
    """One GPU that tasks of the cluster may be given.

    Parameters
    ----------
    host : str
        How a person calls its host.
    index : int
        Its number there, as ``nvidia-smi`` counts.
    name : str
        What the driver calls it, such as ``"NVIDIA H100 80GB HBM3"``.
    task : str
        The task of this cluster that sees it, empty where none does.
    use_percent : float, optional
        Share of the last second in which it computed, for whomever; None while unknown.
    used_mb, memory_mb : float, optional
        How much of its memory is used, by whomever, and how much there is, in MB (10**6 bytes).
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
        """Number, use and memory, such as ``0: 35 %, 2.1 of 80 GB``; a GB is 10**9 bytes."""
        said = [] if self.use_percent is None else [f"{self.use_percent:.0f} %"]
        if self.used_mb is not None and self.memory_mb is not None:
            said.append(f"{self.used_mb / 1e3:.1f} of {self.memory_mb / 1e3:.0f} GB")
        return f"{self.index}: {', '.join(said)}" if said else ""


@dataclass(frozen=True)
class StreamRow:
    """One consumer of the cluster's data: a `Stream`, or a dataset that a loop or Keras reads.

    Parameters
    ----------
    name : str
    kind : {"stream", "dataset"}
    state : {"new", "running", "paused", "finished", "failed", "stopped"}
    elements, bytes : int
        Delivered so far; bytes follow from the static shapes, 0 where these are not known.
    elements_per_s, bytes_per_s : float
        Over the last seconds.
    wait_fraction : float, optional
        Share of the time that the consumer spent waiting for data, 0 to 1; None while unknown.
    history : tuple of float
        Elements per second, one value a second, the latest last, at most 60.
    error : str
        The error that ended it, empty where there is none.
    limit : str
        What limits it now, in a sentence; empty while that is unknown.
    epoch : str
        What the last whole pass delivered, where that is not the dataset once; else empty.
    job : str
        The ``job_name`` that it reads under, empty where it has none.
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
    error: str = ""
    limit: str = ""
    epoch: str = ""
    job: str = ""


@dataclass(frozen=True)
class CoordinatedRow:
    """One worker as its coordinator sees it.

    Parameters
    ----------
    index : int
    state : {"running", "idle", "paused", "lost"}
    id : int, optional
        The closure that it has now; None where it has none.
    function : str
        The function of that closure.
    seconds : float, optional
        How long it has had it.
    done, failed, lost : int
        Closures that were ready, that raised, and that went back to the queue with the worker.
    built, unbuilt : int
        Resources, such as iterators of its dataset, that were built there, and that failed to be.
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
    """The coordinator of the workers and parameter servers.

    Parameters
    ----------
    state : {"idle", "running", "paused", "stopped"}
    reason : str
        Why it is paused, empty where it is not.
    counts : mapping of str to int
        Closures by state, all that were ever scheduled.
    closures_per_s : float
        Closures that ended, over the last 5 seconds.
    queue_ms, run_ms : tuple of float, optional
        50th, 90th and 99th percentile of how long the latest closures waited and ran.
    left_s : tuple of float, optional
        Seconds until what is scheduled has ended, and between which low and high that lies four
        times out of five if it goes on as in the last seconds; None while unknown.
    workers : tuple of CoordinatedRow
    traces : mapping of str to int
        How often each function was traced.
    ps_bytes : mapping of str to int
        Bytes of the variables on each parameter server.
    limit : str
        Why it is not faster, in a sentence.
    held : tuple of int
        Workers that get no closure, whether or not all of it is paused.
    break_on_failure : bool
        Whether a failure pauses it.
    reduced : bool
        Whether this TensorFlow is not known, so that only results are seen.
    """

    state: str
    reason: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    closures_per_s: float = 0.0
    queue_ms: tuple[float, float, float] | None = None
    run_ms: tuple[float, float, float] | None = None
    left_s: tuple[float, float, float] | None = None
    workers: tuple[CoordinatedRow, ...] = ()
    traces: Mapping[str, int] = field(default_factory=dict)
    ps_bytes: Mapping[str, int] = field(default_factory=dict)
    limit: str = ""
    held: tuple[int, ...] = ()
    break_on_failure: bool = False
    reduced: bool = False


#: Phases of a cluster on Spark, in their order; each says what `Snapshot.state` is then.
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
        Its index among the nodes of its role.
    executor : str
        Spark's id of the executor that it belongs to; ``"driver"`` for one beside the notebook.
    host : str
    address : str
        Where TensorFlow's peers reach it, ``"host:port"``; empty while that is unknown.
    pid : int, optional
        Its process; None before there is one.
    state : {"reserved", "starting", "running", "finished", "failed", "lost", "stopped"}
    gpu : str
        The GPUs that it was given, such as ``"0,1"``; empty where it has none.
    rows, results : int
        Rows that its function took so far, and results that it gave.
    rows_per_s : float
        Rows that it took per second, over the last seconds.
    queue_depth, queue_capacity : int, optional
        Chunks of rows that wait for it, and how many may; None where nothing is fed.
    batch_age_s : float, optional
        Seconds since its function took a batch last; None before the first.
    log : tuple of str
        The latest lines that it wrote, the latest last.
    error : str
        What ended it, with the traceback from there; empty where nothing did.
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
        """Its name, such as ``worker:0``."""
        return f"{self.role}:{self.index}"


@dataclass(frozen=True)
class SparkRow:
    """What a cluster on Spark is doing, and its nodes.

    Parameters
    ----------
    phase : str
        One of `SPARK_PHASES`.
    since : float
        When that phase began, seconds since the epoch.
    reserved, needed : int
        Nodes that have reported from their executors, and how many there will be.
    input_mode : {"SPARK", "TENSORFLOW"}
        Who reads the data: Spark, which feeds it, or the user's function.
    application : str
        Spark's id of the application.
    nodes : tuple of NodeRow
        Those that have reported, by role and index.
    reason : str
        What it waits for, or why it ended, in a sentence; empty where the phase says all.
    error : str
        The error that made it fail, with the traceback from the node; empty where none did.
    tensorboard : str
        The address of its TensorBoard; empty where it has none.
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
        """What `Snapshot.state` is in this phase; degraded where a node is no more what it was."""
        state = SPARK_PHASES[self.phase]
        if state == "ready" and any(node.state in ("failed", "lost") for node in self.nodes):
            return "degraded"
        return state

    @property
    def rows_per_s(self) -> float:
        """Rows per second that all nodes take together."""
        return sum(node.rows_per_s for node in self.nodes)


@dataclass(frozen=True)
class Snapshot:
    """A cluster at one moment.

    Parameters
    ----------
    version : int
        Grows with every change.
    time : float
        Seconds since the epoch.
    name, launcher : str
    state : str
        ``new``, ``starting``, ``ready``, ``degraded``, ``stopping``, ``stopped``, ``failed``,
        ``lost``, or ``left``: its tasks go on, and this process has to do with them no more.
    tasks : tuple of TaskRow
        Dispatcher first, then by role and index.
    streams : tuple of StreamRow
    gpus : tuple of GpuRow
        Those that tasks may be given, by host and number, also those that no task sees.
    planned, requested, observed : mapping of Role to int
        Tasks that the user wants, that the launcher was asked for, and that answered a probe.
    events : tuple of Event
        The latest events, oldest first.
    journal_bytes : int, optional
        Size of the dispatcher's journal.
    expires : float, optional
        When the cluster stops by itself, seconds since the epoch.
    lease : float, optional
        Until when it stays without a kernel, seconds since the epoch; None: it ends with its
        kernel.
    coordinator : CoordinatorRow, optional
        None where none was made.
    spark : SparkRow, optional
        For a cluster on Spark, whose nodes stand there and not among the tasks; else None.
    """

    version: int
    time: float
    name: str
    launcher: str
    state: str
    tasks: tuple[TaskRow, ...] = ()
    streams: tuple[StreamRow, ...] = ()
    gpus: tuple[GpuRow, ...] = ()
    planned: Mapping[Role, int] = field(default_factory=dict)
    requested: Mapping[Role, int] = field(default_factory=dict)
    observed: Mapping[Role, int] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    journal_bytes: int | None = None
    expires: float | None = None
    lease: float | None = None
    coordinator: CoordinatorRow | None = None
    spark: SparkRow | None = None

    @property
    def notices(self) -> tuple[Notice, ...]:
        """The events that a person should read, oldest first."""
        return tuple(event for event in self.events if isinstance(event, Notice))

    def task(self, name: str) -> TaskRow | None:
        """Return the row of the task `name`, or None."""
        return next((row for row in self.tasks if row.task == name), None)

    def to_frame(self) -> pd.DataFrame:
        """Return the tasks as a DataFrame with the columns `TASK_COLUMNS`."""
        return _frame(self.tasks, TASK_COLUMNS)

    def streams_frame(self) -> pd.DataFrame:
        """Return the consumers as a DataFrame with the columns `STREAM_COLUMNS`."""
        return _frame(self.streams, STREAM_COLUMNS)

    def gpus_frame(self) -> pd.DataFrame:
        """Return the GPUs as a DataFrame with the columns `GPU_COLUMNS`."""
        return _frame(self.gpus, GPU_COLUMNS)

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
