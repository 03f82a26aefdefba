"""Reasons for which Slurm jobs wait, and the limits of partitions."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

_ASK_SECONDS = 10.0

#: Slurm's reasons: what each means, and what to change. {job}, {partition}, {time} and {nodes} are
#: the job's number, its partition, and the partition's limits.
_REASONS: dict[str, tuple[str, str]] = {
    "Resources": (
        "the nodes that it needs are in use",
        "wait, or ask for less with --ntasks, --nodes or --time",
    ),
    "Priority": (
        "jobs of a higher priority are before it",
        "wait, or ask for less with --ntasks or --time, so that it fits into a gap",
    ),
    "PartitionTimeLimit": (
        "its time limit is longer than partition {partition} allows ({time})",
        "#SBATCH --time={time}, or: scontrol update JobId={job} TimeLimit={time}",
    ),
    "PartitionNodeLimit": (
        "it asks for more nodes than partition {partition} has or allows ({nodes})",
        "#SBATCH --nodes={nodes}, or another --partition",
    ),
    "PartitionConfig": (
        "it asks for what partition {partition} does not allow",
        "#SBATCH --nodes={nodes} --time={time}, or another --partition",
    ),
    "PartitionDown": ("partition {partition} is down", "#SBATCH --partition with one that is up"),
    "PartitionInactive": (
        "partition {partition} is inactive",
        "#SBATCH --partition with one that is up",
    ),
    "JobHeldUser": ("it is held by its user", "scontrol release {job}"),
    "JobHeldAdmin": ("it is held by an administrator", "ask the administrator to release it"),
    "BeginTime": ("its start time has not come", "leave --begin out"),
    "Dependency": ("a job that it depends on has not ended", "wait for that job"),
    "DependencyNeverSatisfied": (
        "a job that it depends on has failed",
        "scancel {job}, and submit it without --dependency",
    ),
    "ReqNodeNotAvail": (
        "a node that it asks for is down, drained or reserved",
        "leave --nodelist out, or name other nodes",
    ),
    "BadConstraints": ("no node has the features that it asks for", "change --constraint"),
    "QOS": ("a limit of its quality of service is reached", "wait, or choose another --qos"),
    "Assoc": ("a limit of its account is reached", "wait, or choose another --account"),
}


@dataclass(frozen=True)
class Partition:
    """A partition of a Slurm.

    Parameters
    ----------
    name : str
    default : bool
    up : bool
    time : str
        The longest time of a job as Slurm writes it, such as ``"1:00:00"`` or ``"infinite"``.
    nodes : int
    cpus : int
    """

    name: str
    default: bool
    up: bool
    time: str
    nodes: int
    cpus: int

    @property
    def minutes(self) -> int | None:
        """The longest time of a job in whole minutes; None without a limit."""
        match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", self.time)
        if match is None:
            return None
        days, hours, minutes, _ = (int(part or 0) for part in match.groups())
        return (days * 24 + hours) * 60 + minutes


def partitions() -> list[Partition]:
    """Return the partitions that ``sinfo`` lists, the default one first; none if it fails."""
    lines = _lines(["sinfo", "--noheader", "--format=%R|%P|%a|%l|%D|%C"])
    found: dict[str, Partition] = {}
    for line in lines:
        name, marked, state, limit, nodes, cpus = [*line.split("|"), *[""] * 6][:6]
        total = cpus.rpartition("/")[2]
        if not name or not nodes.isdecimal() or not total.isdecimal():
            continue
        before = found.get(name)  # sinfo has a line for each group of nodes that differ
        found[name] = Partition(
            name,
            marked.endswith("*"),
            state == "up",
            limit,
            int(nodes) + (before.nodes if before else 0),
            int(total) + (before.cpus if before else 0),
        )
    return sorted(found.values(), key=lambda one: not one.default)


def why_pending(job: str) -> tuple[str, str]:
    """Return why a job waits, with Slurm's own reason, and what to change.

    Returns
    -------
    str, str
        Empty if Slurm gives no reason.
    """
    lines = _lines(["squeue", "--noheader", "--job", job, "--format=%r|%P"])
    reason, bar, name = (lines[0] if lines else "").partition("|")
    if not bar or reason in ("", "None"):
        return "", ""
    word = re.match(r"\w*", reason)
    key = word[0] if word else ""
    known = next((one for one in _REASONS if key == one), None) or next(
        (one for one in ("QOS", "Assoc", "PartitionDown") if key.startswith(one)), None
    )
    if known is None:
        return reason, f"see man squeue for {key or reason}, and scontrol show job {job}"
    own = next((one for one in partitions() if one.name == name), None)
    values = {
        "job": job,
        "partition": name,
        "time": own.time if own else "its limit",
        "nodes": str(own.nodes) if own else "its limit",
    }
    meaning, fix = (text.format(**values) for text in _REASONS[known])
    return f"{reason}: {meaning}", fix


def _lines(command: list[str]) -> list[str]:
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
