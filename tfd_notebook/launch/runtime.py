"""The user's runtime directory: sockets, logs and the state files by which leftovers are found."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tfd_notebook.errors import WorkDirError

STATE_FILE = "state.json"
#: Marks every process of an agent in its environment; the value is the agent's id.
AGENT_VARIABLE = "TFD_AGENT"
#: Seconds between looks at a process of which the system cannot tell us.
_LOOK_SECONDS = 0.05


def runtime_dir() -> Path:
    """Return the directory (0700, this user's own) for everything that lives while tasks run.

    ``TFD_RUNTIME_DIR``, else a folder in ``XDG_RUNTIME_DIR``, else one in the temporary
    directory.

    Raises
    ------
    WorkDirError
        If it belongs to somebody else or cannot be made.
    """
    explicit = os.environ.get("TFD_RUNTIME_DIR")
    base = os.environ.get("XDG_RUNTIME_DIR")
    if explicit:
        path = Path(explicit)
    elif base and os.access(base, os.W_OK):
        path = Path(base) / "tfd_notebook"
    else:
        path = Path(tempfile.gettempdir()) / f"tfd_notebook-{os.getuid()}"
    fix = "set TFD_RUNTIME_DIR to a directory of your own"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            raise WorkDirError(f"the runtime directory {path} is not this user's own", fix=fix)
        if info.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise WorkDirError(f"cannot make the runtime directory {path}: {error}", fix=fix) from None
    return path


def new_agent_dir(agent_id: str) -> Path:
    """Make and return the directory of the agent `agent_id`."""
    path = runtime_dir() / f"agent-{agent_id}"
    path.mkdir(mode=0o700)
    return path


def control_socket(pid: int) -> Path:
    """Return where the process `pid` listens for this user's other processes."""
    return runtime_dir() / f"{pid}.sock"


def process_start(pid: int) -> float | None:
    """Return when the process started (seconds since the epoch), None if none runs.

    A pid together with this time names a process for good; a pid alone may be used again.
    """
    try:
        process = psutil.Process(pid)
        # A killed kernel stays a zombie until whoever started it looks.
        ended = process.status() == psutil.STATUS_ZOMBIE
        return None if ended else float(process.create_time())
    except psutil.Error:
        return None


def runs(pid: object, started: object) -> bool:
    """Whether the process of that pid runs and is the one that started then."""
    if not isinstance(pid, int) or not isinstance(started, (int, float)):
        return False
    now = process_start(pid)
    return now is not None and abs(now - started) < 1.0


@contextlib.contextmanager
def watched(pid: int) -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits so many seconds, and says whether the process has ended.

    It has when all of its threads have, and not only the first, as whoever asks for its state is
    told. Its exit status stays for whoever started it.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not on this system, or it is gone

        def ask(seconds: float) -> bool:
            deadline = time.monotonic() + seconds
            while process_start(pid) is not None:
                if time.monotonic() > deadline:
                    return False
                time.sleep(min(_LOOK_SECONDS, seconds))
            return True

        yield ask
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        yield lambda seconds: bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Write the agent's state file, atomically and readable by its user only."""
    write_private(directory / STATE_FILE, state)


def write_private(target: Path, state: dict[str, Any]) -> None:
    """Write a file of JSON, atomically and readable by this user only."""
    temporary = target.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(state, file)
    temporary.replace(target)


def agent_states() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield directory and state of each agent that this user has or had."""
    for directory in sorted(runtime_dir().glob("agent-*")):
        state: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            state = json.loads((directory / STATE_FILE).read_text())
        yield directory, state


def remove(directory: Path) -> None:
    """Remove `directory` and all in it."""
    shutil.rmtree(directory, ignore_errors=True)
