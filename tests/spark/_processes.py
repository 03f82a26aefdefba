"""The end of processes, which are not children of the test, and of their listening sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from tests._waiting import until
from tfd_notebook.net import runtime_dir


def await_end(
    processes: Iterable[tuple[int, float | None]], seconds: float, ports: Iterable[int] = ()
) -> None:
    """Wait until processes have ended, and check that their ports are free.

    Parameters
    ----------
    processes : iterable of tuple
        Pids with the values of `runtime_dir.process_start`.
    seconds : float
        Timeout.
    ports : iterable of int
    """
    until(lambda: not any(runtime_dir.runs(*process) for process in processes), seconds)
    for port in ports:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
