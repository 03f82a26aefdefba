"""Immutable results of resolving a cluster: its tasks, their states and the history of changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

#: States of a task, see `TaskStatus`.
STATES = ("alive", "own", "hung", "refused", "unreachable", "foreign", "mismatch")
#: Number of changes that are kept.
MAX_CHANGES = 1000
#: Ends of the reasons of tasks at the address of another task, and of those where another answers.
SAME_ADDRESS, ANOTHER_ANSWERS = "has the same address", "answers there"
#: Fix for a cluster with an evaluator for which a coordinator of parameter servers waits.
SEPARATE_EVALUATOR = (
    'remove "evaluator" from the cluster, and give the evaluator a separate TF_CONFIG with only '
    "that job"
)
SEPARATE_PORTS = "give each task a separate port"
CORRECT_ADDRESS = "correct the address, or the indexes of the tasks"
START_OR_CORRECT = "start it, or correct its address"


def missing_step(task: str, reason: str, with_servers: bool) -> str:
    """Return the next step for a task that is missing for this `reason`.

    Parameters
    ----------
    task : str
        Its name, such as ``"worker:0"``.
    reason : str
    with_servers : bool
        True if its cluster has parameter servers.
    """
    if SAME_ADDRESS in reason:
        return SEPARATE_PORTS
    if ANOTHER_ANSWERS in reason:
        return CORRECT_ADDRESS
    if with_servers and task.startswith("evaluator:"):
        return SEPARATE_EVALUATOR
    return "add its host to no_proxy" if "no_proxy" in reason else START_OR_CORRECT


@dataclass(frozen=True)
class TaskStatus:
    """The result of probing one task of a cluster.

    Parameters
    ----------
    job : str
    task : int
        Index in the job.
    address : str
        ``"host:port"``.
    state : str
        ``alive``: the task answered. ``own``: it is this process, which does not listen.
        ``hung``: it accepts connections and does not answer. ``refused``: its port is closed.
        ``unreachable``: no connection. ``foreign``: the server is not TensorFlow. ``mismatch``: a
        TensorFlow server of another task.
    identity : str
        The task name that the server reports, such as ``"worker:0"``. Empty if unknown.
    accelerators : str
        Such as ``"GPU:2"``. Empty without accelerators.
    latency_ms : float
        Milliseconds until the state was known.
    reason : str
        Why the task is not alive, or other details.
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
        """The job and index, such as ``"worker:0"``."""
        return f"{self.job}:{self.task}"

    @property
    def is_missing(self) -> bool:
        """True if TensorFlow would wait for the task, or reach another one in its place."""
        return self.state not in ("alive", "own")

    @property
    def trouble(self) -> str:
        """The task, its address and why it is missing, for errors."""
        state = "" if self.state == "mismatch" else f"{self.state}, "
        return f"{self.name} at {self.address}: {state}{self.reason}"


#: Columns of ``Resolution.to_frame()``. They are part of the public interface.
COLUMNS = tuple(f.name for f in fields(TaskStatus))


@dataclass(frozen=True)
class RuleResult:
    """The outcome of a detection rule and its reason.

    The outcome is ``fired``, ``partial`` (a part of the condition is met) or ``no``.
    """

    rule: str
    outcome: str
    why: str


@dataclass(frozen=True)
class Change:
    """A change of a task. `before` or `after` is empty if the task was not in the cluster."""

    time: float
    task: str
    before: str
    after: str
    reason: str = ""


@dataclass(frozen=True)
class ResolutionSnapshot:
    """A resolved cluster at one moment.

    Parameters
    ----------
    rule : str
        Name of the detection rule that matched.
    place : str
        Description of the place where the cluster was found.
    time : float
        Seconds since the epoch.
    tasks : tuple of TaskStatus
    considered : tuple of RuleResult
        Results of the rules in their order, up to the one that fired.
    cell : str
        Code suggestion for the next cell.
    seconds : float
        Duration of the resolution.
    changes : tuple of Change
        Changes up to now, latest last.
    trouble : str
        Why the tasks could not be listed. `tasks` are those of the previous time then.
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
        """The number of tasks by state, in the order of `STATES`."""
        counter = Counter(task.state for task in self.tasks)
        return {state: counter[state] for state in STATES if counter[state]}


def changes(
    before: Iterable[TaskStatus], after: Iterable[TaskStatus], time: float
) -> tuple[Change, ...]:
    """Return the tasks that were added, removed or moved, or changed their state."""
    old = {task.name: task for task in before}
    new = {task.name: task for task in after}
    result = []
    for name in [*old, *(name for name in new if name not in old)]:
        was, now = old.get(name), new.get(name)
        if was is None or now is None or was.state != now.state:
            reason = now.reason if now else "no longer in the cluster"
            result.append(
                Change(time, name, was.state if was else "", now.state if now else "", reason)
            )
        elif was.address != now.address:
            moved = f"moved from {was.address} to {now.address}"
            result.append(Change(time, name, was.state, now.state, moved))
    return tuple(result)


def as_json(snapshot: ResolutionSnapshot) -> dict[str, Any]:
    """Return a snapshot as JSON values, for the command line and front ends."""
    return {**asdict(snapshot), "counts": snapshot.counts}
