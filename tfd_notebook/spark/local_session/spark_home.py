"""Directory of a local Spark: created for a process, and removed after its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil

from tfd_notebook.errors import LaunchError
from tfd_notebook.net import runtime_dir

_PREFIX = "tfd-spark-"
_JAVA = "java.pid"
#: Seconds within which the shell has to start the guard in the background.
GUARD_SECONDS = 30.0

#: Spark logs to standard error, which the notebook shows: log errors only.
_LOG = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""

#: Waits until its pipe is closed, then until Java has ended, which writes until then. A background
#: command of a shell has no standard input: the pipe is duplicated as descriptor 3.
_GUARD = """
exec 3<&0
(
    read -r _
    tries=0
    while [ -e "$1" ] && [ $tries -lt 120 ]; do
        java=$(cat "$1/java.pid" 2>/dev/null)
        [ -n "$java" ] && kill -0 "$java" 2>/dev/null || rm -rf "$1"
        [ -e "$1" ] && sleep 0.5
        tries=$((tries + 1))
    done
) <&3 3<&- &
"""


class WritableSparkHome:
    """A writable SPARK_HOME, in which executors create their directories.

    A separate process removes it after the end of this process. A Jupyter server kills a kernel
    before Spark has shut down.

    Parameters
    ----------
    original : Path
        SPARK_HOME of the pyspark package.

    Attributes
    ----------
    path : Path
    """

    def __init__(self, original: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        runtime_dir.write_state(self.path, {"process": runtime_dir.process_identity(os.getpid())})
        try:
            self._guard = _guard(self.path)
        except BaseException:
            runtime_dir.remove(self.path)
            raise
        for entry in original.iterdir():
            if entry.name not in ("work", "conf", "logs", "tmp"):
                (self.path / entry.name).symlink_to(entry)
        for name in ("conf", "tmp", "work"):
            (self.path / name).mkdir()
        if (original / "conf").is_dir():
            for entry in (original / "conf").iterdir():
                (self.path / "conf" / entry.name).symlink_to(entry)
        if not (self.path / "conf" / "log4j2.properties").exists():
            (self.path / "conf" / "log4j2.properties").write_text(_LOG)

    def note_java(self, pid: int) -> None:
        """Record the Java process that writes into the directory."""
        (self.path / _JAVA).write_text(str(pid))

    def remove(self) -> None:
        """Remove the directory after all writers have ended."""
        runtime_dir.remove(self.path)
        os.close(self._guard)


def _guard(path: Path) -> int:
    """Start a process that removes a directory after this process; return its open pipe.

    It runs in a separate session and is reparented, because a kernel's children and process group
    are killed with it.
    """
    read, write = os.pipe()
    try:
        subprocess.run(
            ["sh", "-c", _GUARD, "tfd-spark-guard", str(path)],
            stdin=read,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            check=True,
            timeout=GUARD_SECONDS,
        )
    except BaseException as error:
        os.close(write)
        if isinstance(error, subprocess.TimeoutExpired):
            raise LaunchError(
                f"sh did not start within {GUARD_SECONDS:g} s",
                fix="check if the host is overloaded, then start Spark again",
            ) from None
        raise
    finally:
        os.close(read)
    return write


def remove_leftovers() -> None:
    """Remove directories of this user's processes that have ended, for example after a crash."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError, OverflowError):
            if directory.stat().st_uid == os.getuid() and not _is_used(directory):
                shutil.rmtree(directory, ignore_errors=True)


def _is_used(directory: Path) -> bool:
    state = runtime_dir.read_state(directory)
    java = directory / _JAVA
    return not runtime_dir.has_ended(state.get("process")) or (
        java.exists() and psutil.pid_exists(int(java.read_text()))
    )
