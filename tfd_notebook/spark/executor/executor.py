"""Which executor a Python process of Spark belongs to, and how to see it end."""

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
    """An executor of Spark, as a process on its host sees it.

    Parameters
    ----------
    id : str
        Spark's name for it; ``"driver"`` where Spark runs in one process.
    host : str
    pid : int
        Of its JVM.
    started : float
        See `tfd_notebook.net.runtime_dir.process_start`.
    """

    id: str
    host: str
    pid: int
    started: float


def here() -> Executor:
    """Return the executor that this Python process, a worker of Spark's, belongs to.

    Raises
    ------
    SparkError
        No JVM is among the parents of this process.
    """
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            if "java" in process.name():
                return Executor(
                    _id_of(process), socket.gethostname(), process.pid, _start_of(process.pid)
                )
    raise SparkError(
        f"process {os.getpid()} was not started by an executor of Spark",
        fix="call it inside a task of Spark",
    )


def of_driver() -> Executor:
    """Return what stands for the executor of a node beside the notebook: this process."""
    return Executor("driver", socket.gethostname(), os.getpid(), _start_of(os.getpid()))


def _start_of(pid: int) -> float:
    """Return `runtime.process_start` of a process that runs."""
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
    """Sees a process end that is no child of this one.

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
            # Where it has ended already, `ended` finds no process of that start.
            with contextlib.suppress(OSError):
                self._handle = os.pidfd_open(pid)

    def fileno(self) -> int | None:
        """Return a descriptor that becomes readable when the process ends, where there is one."""
        return self._handle

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        if self._handle is None:
            return not runtime_dir.runs(self._pid, self._started)
        if self._checked is None:  # the pid was another process's by then
            self._checked = runtime_dir.runs(self._pid, self._started)
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return not self._checked or bool(poll.poll(0))

    def wait(self) -> None:
        """Wait until it has ended."""
        while not self.ended:
            if self._handle is None:
                time.sleep(1.0)
            else:
                poll = select.poll()
                poll.register(self._handle, select.POLLIN)
                poll.poll()

    def close(self) -> None:
        """Let go of it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
