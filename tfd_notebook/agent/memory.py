"""How much memory this process and its tasks may have."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfd_notebook.agent.cgroups import MINE, PROC, ROOT, directories

#: A limit of version 1 above this is none.
_NONE = 1 << 60


@dataclass(frozen=True)
class _Version:
    """The files of a version of control groups for memory.

    Cached files are let go of when somebody needs memory, and therefore no use of it.
    """

    limit: str
    used: str
    cached: str
    peak: str
    kills: str


_VERSIONS = {
    "": _Version("memory.max", "memory.current", "inactive_file", "memory.peak", "memory.events"),
    "memory": _Version(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "memory.max_usage_in_bytes",
        "memory.oom_control",
    ),
}

#: The next step for a task that a memory limit ended; to start it again would end it again.
FIX = (
    "make the pipeline hold less (shuffle buffer, cache, prefetch), have fewer tasks on the host, "
    "or raise the limit; then iterate again"
)
#: Words in the reason of a task that was killed for its memory.
_REACHED = "the memory limit of its control group"
_TOO_MUCH = "GB of memory, more than a task may"


@dataclass(frozen=True)
class Group:
    """The memory of a control group.

    Parameters
    ----------
    path : Path
    limit : int, optional
        Bytes; None without a limit.
    peak : int
        Peak use in bytes; before Linux 5.19 the present use.
    kills : int
        Number of its processes that the kernel has killed for memory.
    """

    path: Path
    limit: int | None
    peak: int
    kills: int


def groups(pid: int | str = "self", root: Path = ROOT, proc: Path = PROC) -> tuple[Group, ...]:
    """Return the control groups of a process, the innermost first; none if it has ended."""
    found = []
    with contextlib.suppress(OSError):
        for version, group in directories(proc / str(pid) / "cgroup", "memory", root):
            with contextlib.suppress(OSError, ValueError):
                found.append(_read(group, _VERSIONS[version]))
    return tuple(found)


def _read(group: Path, version: _Version) -> Group:
    text = (group / version.limit).read_text().strip()
    limit = None if text == "max" or int(text) >= _NONE else int(text)
    peak = group / version.peak
    used = int((peak if peak.exists() else group / version.used).read_text())
    stat = dict(line.split(" ", 1) for line in (group / version.kills).read_text().splitlines())
    return Group(group, limit, used, int(stat.get("oom_kill", 0)))


def reached(before: Sequence[Group], root: Path = ROOT) -> str:
    """Return which memory limit ended a process of the groups `before`; empty if none did.

    Parameters
    ----------
    before : sequence of Group
        As `groups` returned them while the process ran.
    root : Path
    """
    killed, limited = False, []
    for group in before:
        v1 = group.path == root / "memory" or root / "memory" in group.path.parents
        with contextlib.suppress(OSError, ValueError):
            now = _read(group.path, _VERSIONS["memory" if v1 else ""])
            killed |= now.kills > group.kills
            if now.limit is not None:
                limited.append((now.limit - max(now.peak, group.peak), now))
    if not killed or not limited:
        return ""
    _, group = min(limited, key=lambda one: one[0])
    assert group.limit is not None
    return (
        f"{_REACHED}, {group.limit / 1e9:.2f} GB, was reached "
        f"(peak {group.peak / 1e9:.2f} GB, {group.path})"
    )


def too_much(megabytes: float) -> str:
    """Return the reason of a task that an administrator's policy ends."""
    return f"it held {megabytes / 1e3:.2f} {_TOO_MUCH}"


def is_reason(reason: str) -> bool:
    """Return True if the reason for the end of a task is a memory limit."""
    return _REACHED in reason or _TOO_MUCH in reason


def of_group(root: Path = ROOT, mine: Path = MINE) -> tuple[int, int] | None:
    """Return limit and use in bytes of the control group that leaves this process least.

    That is a container, a job of Slurm, a unit of systemd, or any group around them; None without a
    limit.
    """
    found = []
    with contextlib.suppress(OSError):
        for name, group in directories(mine, "memory", root):
            with contextlib.suppress(OSError, ValueError):
                found.append(_room(group, _VERSIONS[name]))
    limited = (one for one in found if one[0] < _NONE)
    return min(limited, key=lambda one: one[0] - one[1], default=None)


def _room(group: Path, version: _Version) -> tuple[int, int]:
    """Return the limit of a group and its use, without cached files."""
    limit, used = (int((group / name).read_text()) for name in (version.limit, version.used))
    lines = (group / "memory.stat").read_text().splitlines()
    stat = dict(line.split(" ", 1) for line in lines)
    return limit, used - int(stat.get(version.cached, 0))


def of_process() -> int | None:
    """Return how much address space a process may have in bytes (``ulimit -v``); None: any."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
