"""Limits that the administrator of a host sets in a file that only root can write.

``/etc/tfd_notebook/policy.toml``::

    tasks = 32                      # Most tasks of one cluster.
    memory_gb = 16                  # Most memory of one task (10**9 bytes).
    gpus = 4                        # Most GPUs of one cluster.
    lease_hours = 48                # Longest lease of a detached cluster.
    launchers = ["local", "ssh"]    # All others are refused.
    allow = ["10.0.0.0/8"]          # Networks to which ports may be opened, [] for none.

A key that is missing sets no limit. A refusal quotes file and line. The agent of each host enforces
``memory_gb`` by the policy of that host. Once a second it samples the resident memory of each ready
task's process. This memory (rss) includes memory shared with other processes. The agent ends a
process with more than the limit. The task is then restarted as after a crash.
"""

from __future__ import annotations

import ipaddress
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfd_notebook.agent import memory
from tfd_notebook.errors import Refused, UsageError
from tfd_notebook.net import config_files

_NUMBERS = ("tasks", "memory_gb", "gpus", "lease_hours")
_LISTS = ("launchers", "allow")


@dataclass(frozen=True)
class Limits:
    """The limits of a policy file; None for a limit that is not set.

    Parameters
    ----------
    tasks, gpus : int, optional
    memory_gb, lease_hours : float, optional
    launchers, allow : tuple of str, optional
    path : Path, optional
        The file; None if no policy applies.
    """

    tasks: int | None = None
    memory_gb: float | None = None
    gpus: int | None = None
    lease_hours: float | None = None
    launchers: tuple[str, ...] | None = None
    allow: tuple[str, ...] | None = None
    path: Path | None = None

    def check_cluster(self, launcher: str, tasks: int, gpus: int, allow: Sequence[str]) -> None:
        """Raise Refused if the policy forbids a cluster.

        Parameters
        ----------
        launcher : str
            Name of the launcher.
        tasks, gpus : int
            The number of tasks, and of explicitly requested GPUs. GPUs assigned automatically are
            checked separately.
        allow : sequence of str
            Networks that may connect.
        """
        if self.launchers is not None and launcher not in self.launchers:
            raise self._refusal("launchers", f"launcher {launcher!r} is not allowed here")
        if self.tasks is not None and tasks > self.tasks:
            raise self._refusal("tasks", f"{tasks} tasks are too many for one cluster")
        self.check_gpus(gpus)
        self.check_allow(allow)

    def check_allow(self, allow: Sequence[str]) -> None:
        """Raise Refused if the policy forbids opening ports to one of these networks."""
        if self.allow is None:
            return
        allowed = [ipaddress.ip_network(network) for network in self.allow]
        for network in allow:
            requested = ipaddress.ip_network(network, strict=False)
            if not any(_within(requested, candidate) for candidate in allowed):
                raise self._refusal("allow", f"ports must not be opened to {network}")

    def check_gpus(self, count: int) -> None:
        """Raise Refused if the policy forbids this number of GPUs for a cluster."""
        if self.gpus is not None and count > self.gpus:
            raise self._refusal("gpus", f"{count} GPUs are too many for one cluster")

    def check_lease(self, hours: float) -> None:
        """Raise Refused if the policy forbids a lease of this length."""
        if self.lease_hours is not None and hours > self.lease_hours:
            raise self._refusal("lease_hours", f"a lease of {hours:g} hours is too long")

    def too_much_memory(self, megabytes: float) -> str:
        """Return the reason for which a task exceeds the memory limit, or an empty string."""
        if self.memory_gb is None or megabytes <= self.memory_gb * 1e3:
            return ""
        return f"{memory.too_much(megabytes)} ({self.quote('memory_gb')})"

    def quote(self, key: str) -> str:
        """Return the line of the file that sets `key`, with path and line number."""
        assert self.path is not None
        for number, line in enumerate(self.path.read_text().splitlines(), 1):
            if re.match(rf"\s*{key}\s*=", line):
                return f"{self.path}, line {number}: {line.strip()}"
        return str(self.path)

    def _refusal(self, key: str, what: str) -> Refused:
        return Refused(
            f"{what} ({self.quote(key)})",
            fix="request less, or ask the administrator of this host",
        )


def limits(path: Path | None = None) -> Limits:
    """Return the limits of the host's policy.

    Parameters
    ----------
    path : Path, optional
        Default: ``/etc/tfd_notebook/policy.toml``. A file that users other than root can write is
        ignored with a warning.

    Raises
    ------
    UsageError
        The file is invalid. No cluster is started then.
    """
    path = path or config_files.SYSTEM / config_files.POLICY
    try:
        info = path.stat()
    except OSError:
        return Limits()
    if info.st_uid != 0 or info.st_mode & 0o022:
        warnings.warn(
            f"{path} is ignored: it must belong to root and be writable by root only",
            UserWarning,
            stacklevel=3,
        )
        return Limits()
    values = config_files.read_toml(path, "policy", _FIX)
    for key, value in values.items():
        if not _is_valid(key, value):
            raise UsageError(f"the policy {path} has an invalid {key} = {value!r}", fix=_FIX)
    lists = {key: tuple(values.pop(key)) for key in _LISTS if key in values}
    return Limits(**{**values, **lists}, path=path)


_FIX = "ask the administrator of this host"


def _is_valid(key: str, value: Any) -> bool:
    if key in _NUMBERS:
        # Larger integers cannot be compared with the memory of a task.
        return (type(value) is int and 0 <= value < 2**63) or (type(value) is float and value >= 0)
    if key not in _LISTS or not isinstance(value, list):
        return False
    if not all(isinstance(item, str) for item in value):
        return False
    try:
        return key != "allow" or bool([ipaddress.ip_network(item) for item in value] or True)
    except ValueError:
        return False


def _within(inner: Any, outer: Any) -> bool:
    return bool(inner.version == outer.version and inner.subnet_of(outer))
