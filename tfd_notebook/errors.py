"""The exceptions of tfd_notebook, in one tree.

::

    TfdError                  TFD000  base of all errors of this package
    ├── UsageError            TFD100  an invalid argument (also a ValueError)
    │   ├── UnknownName       TFD101  a launcher, task, option or cluster that does not exist
    │   ├── NameTaken         TFD102  the name belongs to a cluster with another specification
    │   ├── PortInUse         TFD103  another process uses the port
    │   ├── WorkDirError      TFD104  work_dir is not writable, or its disk is full
    │   └── StateError        TFD105  the call does not fit the object's state
    ├── LaunchError           TFD200  a task or its agent did not start
    │   ├── TensorFlowMissing TFD201  TensorFlow is not installed on a host that needs it
    │   ├── StartTimeout      TFD202  not ready within the time limit
    │   ├── AgentLost         TFD203  the agent that supervises the tasks has ended
    │   └── FilterFailed      TFD205  a port cannot be closed to other hosts
    ├── RemoteError           TFD204  a remote kernel, or the source that it runs, failed
    ├── InvalidMessage        TFD206  another host sent an invalid message
    ├── DataError             TFD300  reading data failed
    │   ├── NoWorkers         TFD301  no data worker can serve the dataset
    │   ├── DataLoss          TFD302  elements were lost and cannot be delivered
    │   ├── FinishedJob       TFD303  the job has already delivered its data
    │   ├── PipelineError     TFD304  the user's pipeline failed in a data worker
    │   ├── NotSerializable   TFD305  the dataset cannot be sent to the data workers
    │   ├── DispatcherLost    TFD306  the dispatcher does not answer
    │   └── Interrupted       TFD307  iteration was cancelled
    ├── TimeLimit             TFD400  a wait timed out (also a TimeoutError)
    ├── Unsupported           TFD500  not possible on this platform or version
    ├── Refused               TFD501  the administrator's policy does not allow it
    ├── CoordinatorError      TFD600  scheduling or running closures failed
    │   ├── PausedError       TFD601  a wait would never end: the coordinator is paused
    │   ├── ValueGone         TFD602  the RemoteValue of a closure no longer exists
    │   └── TasksMissing      TFD603  a worker or parameter server does not answer
    ├── ResolveError          TFD700  finding the tasks of a cluster failed
    │   ├── NotThere          TFD701  the source of the cluster's description does not exist
    │   ├── Malformed         TFD702  the cluster's description is invalid
    │   ├── NoTasks           TFD703  a group or job without usable tasks
    │   ├── AccessDenied      TFD704  credentials are missing, expired or not sufficient
    │   └── NoAnswer          TFD705  the service that lists the tasks fails or does not answer
    └── SparkError            TFD890  a cluster on Spark executors failed
        ├── NotEnoughSlots    TFD891  Spark cannot run all nodes, or agents, at once
        ├── ReservationLimit  TFD892  not all nodes reported in time (also a TimeoutError)
        ├── NodeFailed        TFD893  the user's function raised in a node
        ├── NodeLost          TFD894  a node's process, or its executor, has ended
        └── FeedTimeout       TFD895  a node read no rows for too long (also a TimeoutError)

Every error has a ``code``, ``what`` (the problem), ``task`` (the task concerned, or ``None``) and
``fix`` (the next step). Its text combines them in one or two lines.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        The problem, in one sentence.
    task : str, optional
        The task concerned, such as ``"data_worker:0"``.
    fix : str, optional
        The next step for the user.

    Attributes
    ----------
    code : str
        Stable identifier of the error class, such as ``"TFD000"``.
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

    @property
    def in_one_line(self) -> str:
        """The problem and the next step, without code and task."""
        return self.what if self.fix is None else f"{self.what}; next: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.task, self.fix)


def _rebuild(kind: type[TfdError], what: str, task: str | None, fix: str | None) -> TfdError:
    return kind(what, task=task, fix=fix)


class UsageError(TfdError, ValueError):
    """An invalid argument."""

    code = "TFD100"


class UnknownName(UsageError):
    """The name of a launcher, task, option or cluster that does not exist."""

    code = "TFD101"


class NameTaken(UsageError):
    """The name of a running cluster that has another specification."""

    code = "TFD102"


class PortInUse(UsageError):
    """A port that another process uses. The message names the process if possible."""

    code = "TFD103"


class WorkDirError(UsageError):
    """A working directory that is missing, read-only or full."""

    code = "TFD104"


class StateError(UsageError):
    """A call that does not fit the state of the object, such as stopped or not started."""

    code = "TFD105"


class LaunchError(TfdError):
    """Failure to start a task, or the agent that starts tasks."""

    code = "TFD200"


class TensorFlowMissing(LaunchError):
    """TensorFlow cannot be imported on a host whose task needs it."""

    code = "TFD201"


class StartTimeout(LaunchError, TimeoutError):
    """A task that was not ready within ``Policy.start_timeout`` seconds."""

    code = "TFD202"


class AgentLost(LaunchError):
    """Unexpected end of the agent that supervises a host's tasks."""

    code = "TFD203"


class FilterFailed(LaunchError):
    """Failure to attach the packet filter that closes a port to other hosts."""

    code = "TFD205"


class DataError(TfdError):
    """Failure to read, distribute or save a dataset."""

    code = "TFD300"


class NoWorkers(DataError):
    """A dataset that no data worker can serve."""

    code = "TFD301"


class DataLoss(DataError):
    """Elements that were lost with a task and cannot be delivered."""

    code = "TFD302"


class FinishedJob(DataError):
    """A job that has already delivered its data. TensorFlow would deliver no more elements."""

    code = "TFD303"


class PipelineError(DataError):
    """Failure of the user's pipeline in a data worker."""

    code = "TFD304"


class NotSerializable(DataError):
    """A dataset, or a Python function in it, that cannot be sent to the data workers."""

    code = "TFD305"


class DispatcherLost(DataError):
    """A dispatcher that does not answer, or has stopped and is not restarted automatically."""

    code = "TFD306"


class Interrupted(DataError):
    """Iteration that ``stop()``, ``interrupt()`` or the end of the cluster cancelled."""

    code = "TFD307"


class CoordinatorError(TfdError):
    """Failure to schedule or run closures."""

    code = "TFD600"


class PausedError(CoordinatorError):
    """A wait that would never end: the coordinator is paused and no controller can resume it."""

    code = "TFD601"


class ValueGone(CoordinatorError, LookupError):
    """The RemoteValue of a closure is no longer referenced, so its result was discarded."""

    code = "TFD602"


class TasksMissing(CoordinatorError):
    """A worker or parameter server that is needed and does not answer."""

    code = "TFD603"


class ResolveError(TfdError):
    """Failure to find the tasks of a cluster or their addresses."""

    code = "TFD700"


class NotThere(ResolveError):
    """The source of the cluster's description does not exist.

    The source is, for example, a step, group, file or environment variable.
    """

    code = "TFD701"


class Malformed(ResolveError):
    """The cluster description cannot be parsed, or is invalid."""

    code = "TFD702"


class NoTasks(ResolveError):
    """A group or job without usable tasks."""

    code = "TFD703"


class AccessDenied(ResolveError):
    """Credentials that are missing, expired or not sufficient."""

    code = "TFD704"


class NoAnswer(ResolveError):
    """The service that lists the cluster's tasks fails or does not answer."""

    code = "TFD705"


class SparkError(TfdError):
    """Failure of a cluster on the executors of Apache Spark."""

    code = "TFD890"


class NotEnoughSlots(SparkError):
    """Spark cannot run all nodes, or start all agents, at the same time."""

    code = "TFD891"


class ReservationLimit(SparkError, TimeoutError):
    """Not all nodes reported from their executors within ``reservation_timeout`` seconds."""

    code = "TFD892"


class NodeFailed(SparkError):
    """An exception of the user's function in a node. The message includes its traceback."""

    code = "TFD893"


class NodeLost(SparkError):
    """Unexpected end of a node's process, or of the executor that it belongs to."""

    code = "TFD894"


class FeedTimeout(SparkError, TimeoutError):
    """A node that read no rows for ``feed_timeout`` seconds."""

    code = "TFD895"


class TimeLimit(TfdError, TimeoutError):
    """A wait that reached its time limit."""

    code = "TFD400"


class RemoteError(TfdError):
    """Failure of a remote kernel, or of the source that it runs."""

    code = "TFD204"


class InvalidMessage(TfdError):
    """An invalid message from another host."""

    code = "TFD206"


class Refused(TfdError):
    """An operation that the policy of this host's administrator does not allow."""

    code = "TFD501"


class Unsupported(TfdError):
    """An operation that this platform or the version of a library does not support."""

    code = "TFD500"


#: The classes of this module by code.
BY_CODE = {
    kind.code: kind
    for kind in tuple(globals().values())
    if isinstance(kind, type) and issubclass(kind, TfdError)
}


def no_lease(cluster: str) -> StateError:
    """Return the error for renewing the lease of a cluster that has none."""
    return StateError(
        f"cluster {cluster!r} stops with its kernel and has no lease to renew",
        fix="call cluster.detach(hours=8) to keep it running",
    )


def unknown_task(cluster: str, task: str, tasks: Iterable[str]) -> UnknownName:
    """Return the error for a task that is not among the `tasks` of a cluster."""
    return UnknownName(
        f"cluster {cluster!r} has no task {task!r}",
        fix=f"its tasks are {', '.join(tasks) or 'none'}",
    )
