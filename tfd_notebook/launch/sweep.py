"""Find and end what a dead kernel left behind, and nothing else."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tfd_notebook.launch import runtime


@dataclass(frozen=True)
class Leftover:
    """A process, directory or socket that outlived its owner.

    Parameters
    ----------
    agent : str
        Id of the agent that it belonged to.
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
    found: list[Leftover] = []
    dead: dict[str, Path] = {}
    sockets: list[tuple[str, Path]] = []
    for directory, state in runtime.agent_states():
        if not _owner_lives(directory, state):
            agent = directory.name.removeprefix("agent-")
            dead[agent] = directory
            owner = state.get("owner_pid")
            # Another process may have the pid by now, and listen there.
            if isinstance(owner, int) and runtime.process_start(owner) is None:
                sockets.append((agent, runtime.control_socket(owner)))
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            marked = process.environ().get(runtime.AGENT_VARIABLE)
            if marked not in dead:
                continue
            found.append(Leftover(marked, process.pid, " ".join(process.cmdline())[:120]))
            if not dry_run:
                process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue
    for agent, directory in dead.items():
        found.append(Leftover(agent, None, str(directory)))
        if not dry_run:
            runtime.remove(directory)
    for agent, path in sockets:
        if path.exists():
            found.append(Leftover(agent, None, str(path)))
            if not dry_run:
                path.unlink(missing_ok=True)
    return tuple(found)


def _owner_lives(directory: Path, state: dict[str, object]) -> bool:
    pid, started = state.get("owner_pid"), state.get("owner_start")
    if not isinstance(pid, int) or not isinstance(started, (int, float)):
        # A directory without a readable state file: its agent is just starting, or died in the act.
        return time.time() - directory.stat().st_mtime < 60
    now = runtime.process_start(pid)
    return now is not None and abs(now - started) < 1.0
