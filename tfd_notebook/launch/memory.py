"""How much memory this process and its tasks may have."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MINE = Path("/proc/self/cgroup")
#: A limit of version 1 above this is none.
_NONE = 1 << 60


@dataclass(frozen=True)
class _Version:
    """Where a version of control groups keeps the limit of memory, its use, and for what.

    Cached files are let go of when somebody needs memory, and therefore no use of it.
    """

    directory: str
    limit: str
    used: str
    cached: str


_VERSIONS = {
    "": _Version("", "memory.max", "memory.current", "inactive_file"),
    "memory": _Version(
        "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
}


def of_group(root: Path = _ROOT, mine: Path = _MINE) -> tuple[int, int] | None:
    """Return limit and use in bytes of the control group that leaves this process least.

    That is a container, a job of Slurm, a unit of systemd, or any group around them; None without a
    limit.
    """
    with contextlib.suppress(OSError):
        found = [
            one
            for line in mine.read_text().splitlines()
            for _, controllers, path in (line.split(":", 2),)
            if controllers in _VERSIONS
            for one in _around(root / _VERSIONS[controllers].directory, path, controllers)
        ]
        return min(found, key=lambda one: one[0] - one[1], default=None)
    return None


def _around(root: Path, path: str, controllers: str) -> Iterator[tuple[int, int]]:
    """Give the limits of a group and of those around it, as far as they are seen from here."""
    own = root / path.strip("/")
    version = _VERSIONS[controllers]
    for group in (own, *own.parents):
        with contextlib.suppress(OSError, ValueError):
            limit, used = (
                int((group / name).read_text()) for name in (version.limit, version.used)
            )
            lines = (group / "memory.stat").read_text().splitlines()
            stat = dict(line.split(" ", 1) for line in lines)
            if limit < _NONE:
                yield limit, used - int(stat.get(version.cached, 0))
        if group == root:
            return


def of_process() -> int | None:
    """Return how much address space a process may have in bytes (``ulimit -v``); None: any."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
