"""The user's runtime directory: sockets, logs, and state files that identify orphans."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import select
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from tfd_notebook.errors import InvalidMessage, WorkDirError
from tfd_notebook.net import validation

log = logging.getLogger("tfd_notebook")

STATE_FILE = "state.json"
#: Set in the environment of every process of an agent, to the agent's id.
AGENT_VARIABLE = "TFD_AGENT"
#: The id of this boot, which systems other than Linux lack.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: The id of this machine. Images of systems lack it, or have "uninitialized" there.
MACHINE_ID = Path("/etc/machine-id")
_LOCK_FILE = "agent.lock"
_HAS_PROC = os.path.exists("/proc/self/stat")
#: Interval in seconds of the checks of a process on systems without pidfd.
_POLL_SECONDS = 0.05
#: Flag of a process in /proc/PID/stat, from the kernel's ``sched.h``.
_PF_EXITING = 4
_REMOVE_ATTEMPTS = 20
_REMOVE_PAUSE = 0.05
#: Limit of a file with JSON. A detached cluster of thousands of tasks has less than 2 MB.
_MAX_JSON_BYTES = 1 << 24
_identity = validation.record_with(
    {
        "host": validation.text,
        "boot": validation.text,
        "pid_namespace": validation.text,
        "pid": validation.pid,
        "start": validation.number,
    }
)
_process = validation.optional(_identity)
#: The fields that are used. Another version may write more.
_state = validation.record_with(
    {
        "agent": validation.optional(validation.text),
        "pid": validation.optional(validation.pid),
        "process": _process,
        "starter": _process,
        "owner": _process,
        "clusters": validation.optional(
            validation.mapping(validation.cluster_name, validation.optional(validation.timestamp))
        ),
    }
)
#: Damaged files that were reported.
_reported: set[Path] = set()


def runtime_dir() -> Path:
    """Return the private directory (0700) for all files that exist while tasks run.

    It is ``TFD_RUNTIME_DIR``, else a folder in ``XDG_RUNTIME_DIR``, else one in the temporary
    directory.

    Raises
    ------
    WorkDirError
        It belongs to another user, or cannot be created.
    """
    explicit = os.environ.get("TFD_RUNTIME_DIR")
    base = os.environ.get("XDG_RUNTIME_DIR")
    if explicit:
        path = Path(explicit)
    elif base and os.access(base, os.W_OK):
        path = Path(base) / "tfd_notebook"
    else:
        path = Path(tempfile.gettempdir()) / f"tfd_notebook-{os.getuid()}"
    fix = "set TFD_RUNTIME_DIR to a directory that belongs to you"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            raise WorkDirError(f"the runtime directory {path} belongs to another user", fix=fix)
        if info.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise WorkDirError(
            f"creating the runtime directory {path} failed: {error}", fix=fix
        ) from None
    return path


def new_agent_dir(agent_id: str) -> tuple[Path, IO[bytes]]:
    """Create the directory of the agent `agent_id`; return it and the open file that locks it.

    The agent inherits the file and never closes it. The directory of a running agent is therefore
    locked from its creation on. That of an agent that has ended is not.
    """
    path = runtime_dir() / f"agent-{agent_id}"
    temporary = Path(tempfile.mkdtemp(prefix=".agent-", dir=path.parent))
    lock = (temporary / _LOCK_FILE).open("wb")
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_state(temporary, {"starter": process_identity(os.getpid())})
        temporary.rename(path)
    except BaseException:
        lock.close()
        remove(temporary)
        raise
    return path, lock


def is_locked(directory: Path) -> bool | None:
    """Return True if the agent of a directory runs; None if the file system has no locks."""
    try:
        # Without a wait for the other end of a pipe.
        descriptor = os.open(directory / _LOCK_FILE, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as lock:
            # A shared lock, so that two concurrent checks do not mistake each other for the agent.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def own_file(pid: int, suffix: str) -> Path:
    """Return the path of a file or directory that belongs to the process `pid` of this host.

    The name contains the boot and the pid namespace of the process. Several hosts or containers can
    share the runtime directory.
    """
    return runtime_dir() / f"{pid}.{'-'.join(_host_boot_namespace())}.{suffix}"


def own_files(suffix: str = "*") -> Iterator[tuple[int, Path]]:
    """Yield the paths of `own_file` for processes of this boot and pid namespace, with the pids."""
    # The host is not compared: without a machine id, its part of the name is a former host name.
    own = "-".join(_host_boot_namespace()[1:])
    for path in sorted(runtime_dir().glob(f"*.*-{own}.{suffix}")):
        pid = path.name.partition(".")[0]
        if pid.isdecimal():
            yield int(pid), path


def orphaned_files() -> Iterator[Path]:
    """Yield the paths of `own_file` for processes that have ended, if this host can check."""
    host, boot, _ = _host_boot_namespace()
    for pid, path in own_files():
        if process_start(pid) is None:
            yield path
    for path in sorted(runtime_dir().glob(f"*.{host}-*-*.*")):
        match = re.fullmatch(rf"\d+\.{host}-([^.-]+)-\d+\..*", path.name)
        if match is not None and match[1] != boot:
            yield path


def control_socket(pid: int) -> Path:
    """Return the path of the socket on which the process `pid` listens for the same user."""
    paths = (path for owner, path in own_files("sock") if owner == pid)
    return next(paths, own_file(pid, "sock"))


def process_start(pid: int) -> float | None:
    """Return the start time of a process, which no clock step changes; None if it has ended.

    On Linux it is in clock ticks since the boot. Compare it for equality. Together with the pid it
    identifies a process of this boot and pid namespace. A pid alone may be reused.
    """
    try:
        if _HAS_PROC:
            fields = _stat(pid)
            # A killed kernel stays a zombie until its parent waits for it.
            return None if fields[0] in "ZX" else float(fields[19])
        process = psutil.Process(pid)
        ended = process.status() == psutil.STATUS_ZOMBIE
        return None if ended else float(process.create_time())
    except (OSError, psutil.Error):
        return None


def is_ending(pid: int) -> bool:
    """Return True if a process has ended or, on Linux, has begun to end.

    A large process ends slowly: its files are closed long before its parent is notified.
    """
    if not _HAS_PROC:
        return process_start(pid) is None
    try:
        return bool(int(_stat(pid)[6]) & _PF_EXITING)
    except OSError:
        return True


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, from the state on."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The name of the command, in parentheses, may contain any character.
    return text.rpartition(")")[2].split()


def process_identity(pid: int) -> dict[str, Any] | None:
    """Return the identity of a process as JSON values; None if it has ended."""
    start = process_start(pid)
    if start is None:
        return None
    host, boot, namespace = _host_boot_namespace()
    return {"host": host, "boot": boot, "pid_namespace": namespace, "pid": pid, "start": start}


def is_running(identity: object) -> bool:
    """Return True if the process with this `process_identity` runs on this host."""
    if not isinstance(identity, dict) or not isinstance(identity.get("pid"), int):
        return False
    current = process_identity(identity["pid"])
    return current is not None and {**identity, "host": ""} == {**current, "host": ""}


def has_ended(identity: object) -> bool:
    """Return True if the process with this `process_identity` has ended; False if unknown.

    Processes of other hosts, or of other containers on this host, are not visible.
    """
    if not isinstance(identity, dict):
        return False
    host, boot, namespace = _host_boot_namespace()
    if identity.get("boot") == boot:
        return identity.get("pid_namespace") == namespace and not is_running(identity)
    return identity.get("host") == host


def runs(pid: object, started: object) -> bool:
    """Return True if the process `pid` of this boot runs, with this result of `process_start`."""
    return isinstance(pid, int) and started is not None and process_start(pid) == started


def boot_id() -> str:
    """Return an identifier of this boot of the system; without one, that of the machine."""
    return _digest(_read(BOOT_ID) or _host())


def _host_boot_namespace() -> tuple[str, str, str]:
    """Return identifiers of the host, the boot and the pid namespace.

    Boot and namespace identify the processes of this host. The host is only compared to find the
    files of its earlier boots.
    """
    namespace = "0"
    with contextlib.suppress(OSError):
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    return _digest(_host()), boot_id(), namespace


def _host() -> str:
    # DHCP can change the host name between two boots.
    machine = _read(MACHINE_ID)
    return machine if re.fullmatch("[0-9a-f]{32}", machine) else socket.gethostname()


def _read(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text().strip()
    return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@contextlib.contextmanager
def watched(pid: int) -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits up to a number of seconds and returns True if a process ended.

    The process has ended when all its threads have, unlike its state in ``/proc``, which follows
    the first thread. Its parent still gets its exit status.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # no pidfd on this system, or the process has ended

        def poll_state(seconds: float) -> bool:
            deadline = time.monotonic() + seconds
            while process_start(pid) is not None:
                if time.monotonic() > deadline:
                    return False
                time.sleep(min(_POLL_SECONDS, seconds))
            return True

        yield poll_state
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        yield lambda seconds: bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def wait_for_end(pid: int, started: float) -> None:
    """Wait until the process `pid` with this result of `process_start` has ended."""
    with watched(pid) as ended:
        while runs(pid, started) and not ended(1.0):
            pass


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Write the agent's state file, atomically and readable by this user only."""
    write_private(directory / STATE_FILE, state)


def write_private(target: Path, state: dict[str, Any]) -> None:
    """Write a JSON file, atomically and readable by this user only."""
    temporary = target.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(state, file)
    temporary.replace(target)


def agent_states() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield directory and state of each agent of this user, running or not."""
    for directory in sorted(runtime_dir().glob("agent-*")):
        yield directory, read_state(directory)


def read_state(directory: Path) -> dict[str, Any]:
    """Return the state in the directory of an agent; it is empty if missing or damaged."""
    return read_private(directory / STATE_FILE, _state) or {}


def read_private(path: Path, check: validation.Check) -> Any:
    """Return the checked value of a JSON file; None if it is missing or damaged.

    A damaged file is reported once.
    """
    try:
        # Without O_NONBLOCK, a named pipe would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("not a file")
            content = file.read(_MAX_JSON_BYTES + 1)
        if len(content) > _MAX_JSON_BYTES:
            raise ValueError(f"longer than {_MAX_JSON_BYTES} bytes")
        return check(validation.json_value(json.loads(content), path.name), path.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError, InvalidMessage) as error:
        if path not in _reported:
            _reported.add(path)
            reason = error.what if isinstance(error, InvalidMessage) else str(error)
            log.warning("the damaged file %s is ignored: %s", path, reason)
        return None


def remove(directory: Path) -> None:
    """Remove `directory` and its contents."""
    # A thread of a killed process may still create files.
    for _ in range(_REMOVE_ATTEMPTS):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(_REMOVE_PAUSE)


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables, and restore their previous values afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
