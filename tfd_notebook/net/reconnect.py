"""Reconnection with backoff, and heartbeats, of all channels."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

#: Interval in seconds of heartbeats. Peers count a connection as lost after four intervals.
HEARTBEAT_SECONDS = 5.0
SILENT_SECONDS = 4 * HEARTBEAT_SECONDS

Connection = TypeVar("Connection")


def reconnect(
    connect: Callable[[], Connection],
    closed: threading.Event,
    may_retry: Callable[[], bool] = lambda: True,
    *,
    first_delay: float = 0.1,
    max_delay: float = 5.0,
) -> Connection | None:
    """Return a new connection, or None once `closed` is set.

    Parameters
    ----------
    connect : callable
        Returns a connection. OSError is temporary. Other exceptions are passed on.
    closed : threading.Event
    may_retry : callable
        Called after each failure. If it returns False, the OSError is raised.
    first_delay, max_delay : float
        Seconds before the first attempt, and maximum seconds between attempts. The delay doubles.
        Default 0.1 and 5.
    """
    pause = first_delay
    while not closed.wait(pause):
        try:
            return connect()
        except OSError:
            if not may_retry():
                raise
        pause = min(max(2 * pause, 0.1), max_delay)
    return None


def send_heartbeats(
    send: Callable[[], object], closed: threading.Event, seconds: float | None = None
) -> None:
    """Call `send` regularly in a thread until `closed` is set. It may raise OSError.

    Parameters
    ----------
    send : callable
    closed : threading.Event
    seconds : float, optional
        Interval. Default: `HEARTBEAT_SECONDS`.
    """
    interval = HEARTBEAT_SECONDS if seconds is None else seconds

    def run() -> None:
        while not closed.wait(interval):
            with contextlib.suppress(OSError):
                send()

    threading.Thread(target=run, name="tfd-heartbeat", daemon=True).start()
