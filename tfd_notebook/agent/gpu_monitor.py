"""Sampling of the GPUs of an agent's host, for the clusters that requested their list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tfd_notebook.agent import gpu_discovery
from tfd_notebook.agent.cluster import AgentCluster
from tfd_notebook.model.events import Event, GpusMeasured

_EVERY_TICKS = 5


class GpuMonitor:
    """Samples the GPUs of this host in a thread, since a driver may block indefinitely.

    Parameters
    ----------
    publish : callable
        Takes the name of a cluster, and an event for its listeners.
    """

    def __init__(self, publish: Callable[[str, Event], None]) -> None:
        self._publish = publish
        self._sampler = gpu_discovery.GpuSampler()
        self._reading: asyncio.Future[None] | None = None

    def tick(self, clusters: Iterable[AgentCluster], tick: int) -> None:
        """Send the GPU use to clusters, every few ticks and when other tasks use the GPUs."""
        if self._reading is not None and not self._reading.done():
            return
        due = [
            cluster
            for cluster in clusters
            if cluster.gpus
            and (tick % _EVERY_TICKS == 0 or cluster.gpu_holders() != cluster.reported_holders)
        ]
        if due:
            self._reading = asyncio.ensure_future(self._sample(due))

    async def _sample(self, clusters: list[AgentCluster]) -> None:
        numbers = sorted({gpu["index"] for cluster in clusters for gpu in cluster.gpus})
        figures = await asyncio.to_thread(self._sampler.read, numbers)
        for cluster in clusters:
            cluster.reported_holders = cluster.gpu_holders()
            gpus = [
                {
                    **{name: gpu[name] for name in ("index", "name", "memory")},
                    **figures.get(gpu["index"], {}),
                    "task": cluster.reported_holders.get(gpu["index"], ""),
                }
                for gpu in cluster.gpus
            ]
            self._publish(cluster.name, GpusMeasured(tuple(gpus)))
