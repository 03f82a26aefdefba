"""Executor of a Python process on Spark."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from tfd_notebook.agent.bridges import spark_bootstrap
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
    """Return the executor of this Python worker; raise RuntimeError outside of a Spark task."""
    executor = spark_bootstrap.executor()
    return _executor(executor["executor"], executor["process"])


def on_driver() -> Executor:
    """Return the owner of nodes on the driver's host, which is this process."""
    return _executor("driver", os.getpid())


def _executor(name: str, pid: int) -> Executor:
    started = runtime_dir.process_start(pid)
    if started is None:
        raise ProcessLookupError(f"process {pid} of executor {name} has ended")
    return Executor(name, socket.gethostname(), pid, started)
