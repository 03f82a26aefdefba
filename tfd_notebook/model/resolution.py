"""The tasks of a cluster that was found, as they were seen: frozen, and with their history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Columns of ``Resolution.to_frame()``, promised to other programs.
COLUMNS = (
    "job",
    "task",
    "address",
    "state",
    "identity",
    "accelerators",
    "latency_ms",
    "reason",
)
#: What a task can be: see `TaskStatus`.
STATES = ("alive", "hung", "refused", "unreachable", "foreign", "mismatch")
#: Changes that are kept.
MOST_CHANGES = 1000


@dataclass(frozen=True)
class TaskStatus:
    """What one task of a cluster answered.

    Parameters
    ----------
    job : str
    task : int
        Its number in the job.
    address : str
        ``"host:port"``.
    state : str
        ``alive``: the task answered. ``hung``: connections are accepted, no answer comes.
        ``refused``: nothing listens. ``unreachable``: no connection. ``foreign``: something else
        than a TensorFlow server. ``mismatch``: a TensorFlow server that is another task.
    identity : str
        What it calls itself, such as ``"worker:0"``; empty where it did not say.
    accelerators : str
        ``"GPU:2"``; empty without any.
    latency_ms : float
        Milliseconds to the verdict.
    reason : str
        Why it is not alive, or what else there is to know.
    """

    job: str
    task: int
    address: str
    state: str
    identity: str = ""
    accelerators: str = ""
    latency_ms: float = 0.0
    reason: str = ""

    @property
    def name(self) -> str:
        """Job and number: ``"worker:0"``."""
        return f"{self.job}:{self.task}"


@dataclass(frozen=True)
class RuleResult:
    """What became of a rule: ``fired``, ``close`` (something of it is there) or ``no``; and why."""

    rule: str
    outcome: str
    why: str


@dataclass(frozen=True)
class Change:
    """A task changed; ``before`` or ``after`` is empty where it was not in the cluster."""

    time: float
    task: str
    before: str
    after: str
    reason: str = ""


@dataclass(frozen=True)
class ResolutionSnapshot:
    """A cluster that was found, at one moment.

    Parameters
    ----------
    rule : str
        Which rule found it.
    place : str
        Where, in words.
    time : float
        Seconds since the epoch.
    tasks : tuple of Sighting
    considered : tuple of Considered
        The rules in their order, to the one that fired.
    cell : str
        What can be run next.
    seconds : float
        How long looking took.
    changes : tuple of Change
        What was seen to change so far, the latest last.
    trouble : str
        Why it is not known which tasks there are; those of the last time are shown.
    """

    rule: str
    place: str
    time: float
    tasks: tuple[TaskStatus, ...] = ()
    considered: tuple[RuleResult, ...] = ()
    cell: str = ""
    seconds: float = 0.0
    changes: tuple[Change, ...] = ()
    trouble: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """How many tasks there are by state, in the order of `STATES`."""
        seen = Counter(task.state for task in self.tasks)
        return {state: seen[state] for state in STATES if seen[state]}


def changes(
    before: Iterable[TaskStatus], after: Iterable[TaskStatus], time: float
) -> tuple[Change, ...]:
    """Return what is different: tasks that came, went, moved or have another state."""
    old = {task.name: task for task in before}
    new = {task.name: task for task in after}
    found = []
    for name in [*old, *(name for name in new if name not in old)]:
        was, now = old.get(name), new.get(name)
        if was is None or now is None or was.state != now.state:
            reason = now.reason if now else "no longer in the cluster"
            found.append(
                Change(time, name, was.state if was else "", now.state if now else "", reason)
            )
        elif was.address != now.address:
            moved = f"moved from {was.address} to {now.address}"
            found.append(Change(time, name, was.state, now.state, moved))
    return tuple(found)


def records(tasks: Iterable[TaskStatus]) -> list[dict[str, Any]]:
    """Return tasks as JSON values, with the names of `COLUMNS`."""
    return [{column: getattr(task, column) for column in COLUMNS} for task in tasks]


def as_json(look: ResolutionSnapshot) -> Mapping[str, Any]:
    """Return `look` as JSON values, for the command line and front ends."""
    return {**asdict(look), "tasks": records(look.tasks), "counts": look.counts}
