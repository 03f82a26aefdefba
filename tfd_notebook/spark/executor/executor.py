"""Executor of a Python process on Spark, and detection of its end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from dataclasses import dataclass

import psutil

from tfd_notebook.errors import SparkError
from tfd_notebook.net import runtime_dir


@dataclass(frozen=True)
class Executor:
    """An executor of Spark, identified by its JVM process.

    Parameters
    ----------
    id : str
        Spark's executor id; ``"driver"`` if Spark runs in one process.
    host : str
    pid : int
        Process id of its JVM.
    started : float
        See `tfd_notebook.net.runtime_dir.process_start`.
    """

    id: str
    host: str
    pid: int
    started: float


def current() -> Executor:
    """Return the executor of this Python worker.

    Raises
    ------
    SparkError
        No parent process is a JVM.
    """
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            if "java" in process.name():
                return Executor(
                    _id_of(process), socket.gethostname(), process.pid, _start_of(process.pid)
                )
    raise SparkError(
        f"process {os.getpid()} was not started by a Spark executor",
        fix="call this inside a Spark task",
    )


def on_driver() -> Executor:
    """Return the owner of nodes on the driver's host, which is this process."""
    return Executor("driver", socket.gethostname(), os.getpid(), _start_of(os.getpid()))


def _start_of(pid: int) -> float:
    """Return the start time of a running process; see `runtime_dir.process_start`."""
    started = runtime_dir.process_start(pid)
    if started is None:
        raise psutil.NoSuchProcess(pid)
    return started


def _id_of(jvm: psutil.Process) -> str:
    command = jvm.cmdline()
    if "--executor-id" in command[:-1]:
        return str(command[command.index("--executor-id") + 1])
    return "driver"


class Watch:
    """Detector of the end of a process that is not a child of this one.

    Parameters
    ----------
    pid : int
    started : float
        See `tfd_notebook.net.runtime_dir.process_start`.
    """

    def __init__(self, pid: int, started: float) -> None:
        self._pid, self._started = pid, started
        self._handle: int | None = None
        self._checked: bool | None = None
        if sys.platform == "linux":
            # After the end of the process, `ended` finds no process with this start time.
            with contextlib.suppress(OSError):
                self._handle = os.pidfd_open(pid)

    def fileno(self) -> int | None:
        """Return a descriptor that is readable after the end of the process, or None."""
        return self._handle

    @property
    def ended(self) -> bool:
        """True if the process has ended."""
        if self._handle is None:
            return not runtime_dir.runs(self._pid, self._started)
        if self._checked is None:  # the handle may belong to a later process with this pid
            self._checked = runtime_dir.runs(self._pid, self._started)
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return not self._checked or bool(poll.poll(0))

    def wait(self) -> None:
        """Wait until the process has ended."""
        while not self.ended:
            if self._handle is None:
                time.sleep(1.0)
            else:
                poll = select.poll()
                poll.register(self._handle, select.POLLIN)
                poll.poll()

    def close(self) -> None:
        """Close the descriptor."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
