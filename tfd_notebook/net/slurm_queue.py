"""Reasons for which Slurm jobs wait, and the limits of partitions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

_REQUEST_SECONDS = 10.0

#: Meaning and fix of Slurm's reasons for waiting. {job}, {partition}, {time} and {nodes} are the
#: number of the Slurm job, its partition, and the partition's limits.
_REASONS: dict[str, tuple[str, str]] = {
    "Resources": (
        "the hosts that it needs are in use",
        "wait, or request less with --ntasks, --nodes or --time",
    ),
    "Priority": (
        "jobs with a higher priority are ahead of it",
        "wait, or request less with --ntasks or --time, so that it fits into a gap",
    ),
    "PartitionTimeLimit": (
        "its time limit is longer than partition {partition} allows ({time})",
        "#SBATCH --time={time}, or: scontrol update JobId={job} TimeLimit={time}",
    ),
    "PartitionNodeLimit": (
        "it requests more hosts than partition {partition} has or allows ({nodes})",
        "#SBATCH --nodes={nodes}, or another --partition",
    ),
    "PartitionConfig": (
        "partition {partition} does not allow its options",
        "#SBATCH --nodes={nodes} --time={time}, or another --partition",
    ),
    "PartitionDown": ("partition {partition} is down", "#SBATCH --partition with one that is up"),
    "PartitionInactive": (
        "partition {partition} is inactive",
        "#SBATCH --partition with one that is up",
    ),
    "JobHeldUser": ("it is held by its user", "scontrol release {job}"),
    "JobHeldAdmin": ("it is held by an administrator", "ask the administrator to release it"),
    "BeginTime": ("its start time is in the future", "omit --begin"),
    "Dependency": ("a job that it depends on has not ended", "wait for that job"),
    "DependencyNeverSatisfied": (
        "a job that it depends on has failed",
        "scancel {job}, and submit it without --dependency",
    ),
    "ReqNodeNotAvail": (
        "a host that it requests is down, drained or reserved",
        "omit --nodelist, or name other hosts",
    ),
    "BadConstraints": ("no host has the features that it requests", "change --constraint"),
    "QOS": ("a limit of its quality of service is reached", "wait, or choose another --qos"),
    "Assoc": ("a limit of its account is reached", "wait, or choose another --account"),
}


@dataclass(frozen=True)
class Partition:
    """A partition of a Slurm cluster.

    Parameters
    ----------
    name : str
    default : bool
        True for the default partition.
    up : bool
        True if the partition is available.
    time : str
        The time limit of a Slurm job in Slurm's format, such as ``"1:00:00"`` or ``"infinite"``.
    nodes : int
        Number of hosts.
    cpus : int
        Number of CPUs of all hosts.
    """

    name: str
    default: bool
    up: bool
    time: str
    nodes: int
    cpus: int

    @property
    def minutes(self) -> int | None:
        """The time limit of a Slurm job in whole minutes; None without a limit."""
        left = seconds(self.time)
        return None if left is None else int(left // 60)


def het_components() -> int:
    """Return the number of components of this process's heterogeneous Slurm job, 0 for others."""
    count = 0
    while os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{count}"):
        count += 1
    return count


def seconds(time: str) -> float | None:
    """Return a duration in Slurm's format in seconds; None without a limit."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})", time)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + rest


def is_count(text: str) -> bool:
    """Return True if the text is a number with at most nine digits."""
    return re.fullmatch(r"\d{1,9}", text) is not None


def partitions() -> list[Partition]:
    """Return the partitions that ``sinfo`` lists, the default first; none if it fails."""
    lines = _lines(["sinfo", "--noheader", "--format=%R|%P|%a|%l|%D|%C"])
    by_name: dict[str, Partition] = {}
    for line in lines:
        name, marked, state, limit, nodes, cpus = [*line.split("|"), *[""] * 6][:6]
        total = cpus.rpartition("/")[2]
        if not name or not is_count(nodes) or not is_count(total):
            continue
        # sinfo prints one line for each group of different hosts in a partition.
        previous = by_name.get(name)
        by_name[name] = Partition(
            name,
            marked.endswith("*"),
            state == "up",
            limit,
            int(nodes) + (previous.nodes if previous else 0),
            int(total) + (previous.cpus if previous else 0),
        )
    return sorted(by_name.values(), key=lambda partition: not partition.default)


def why_pending(job: str) -> tuple[str, str]:
    """Return the reason for which a Slurm job waits, and its fix.

    Returns
    -------
    str, str
        Empty if Slurm reports no reason.
    """
    lines = _lines(["squeue", "--noheader", "--job", job, "--format=%r|%P"])
    reason, bar, name = (lines[0] if lines else "").partition("|")
    if not bar or reason in ("", "None"):
        return "", ""
    word = re.match(r"\w*", reason)
    key = word[0] if word else ""
    known = next((known for known in _REASONS if key == known), None) or next(
        (prefix for prefix in ("QOS", "Assoc", "PartitionDown") if key.startswith(prefix)), None
    )
    if known is None:
        return reason, f"see man squeue for {key or reason}, and scontrol show job {job}"
    own = next((partition for partition in partitions() if partition.name == name), None)
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
        completed = run(command, _REQUEST_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return completed.stdout.splitlines()


def run(command: list[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm. Its output is text, in which names may have any bytes."""
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=timeout, **options
    )
