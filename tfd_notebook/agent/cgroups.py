"""The control groups of a process, in the layouts of versions 1 and 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MINE", "PROC", "ROOT", "Quota", "directories", "quotas", "share"]

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
MINE = PROC / "self/cgroup"


@dataclass(frozen=True)
class Quota:
    """The CPU quota of a control group.

    Parameters
    ----------
    cores : float
        CPU seconds that its processes together may use in a second.
    group : Path
    usage : Path
        The file with the CPU time that they have used.
    """

    cores: float
    group: Path
    usage: Path

    def used(self) -> float:
        """Return the CPU time in seconds that the processes have used; 0 if it is not known."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = self.usage.read_text()
            if self.usage.name == "cpuacct.usage":
                return int(text) / 1e9
            return int(dict(line.split(" ", 1) for line in text.splitlines())["usage_usec"]) / 1e6
        return 0.0


def directories(file: Path, controller: str, root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """Yield the control groups that can limit a process, each with its parents after it.

    Parameters
    ----------
    file : Path
        ``/proc/PID/cgroup``.
    controller : str
        Such as ``memory``.
    root : Path

    Yields
    ------
    str, Path
        The controller of version 1, or an empty string for version 2, and the directory. The
        directory may not exist: in a container, `file` can have paths of the host.

    Raises
    ------
    OSError
        The process has ended.
    """
    for line in file.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        # Several controllers of version 1 may share one hierarchy.
        for name in controllers.split(","):
            if name in ("", controller):
                for group in _with_parents(root / name, path):
                    yield name, group


def _with_parents(top: Path, path: str) -> Iterator[Path]:
    """Yield a group and its parents, up to the one that is mounted at `top`."""
    own = top / path.strip("/")
    for group in (own, *own.parents):
        yield group
        if group == top:
            return


def quotas(file: Path = MINE, root: Path = ROOT) -> tuple[Quota, ...]:
    """Return the CPU quotas that apply to a process, those of parents included.

    Parameters
    ----------
    file : Path
        ``/proc/PID/cgroup``. Default that of this process.
    root : Path
    """
    limits = []
    with contextlib.suppress(OSError):
        for version, group in directories(file, "cpu", root):
            with contextlib.suppress(OSError, ValueError):
                if version:
                    quota = (group / "cpu.cfs_quota_us").read_text()
                    period = (group / "cpu.cfs_period_us").read_text()
                    own = group.relative_to(root / version)
                    usage = root / "cpuacct" / own / "cpuacct.usage"
                else:
                    quota, period = (group / "cpu.max").read_text().split()
                    usage = group / "cpu.stat"
                # Without a limit the quota is "max" (a ValueError) or -1.
                if int(quota) > 0 and int(period) > 0:
                    limits.append(Quota(int(quota) / int(period), group, usage))
    return tuple(limits)


def share(before: Mapping[Quota, float], after: Mapping[Quota, float], seconds: float) -> float:
    """Return the share of the most used quota, 0 to 1; 0 without a quota.

    Parameters
    ----------
    before, after : mapping of Quota to float
        CPU seconds used, at the beginning and at the end.
    seconds : float
        The time between.
    """
    shares = [
        (after[quota] - before[quota]) / (seconds * quota.cores)
        for quota in before.keys() & after.keys()
    ]
    return min(1.0, max(shares, default=0.0))
