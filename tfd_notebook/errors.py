"""Every error that tfd_notebook raises, in one tree.

::

    TfdError                  TFD000  anything that went wrong here
    ├── UsageError            TFD100  an argument that cannot be meant (also a ValueError)
    │   ├── UnknownName       TFD101  a launcher, task, option or cluster that does not exist
    │   ├── NameTaken         TFD102  a cluster of that name lives with another specification
    │   ├── PortInUse         TFD103  somebody else holds the port
    │   ├── WorkDirError      TFD104  work_dir cannot be written, or is full
    │   └── StateError        TFD105  the call does not fit the object's state
    ├── LaunchError           TFD200  a task or its agent did not come up
    │   ├── TensorFlowMissing TFD201  no TensorFlow where one is needed
    │   ├── StartTimeout      TFD202  not ready within the time limit
    │   ├── AgentLost         TFD203  the agent that supervises the tasks has ended
    │   └── FilterFailed      TFD205  a port cannot be closed to other hosts
    ├── RemoteError           TFD204  a kernel elsewhere, or the source that it was given
    ├── InvalidMessage        TFD206  another host sent a message that is not valid
    ├── DataError             TFD300  the data path
    │   ├── NoWorkers         TFD301  no data worker is there to serve
    │   ├── DataLoss          TFD302  elements were lost and cannot be delivered
    │   ├── FinishedJob       TFD303  that job has already delivered its data
    │   ├── PipelineError     TFD304  the user's pipeline failed in a worker
    │   ├── NotSerializable   TFD305  the dataset cannot travel to the workers
    │   ├── DispatcherLost    TFD306  the dispatcher is gone
    │   └── Interrupted       TFD307  iteration was cancelled
    ├── TimeLimit             TFD400  a wait reached its limit (also a TimeoutError)
    ├── Unsupported           TFD500  this platform or version cannot do it
    ├── Refused               TFD501  the administrator's policy does not allow it
    ├── CoordinatorError      TFD600  scheduling closures
    │   ├── PausedError       TFD601  a wait would never end: the coordinator is paused
    │   ├── ValueGone         TFD602  nobody holds that RemoteValue any more
    │   └── TasksMissing      TFD603  a worker or parameter server does not answer
    ├── ResolveError          TFD700  finding out which tasks a cluster has
    │   ├── NotThere          TFD701  what should tell of the cluster is not there
    │   ├── Malformed         TFD702  what tells of the cluster cannot be read, or be meant
    │   ├── NoTasks           TFD703  a group or job without any task that could be used
    │   ├── AccessDenied      TFD704  credentials are missing, expired or not sufficient
    │   └── NoAnswer          TFD705  the system that knows the cluster fails, or does not answer
    └── SparkError            TFD890  a cluster on the executors of Apache Spark
        ├── NotEnoughSlots    TFD891  Spark cannot run all nodes, or agents, at once
        ├── ReservationLimit  TFD892  not all nodes reported in time (also a TimeoutError)
        ├── NodeFailed        TFD893  the user's function raised in a node
        ├── NodeLost          TFD894  a node's process, or its executor, is gone
        └── FeedTimeout       TFD895  a node took no rows for too long (also a TimeoutError)

Every error carries ``code``, ``what`` (what happened), ``task`` (to which task, or ``None``)
and ``fix`` (the next step); its text is the three of them in one line or two.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccessDenied",
    "AgentLost",
    "CoordinatorError",
    "DataError",
    "DataLoss",
    "DispatcherLost",
    "FeedTimeout",
    "FilterFailed",
    "FinishedJob",
    "Interrupted",
    "InvalidMessage",
    "LaunchError",
    "Malformed",
    "NameTaken",
    "NoAnswer",
    "NoTasks",
    "NoWorkers",
    "NodeFailed",
    "NodeLost",
    "NotEnoughSlots",
    "NotSerializable",
    "NotThere",
    "PausedError",
    "PipelineError",
    "PortInUse",
    "Refused",
    "RemoteError",
    "ReservationLimit",
    "ResolveError",
    "SparkError",
    "StartTimeout",
    "StateError",
    "TasksMissing",
    "TensorFlowMissing",
    "TfdError",
    "TimeLimit",
    "UnknownName",
    "Unsupported",
    "UsageError",
    "ValueGone",
    "WorkDirError",
]


class TfdError(Exception):
    """Base of all errors of this package.

    Parameters
    ----------
    what : str
        What happened, one sentence.
    task : str, optional
        The task concerned, such as ``"data_worker:0"``.
    fix : str, optional
        The next step for the user.

    Attributes
    ----------
    code : str
        Stable identifier of the kind of error, ``"TFD000"`` and so on.
    """

    code: ClassVar[str] = "TFD000"

    def __init__(self, what: str, *, task: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.task = task
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        head = f"{self.task}: " if self.task and self.task not in self.what else ""
        tail = f"\nNext: {self.fix}" if self.fix else ""
        return f"[{self.code}] {head}{self.what}{tail}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.task, self.fix)


def _rebuild(kind: type[TfdError], what: str, task: str | None, fix: str | None) -> TfdError:
    return kind(what, task=task, fix=fix)


class UsageError(TfdError, ValueError):
    """An argument that cannot be meant."""

    code = "TFD100"


class UnknownName(UsageError):
    """A launcher, task, option or cluster of that name does not exist."""

    code = "TFD101"


class NameTaken(UsageError):
    """A cluster of that name lives already, with another specification."""

    code = "TFD102"


class PortInUse(UsageError):
    """The port is held by somebody else, who is named where that can be known."""

    code = "TFD103"


class WorkDirError(UsageError):
    """A working directory cannot be used: missing, read-only or full."""

    code = "TFD104"


class StateError(UsageError):
    """The call does not fit the state of the object (stopped, not started, ...)."""

    code = "TFD105"


class LaunchError(TfdError):
    """A task, or the agent that starts tasks, did not come up."""

    code = "TFD200"


class TensorFlowMissing(LaunchError):
    """TensorFlow cannot be imported where a task needs it."""

    code = "TFD201"


class StartTimeout(LaunchError, TimeoutError):
    """A task was not ready within ``Policy.start_timeout`` seconds."""

    code = "TFD202"


class AgentLost(LaunchError):
    """The agent that looks after a host's tasks ended."""

    code = "TFD203"


class FilterFailed(LaunchError):
    """The packet filter that closes a port to other hosts cannot be attached."""

    code = "TFD205"


class DataError(TfdError):
    """The data path failed."""

    code = "TFD300"


class NoWorkers(DataError):
    """No data worker is there to serve a dataset."""

    code = "TFD301"


class DataLoss(DataError):
    """Elements were lost with a task and cannot be delivered."""

    code = "TFD302"


class FinishedJob(DataError):
    """A job of that name has already delivered its data; TensorFlow would deliver nothing."""

    code = "TFD303"


class PipelineError(DataError):
    """The user's own pipeline failed inside a data worker."""

    code = "TFD304"


class NotSerializable(DataError):
    """The dataset, or a Python function in it, cannot travel to the workers."""

    code = "TFD305"


class DispatcherLost(DataError):
    """The dispatcher is gone and does not come back by itself."""

    code = "TFD306"


class Interrupted(DataError):
    """Iteration was cancelled by ``stop()``, ``interrupt()`` or the end of the cluster."""

    code = "TFD307"


class CoordinatorError(TfdError):
    """Scheduling closures, or what they need."""

    code = "TFD600"


class PausedError(CoordinatorError):
    """A wait would never end, because the coordinator is paused and nobody is there to resume."""

    code = "TFD601"


class ValueGone(CoordinatorError, LookupError):
    """Nobody holds the RemoteValue of a closure any more, so that its result is gone."""

    code = "TFD602"


class TasksMissing(CoordinatorError):
    """A worker or parameter server that is needed does not answer."""

    code = "TFD603"


class ResolveError(TfdError):
    """Finding out which tasks a cluster has, and where they are."""

    code = "TFD700"


class NotThere(ResolveError):
    """What should tell of the cluster is not there: no such step, group, file or variable."""

    code = "TFD701"


class Malformed(ResolveError):
    """What tells of the cluster cannot be read, or cannot be meant."""

    code = "TFD702"


class NoTasks(ResolveError):
    """A group or job has no task that could be used."""

    code = "TFD703"


class AccessDenied(ResolveError):
    """Credentials are missing, have expired, or do not suffice."""

    code = "TFD704"


class NoAnswer(ResolveError):
    """The system that knows the cluster fails, or does not answer."""

    code = "TFD705"


class SparkError(TfdError):
    """A cluster on the executors of Apache Spark, or what it needs."""

    code = "TFD890"


class NotEnoughSlots(SparkError):
    """Spark cannot run all nodes, or start all agents, at the same time, which is needed."""

    code = "TFD891"


class ReservationLimit(SparkError, TimeoutError):
    """Not all nodes reported from their executors within ``reservation_timeout`` seconds."""

    code = "TFD892"


class NodeFailed(SparkError):
    """The user's function raised in a node; the text has the traceback from there."""

    code = "TFD893"


class NodeLost(SparkError):
    """A node's process, or the executor that it belongs to, is gone."""

    code = "TFD894"


class FeedTimeout(SparkError, TimeoutError):
    """A node took no rows for ``feed_timeout`` seconds."""

    code = "TFD895"


class TimeLimit(TfdError, TimeoutError):
    """A wait reached the limit it was given."""

    code = "TFD400"


class RemoteError(TfdError):
    """A kernel elsewhere, or the source that it was given to run."""

    code = "TFD204"


class InvalidMessage(TfdError):
    """Another host sent a message that is not valid."""

    code = "TFD206"


class Refused(TfdError):
    """The policy of this host's administrator does not allow it."""

    code = "TFD501"


class Unsupported(TfdError):
    """What was asked cannot be done on this platform or with this version of a library."""

    code = "TFD500"


def no_lease(cluster: str) -> StateError:
    """Return the error of a lease that is renewed and does not exist."""
    return StateError(
        f"cluster {cluster!r} ends with its kernel, and has no lease to renew",
        fix="cluster.detach(hours=8) lets it stay",
    )
