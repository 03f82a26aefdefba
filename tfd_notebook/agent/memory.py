"""Memory limits of this process and its tasks."""

from __future__ import annotations

import contextlib
import resource
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from tfd_notebook.agent.cgroups import MINE, PROC, ROOT, directories

#: Version 1 reports a larger limit than this if no limit is set.
_NONE = 1 << 60


@dataclass(frozen=True)
class _Version:
    """The file names of a control group version for memory.

    Cached files are released under memory pressure, and therefore do not count as use.
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

#: Advice for a task that a memory limit ended; without a change it would end again.
FIX = (
    "reduce the pipeline's memory (shuffle buffer, cache, prefetch), run fewer tasks on the host, "
    "or raise the limit; then iterate again"
)
#: Parts of the reason of a task that was killed for its memory.
_REACHED = "the memory limit of its control group"
_TOO_MUCH = "GB of memory, more than a task may use"


@dataclass(frozen=True)
class Group:
    """The memory of a control group.

    Parameters
    ----------
    path : Path
    limit : int, optional
        Bytes; None without a limit.
    peak : int
        Peak use in bytes; before Linux 5.19 the current use.
    kills : int
        Number of its processes that the kernel has killed for memory.
    """

    path: Path
    limit: int | None
    peak: int
    kills: int


def groups(pid: int | str, root: Path, proc: Path) -> tuple[Group, ...]:
    """Return the control groups of a process, the innermost first; none if it has ended."""
    current_groups = []
    with contextlib.suppress(OSError):
        for version, group in directories(proc / str(pid) / "cgroup", "memory", root):
            with contextlib.suppress(OSError, ValueError):
                current_groups.append(_read(group, _VERSIONS[version]))
    return tuple(current_groups)


def _read(group: Path, version: _Version) -> Group:
    text = (group / version.limit).read_text().strip()
    limit = None if text == "max" or int(text) >= _NONE else int(text)
    peak = group / version.peak
    used = int((peak if peak.exists() else group / version.used).read_text())
    stat = dict(line.split(" ", 1) for line in (group / version.kills).read_text().splitlines())
    return Group(group, limit, used, int(stat.get("oom_kill", 0)))


class GroupHistory:
    """The last samples of the control groups of a process.

    The kernel counts a kill before the process has ended, so that the last sample may already
    include it. The end of a process is therefore compared with several samples.
    """

    def __init__(self, root: Path = ROOT, proc: Path = PROC) -> None:
        self._root, self._proc = root, proc
        #: One a second; a large process may take some seconds to end on a busy host.
        self._samples: deque[tuple[Group, ...]] = deque(maxlen=4)

    def start(self) -> None:
        """Begin with the groups of this process, in which its child processes start."""
        self._samples.clear()
        self.sample("self")

    def sample(self, pid: int | str) -> None:
        """Add a sample of the process, which may have moved to another group."""
        sample = groups(pid, self._root, self._proc)
        if not sample:  # it has ended
            return
        paths = [group.path for group in sample]
        if self._samples and [group.path for group in self._samples[-1]] != paths:
            self._samples.clear()
        self._samples.append(sample)

    def reached(self) -> str:
        """Return a sentence about the memory limit that ended the process; empty if none did."""
        killed, limited = False, []
        for samples in zip(*self._samples, strict=True):
            path = samples[0].path
            v1 = path == self._root / "memory" or self._root / "memory" in path.parents
            with contextlib.suppress(OSError, ValueError):
                now = _read(path, _VERSIONS["memory" if v1 else ""])
                killed |= now.kills > samples[0].kills
                if now.limit is not None:
                    peak = max(group.peak for group in (*samples, now))
                    limited.append((now.limit - peak, now.limit, peak, path))
        if not killed or not limited:
            return ""
        _, limit, peak, path = min(limited)
        return f"{_REACHED}, {limit / 1e9:.2f} GB, was reached (peak {peak / 1e9:.2f} GB, {path})"


def too_much(megabytes: float) -> str:
    """Return the reason for ending a task that exceeds an administrator's limit."""
    return f"it used {megabytes / 1e3:.2f} {_TOO_MUCH}"


def is_reason(reason: str) -> bool:
    """Return True if the reason for the end of a task is a memory limit."""
    return _REACHED in reason or _TOO_MUCH in reason


def of_group(root: Path = ROOT, mine: Path = MINE) -> tuple[int, int] | None:
    """Return limit and use in bytes of the control group with the least free memory.

    The group may belong to a container, a Slurm job or a systemd unit, or contain one. Return None
    without a limit.
    """
    sizes = []
    with contextlib.suppress(OSError):
        for name, group in directories(mine, "memory", root):
            with contextlib.suppress(OSError, ValueError):
                sizes.append(_limit_and_use(group, _VERSIONS[name]))
    limited = (pair for pair in sizes if pair[0] < _NONE)
    return min(limited, key=lambda pair: pair[0] - pair[1], default=None)


def _limit_and_use(group: Path, version: _Version) -> tuple[int, int]:
    """Return the limit of a group and its use, without cached files."""
    limit, used = (int((group / name).read_text()) for name in (version.limit, version.used))
    lines = (group / "memory.stat").read_text().splitlines()
    stat = dict(line.split(" ", 1) for line in lines)
    return limit, used - int(stat.get(version.cached, 0))


def of_process() -> int | None:
    """Return the limit of the address space in bytes (``ulimit -v``), or None if unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
