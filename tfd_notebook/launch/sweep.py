"""Find and end what a dead kernel left behind, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tfd_notebook.launch import away, runtime

#: Seconds for processes that were killed to be gone.
_DEATH_SECONDS = 5.0


@dataclass(frozen=True)
class Leftover:
    """A process, directory or socket that outlived its owner.

    Parameters
    ----------
    agent : str
        Id of the agent that it belonged to; empty for what belonged to a process.
    pid : int, optional
        The process; None for a directory or socket.
    what : str
        Command line, or path.
    """

    agent: str
    pid: int | None
    what: str


def sweep(dry_run: bool = False) -> tuple[Leftover, ...]:
    """End the processes and remove the directories of agents whose owner is gone.

    A process counts as ours when its environment carries the id of an agent in this user's
    runtime directory, and as left over when the kernel that owned that agent no longer runs.

    Parameters
    ----------
    dry_run : bool
        Only look. Default false.

    Returns
    -------
    tuple of Leftover
        What was (or would be) ended and removed.
    """
    if not dry_run:
        away.away()  # removes the files of clusters whose lease is over
    found: list[Leftover] = []
    dead: dict[str, Path] = {}
    for directory, state in runtime.agent_states():
        if not _owner_lives(directory, state):
            agent = directory.name.removeprefix("agent-")
            dead[agent] = directory
    with contextlib.ExitStack() as stack:
        deaths = []
        for process in psutil.process_iter():
            if process.pid == os.getpid():
                continue
            try:
                marked = process.environ().get(runtime.AGENT_VARIABLE)
                if marked not in dead:
                    continue
                found.append(Leftover(marked, process.pid, " ".join(process.cmdline())[:120]))
                if not dry_run:
                    has_ended = stack.enter_context(runtime.watched(process.pid))
                    process.send_signal(signal.SIGKILL)
                    deaths.append(has_ended)
            except psutil.Error:
                continue
        # One that is dying may still write where its directory is being removed.
        deadline = time.monotonic() + _DEATH_SECONDS
        for has_ended in deaths:
            has_ended(max(0.0, deadline - time.monotonic()))
    for agent, directory in dead.items():
        found.append(Leftover(agent, None, str(directory)))
        if not dry_run:
            runtime.remove(directory)
    for path in runtime.runtime_dir().glob("*.*"):
        # The socket of a process, or a directory. Another process may have the pid by now.
        pid = path.name.partition(".")[0]
        if pid.isdecimal() and runtime.process_start(int(pid)) is None:
            found.append(Leftover("", None, str(path)))
            if not dry_run:
                runtime.remove(path) if path.is_dir() else path.unlink(missing_ok=True)
    return tuple(found)


def _owner_lives(directory: Path, state: dict[str, object]) -> bool:
    pid = state.get("owner_pid")
    if "agent" not in state:
        # A directory without a readable state file: its agent is just starting, or died in the act.
        return time.time() - directory.stat().st_mtime < 60
    if runtime.runs(pid, state.get("owner_start")):
        return True
    # Without an owner it is the agent itself that knows when its clusters end.
    leases = state.get("clusters")
    stays = pid is None or (
        isinstance(leases, dict) and any(lease is not None for lease in leases.values())
    )
    return stays and runtime.runs(state.get("pid"), state.get("start"))
