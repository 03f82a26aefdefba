"""Immutable events, and a bounded log of the latest ones."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tfd_notebook.model.spec import TaskState


@dataclass(frozen=True)
class Event:
    """Base of all events. `time` is seconds since the epoch."""

    time: float = field(default_factory=time.time, kw_only=True)


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

    task: str
    state: TaskState
    reason: str = ""
    address: str = ""
    pid: int | None = None
    restarts: int = 0
    open_to: str = ""
    log: tuple[str, ...] = ()
    host: str = ""


@dataclass(frozen=True)
class TaskMeasured(Event):
    """Resource use of a task: CPU in percent of one core, memory in MB, bytes served.

    ``working`` is the share of samples in which a thread of a data worker was busy, 0 to 1.
    """

    task: str
    cpu_percent: float | None = None
    rss_mb: float | None = None
    pss_mb: float | None = None
    bytes_sent: int | None = None
    working: float | None = None


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


class EventLog:
    """Thread-safe log of the latest events, oldest first.

    Parameters
    ----------
    limit : int
        Number of events that are kept. Default 1000.
    """

    def __init__(self, limit: int = 1000) -> None:
        self._events: deque[Event] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def append(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def __iter__(self) -> Iterator[Event]:
        with self._lock:
            return iter(tuple(self._events))

    def __len__(self) -> int:
        return len(self._events)
