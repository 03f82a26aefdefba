"""Find and end the orphans of dead kernels."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tfd_notebook.launchers.client import detached
from tfd_notebook.net import runtime_dir

#: Seconds to wait until killed processes have ended.
_DEATH_SECONDS = 5.0


@dataclass(frozen=True)
class Orphan:
    """A process, directory or socket that outlived its owner.

    Parameters
    ----------
    agent : str
        Id of the agent that it belonged to; empty if it belonged to another process.
    pid : int, optional
        The process; None for a directory or socket.
    what : str
        Command line, or path.
    """

    agent: str
    pid: int | None
    what: str


def sweep(dry_run: bool = False) -> tuple[Orphan, ...]:
    """End the processes and remove the directories of agents whose owner has ended.

    The environment of a process carries the id of its agent. The agent's directory names the kernel
    that owns it. An agent of a cluster with a lease is never ended.

    Parameters
    ----------
    dry_run : bool
        Only report. Default false.

    Returns
    -------
    tuple of Orphan
        The processes, directories and sockets that were ended and removed, or would be.
    """
    if not dry_run:
        detached.remote_detached_clusters()  # removes the files of clusters with an expired lease
    orphans: list[Orphan] = []
    agent_directories = {
        directory.name.removeprefix("agent-"): directory
        for directory, state in runtime_dir.agent_states()
        if _is_orphan(directory, state)
    }
    with contextlib.ExitStack() as stack:
        deaths = []
        for process in psutil.process_iter():
            if process.pid == os.getpid():
                continue
            try:
                marked = process.environ().get(runtime_dir.AGENT_VARIABLE)
                if marked not in agent_directories:
                    continue
                orphans.append(Orphan(marked, process.pid, " ".join(process.cmdline())[:120]))
                if not dry_run:
                    has_ended = stack.enter_context(runtime_dir.watched(process.pid))
                    process.send_signal(signal.SIGKILL)
                    deaths.append(has_ended)
            except psutil.Error:
                continue
        # A process that is dying may still write to the directory that is removed below.
        deadline = time.monotonic() + _DEATH_SECONDS
        for has_ended in deaths:
            has_ended(max(0.0, deadline - time.monotonic()))
    for agent, directory in agent_directories.items():
        orphans.append(Orphan(agent, None, str(directory)))
        if not dry_run and not runtime_dir.is_locked(directory):
            runtime_dir.remove(directory)
    for path in runtime_dir.orphaned_files():
        orphans.append(Orphan("", None, str(path)))
        if not dry_run:
            runtime_dir.remove(path) if path.is_dir() else path.unlink(missing_ok=True)
    return tuple(orphans)


def _is_orphan(directory: Path, state: dict[str, Any]) -> bool:
    """Return True if an agent has ended, or runs without owner and lease.

    An agent of another host or container that shares the runtime directory is not an orphan.
    """
    agent = state.get("process") or state.get("starter")
    if not runtime_dir.is_locked(directory):
        return runtime_dir.has_ended(agent)
    leases = state.get("clusters") or {}
    has_lease = any(lease is not None for lease in leases.values())
    return (
        not has_lease
        and runtime_dir.has_ended(state.get("owner"))
        and runtime_dir.is_running(agent)
    )
