"""Immutable events of a cluster, and their JSON form."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tfd_notebook.model.spec import Role, TaskState

_KINDS: dict[str, type[Event]] = {}


@dataclass(frozen=True)
class Event:
    """Base of all events. `time` is seconds since the epoch."""

    #: The name of the event in its JSON form. Empty for events that stay in this process.
    name: ClassVar[str] = ""
    time: float = field(default_factory=time.time, kw_only=True, compare=False)

    def __init_subclass__(cls) -> None:
        if cls.name:
            _KINDS[cls.name] = cls

    def to_json(self) -> dict[str, Any]:
        """Return the event as JSON values: its fields, and its name as ``event``."""
        body = {
            entry.name: getattr(self, entry.name)
            for entry in dataclasses.fields(self)
            if entry.name != "time"
        }
        return {"event": self.name, **body}


def from_json(body: Mapping[str, Any]) -> Event:
    """Return the event that `Event.to_json` converted; `net.messages.event` checks the fields.

    Fields that the event does not have, such as the cluster, are ignored.
    """
    kind = _KINDS[body["event"]]
    names = {entry.name for entry in dataclasses.fields(kind)} - {"time"}
    return kind(**{name: value for name, value in body.items() if name in names})


@dataclass(frozen=True)
class TaskChanged(Event):
    """Change of a task's state.

    Parameters
    ----------
    task : str
    state : TaskState
    reason : str
        Why the state changed. Empty if there is no further detail.
    address : str
        ``"host:port"``. Empty while unknown.
    pid : int, optional
    restarts : int
        Number of restarts so far.
    open_to : str
        Peers that can connect: ``"loopback"``, ``"this host"``, either with a list of networks,
        ``"everyone"`` or ``"unknown: why"``.
    log : tuple of str
        The last lines of the task's log, if they explain the state.
    host : str
        Display name of its host. Empty if the address contains it.
    """

    name = "task"

    task: str
    state: TaskState
    reason: str = ""
    address: str = ""
    pid: int | None = None
    restarts: int = 0
    open_to: str = ""
    log: tuple[str, ...] = ()
    host: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", TaskState(self.state))
        object.__setattr__(self, "log", tuple(self.log))


@dataclass(frozen=True)
class TaskRemoved(Event):
    """Removal of a task from the cluster."""

    task: str


@dataclass(frozen=True)
class TaskMeasured(Event):
    """Resource use of a task: CPU in percent of one core, memory in MB, bytes served.

    ``working`` is the share of samples in which a thread of a data worker was busy, 0 to 1.
    ``late`` is true if the task replied late, or was suspended when it was asked.
    """

    name = "measure"

    task: str
    cpu_percent: float | None = None
    rss_mb: float | None = None
    pss_mb: float | None = None
    bytes_sent: int | None = None
    working: float | None = None
    late: bool | None = None


@dataclass(frozen=True)
class ConsumerMeasured(Event):
    """State and totals of a consumer, `seconds` after its creation. `waited` is in seconds."""

    consumer: str
    state: str
    seconds: float
    elements: int
    bytes: int
    waited: float


@dataclass(frozen=True)
class Notice(Event):
    """A message to the user.

    Parameters
    ----------
    severity : {"info", "warning", "error"}
    what : str
    task : str, optional
    fix : str, optional
    """

    name = "notice"

    severity: str
    what: str
    task: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        head = f"{self.task}: " if self.task and self.task not in self.what else ""
        text = f"{head}{self.what}"
        if not self.fix:
            return text
        return f"{text}{'' if text.endswith('.') else '.'} Next: {self.fix}"


@dataclass(frozen=True)
class GpusMeasured(Event):
    """Use of a host's GPUs.

    Parameters
    ----------
    gpus : sequence of mapping
        The fields ``index name memory task used use_percent`` of each GPU; memory in bytes.
    host : str
        Display name of the host. Empty for this host.
    """

    name = "gpus"

    gpus: tuple[Mapping[str, Any], ...] = field(hash=False)
    host: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpus", tuple(self.gpus))


@dataclass(frozen=True)
class RunChanged(Event):
    """An attempt of `Cluster.run` to call `function` for these workers."""

    function: str
    attempt: int
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class RankChanged(Event):
    """Change of the process in which `Cluster.run` calls the function for the worker `task`."""

    task: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class StateChanged(Event):
    """A new state of the whole cluster."""

    state: str


@dataclass(frozen=True)
class PlanChanged(Event):
    """A new number of tasks of a role: planned by the user, or requested from the launcher."""

    role: Role
    planned: int | None = None
    requested: int | None = None


@dataclass(frozen=True)
class AdaptationChanged(Event):
    """A new range in which the number of data workers adapts. None without one.

    ``reason`` is why it ended. Empty if a user set the range.
    """

    minimum: int | None
    maximum: int | None
    reason: str = ""


@dataclass(frozen=True)
class WorkersAdapted(Event):
    """A decision to change the number of data workers, with its reason."""

    before: int
    after: int
    reason: str


@dataclass(frozen=True)
class ExpiryChanged(Event):
    """A new time limit: remaining seconds, or None without one. The earliest limit applies.

    Parameters
    ----------
    seconds_left : float, optional
    reason : str
        Why the cluster ends then. Default: its own time limit.
    """

    seconds_left: float | None
    reason: str = "time limit reached"


@dataclass(frozen=True)
class JournalMeasured(Event):
    """Size of the dispatcher's journal in bytes."""

    size: int


@dataclass(frozen=True)
class LeaseChanged(Event):
    """A new lease of the cluster. `seconds_left` is None without a lease."""

    name = "lease"

    seconds_left: float | None


@dataclass(frozen=True)
class ClusterEnded(Event):
    """The end of the cluster by its agent or by another process."""

    name = "ended"

    reason: str


@dataclass(frozen=True)
class HostDisconnected(Event):
    """Loss of the connection to a host whose tasks keep running for `grace` seconds."""

    host: str
    grace: float


@dataclass(frozen=True)
class HostReconnected(Event):
    """A new connection to a host, `seconds` after the loss."""

    host: str
    seconds: float


@dataclass(frozen=True)
class TasksLost(Event):
    """Loss of all tasks with their agent."""

    reason: str
