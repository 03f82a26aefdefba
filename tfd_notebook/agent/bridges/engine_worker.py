"""Functions for the workers of Dask, Ray and ipyparallel, which import this module."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from tfd_notebook.agent.bridges import spark_bootstrap, stdio


def start_bridge(arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Start a bridge next to this process.

    Parameters
    ----------
    arguments : dict
        See `tfd_notebook.agent.bridges.rendezvous.RendezvousBridge`.
    seconds : float
        Timeout for its handshake.

    Returns
    -------
    dict
        ``host``, the pid ``process`` and the handshake ``line``.
    """
    process = os.getpid()
    line = spark_bootstrap.start_process(
        stdio.bootstrap("rendezvous"), {**arguments, "process": process}, seconds
    )
    return {"host": socket.gethostname(), "process": process, "line": line}


async def start_bridge_in_thread(arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Start a bridge as `start_bridge` does, without blocking the event loop of a worker."""
    return await asyncio.to_thread(start_bridge, arguments, seconds)


class Actor:
    """An actor of Ray, which holds the resources of an agent.

    Parameters
    ----------
    gpus : bool
        True if Ray has assigned GPUs to it. Otherwise Ray shows it all GPUs of the node.
    """

    def __init__(self, gpus: bool) -> None:
        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

    def start_bridge(self, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Start a bridge next to this actor; see the function of the same name."""
        return start_bridge(arguments, seconds)
