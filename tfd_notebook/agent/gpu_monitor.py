"""What the GPUs of an agent's host do, told to the clusters that asked which there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from tfd_notebook.agent import gpu_discovery
from tfd_notebook.agent.cluster import AgentCluster

_EVERY_TICKS = 5


class GpuMonitor:
    """Reads the GPUs of this host, beside everything else: a driver may never answer.

    Parameters
    ----------
    tell : callable
        Takes the name of a cluster, and an event for whoever hears of it.
    """

    def __init__(self, tell: Callable[[str, dict[str, Any]], None]) -> None:
        self._tell = tell
        self._meter = gpu_discovery.GpuSampler()
        self._reading: asyncio.Future[None] | None = None

    def tick(self, clusters: Iterable[AgentCluster], tick: int) -> None:
        """Have clusters told how their GPUs are: now and then, and when others hold them."""
        if self._reading is not None and not self._reading.done():
            return
        due = [
            cluster
            for cluster in clusters
            if cluster.gpus and (tick % _EVERY_TICKS == 0 or cluster.gpu_holders() != cluster.held)
        ]
        if due:
            self._reading = asyncio.ensure_future(self._look(due))

    async def _look(self, clusters: list[AgentCluster]) -> None:
        numbers = sorted({gpu["index"] for cluster in clusters for gpu in cluster.gpus})
        figures = await asyncio.to_thread(self._meter.read, numbers)
        for cluster in clusters:
            cluster.held = cluster.gpu_holders()
            known = [
                {
                    **{name: gpu[name] for name in ("index", "name", "memory")},
                    **figures.get(gpu["index"], {}),
                    "task": cluster.held.get(gpu["index"], ""),
                }
                for gpu in cluster.gpus
            ]
            self._tell(cluster.name, {"event": "gpus", "cluster": cluster.name, "gpus": known})
