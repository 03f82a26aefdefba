"""What an administrator allows on a host: limits in a file that only root can write.

``/etc/tfd_notebook/policy.toml``::

    tasks = 32                      # most tasks of one cluster
    memory_gb = 16                  # most memory of one task (10**9 bytes)
    gpus = 4                        # most GPUs of one cluster
    lease_hours = 48                # longest lease of a detached cluster
    launchers = ["local", "ssh"]    # others are refused
    allow = ["10.0.0.0/8"]          # networks to which ports may be opened; [] for none

What is not there is not limited. A refusal quotes file and line. Memory is limited by the agent of
the host that the task runs on, by the policy of that host: once a second it looks at what a ready
task's process holds (rss, which counts what it shares with others, too), and ends the process when
that is more. The task is restarted like one that died.
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
    """What a policy file says; None where it says nothing.

    Parameters
    ----------
    tasks, gpus : int, optional
    memory_gb, lease_hours : float, optional
    launchers, allow : tuple of str, optional
    path : Path, optional
        The file; None where there is none.
    """

    tasks: int | None = None
    memory_gb: float | None = None
    gpus: int | None = None
    lease_hours: float | None = None
    launchers: tuple[str, ...] | None = None
    allow: tuple[str, ...] | None = None
    path: Path | None = None

    def check_cluster(self, launcher: str, tasks: int, gpus: int, allow: Sequence[str]) -> None:
        """Raise Refused unless a cluster may be like this.

        Parameters
        ----------
        launcher : str
            The launcher's own name.
        tasks, gpus : int
            How many it asks for; GPUs that are dealt out by themselves do not count here.
        allow : sequence of str
            Networks that shall come in.
        """
        if self.launchers is not None and launcher not in self.launchers:
            raise self._refusal("launchers", f"launcher {launcher!r} is not allowed here")
        if self.tasks is not None and tasks > self.tasks:
            raise self._refusal("tasks", f"{tasks} tasks are too many for one cluster")
        self.check_gpus(gpus)
        self.check_allow(allow)

    def check_allow(self, allow: Sequence[str]) -> None:
        """Raise Refused if ports must not be opened to one of these networks or addresses."""
        if self.allow is None:
            return
        allowed = [ipaddress.ip_network(network) for network in self.allow]
        for network in allow:
            wanted = ipaddress.ip_network(network, strict=False)
            if not any(_within(wanted, one) for one in allowed):
                raise self._refusal("allow", f"ports must not be opened to {network}")

    def check_gpus(self, count: int) -> None:
        """Raise Refused if a cluster must not have so many GPUs."""
        if self.gpus is not None and count > self.gpus:
            raise self._refusal("gpus", f"{count} GPUs are too many for one cluster")

    def check_lease(self, hours: float) -> None:
        """Raise Refused if a lease must not be so long."""
        if self.lease_hours is not None and hours > self.lease_hours:
            raise self._refusal("lease_hours", f"a lease of {hours:g} hours is too long")

    def too_much_memory(self, megabytes: float) -> str:
        """Say why a task must not hold so much; empty where it may."""
        if self.memory_gb is None or megabytes <= self.memory_gb * 1e3:
            return ""
        return f"{memory.too_much(megabytes)} ({self.quote('memory_gb')})"

    def quote(self, key: str) -> str:
        """Return the line of the file that sets `key`, with its place."""
        assert self.path is not None
        for number, line in enumerate(self.path.read_text().splitlines(), 1):
            if re.match(rf"\s*{key}\s*=", line):
                return f"{self.path}, line {number}: {line.strip()}"
        return str(self.path)

    def _refusal(self, key: str, what: str) -> Refused:
        return Refused(
            f"{what} ({self.quote(key)})", fix="ask for less, or ask who administers this host"
        )


def limits(path: Path | None = None) -> Limits:
    """Return what the host's policy says.

    Parameters
    ----------
    path : Path, optional
        Default: ``/etc/tfd_notebook/policy.toml``. A file that others than root can write limits
        nothing, and a warning says so.

    Raises
    ------
    UsageError
        The file cannot be understood: nothing is started then.
    """
    path = path or config_files.SYSTEM / config_files.POLICY
    try:
        info = path.stat()
    except OSError:
        return Limits()
    if info.st_uid != 0 or info.st_mode & 0o022:
        warnings.warn(
            f"{path} limits nothing: it must belong to root and be writable by nobody else",
            UserWarning,
            stacklevel=3,
        )
        return Limits()
    said = config_files.read_toml(path, "policy", _ASK)
    for key, value in said.items():
        if not _is_good(key, value):
            raise UsageError(f"the policy {path} says {key} = {value!r}", fix=_ASK)
    lists = {key: tuple(said.pop(key)) for key in _LISTS if key in said}
    return Limits(**{**said, **lists}, path=path)


_ASK = "ask who administers this host"


def _is_good(key: str, value: Any) -> bool:
    if key in _NUMBERS:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    if key not in _LISTS or not isinstance(value, list):
        return False
    if not all(isinstance(one, str) for one in value):
        return False
    try:
        return key != "allow" or bool([ipaddress.ip_network(one) for one in value] or True)
    except ValueError:
        return False


def _within(inner: Any, outer: Any) -> bool:
    return bool(inner.version == outer.version and inner.subnet_of(outer))
