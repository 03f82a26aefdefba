"""The processes in which `Cluster.run` calls the user's function, one for each training worker."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from tfd_notebook.agent.processes import Process
from tfd_notebook.agent.task_supervisor import TaskSupervisor, why_ended
from tfd_notebook.errors import LaunchError
from tfd_notebook.model.spec import Endpoint
from tfd_notebook.net import ports

if TYPE_CHECKING:
    from tfd_notebook.agent.cluster import AgentCluster

_END_SECONDS = 5.0


class Rank:
    """The process of one rank, with a separate port for the function's TensorFlow server.

    Parameters
    ----------
    cluster : AgentCluster
    task : TaskSupervisor
        The training worker, whose host, GPUs and environment the process has.
    """

    def __init__(self, cluster: AgentCluster, task: TaskSupervisor) -> None:
        self._cluster = cluster
        self._task = task
        self._reserved_socket = ports.reserve_port()
        self.address = str(
            Endpoint(Endpoint.parse(task.address).host, self._reserved_socket.getsockname()[1])
        )
        self.log = task.log.with_name(f"{task.log.stem}-rank.log")
        self.log.unlink(missing_ok=True)
        self._process: Process | None = None
        self._closed = False

    async def run(self, function: str, addresses: dict[str, list[str]]) -> dict[str, Any]:
        """Call a function in a new process; see `tfd_notebook.agent.rank_process.call`.

        Returns
        -------
        dict
            The reply of the process. If it ended without one, the reason as ``lost``.
        """
        spec = self._task.spec
        name = f"rank {spec.index}"
        process = await self._cluster.start_process(spec, self.log, name)
        if self._closed:  # in the meantime
            await _end(process)
            return {"lost": "stopped"}
        self._process = process
        try:
            value: dict[str, Any] = await process.request(
                "call",
                None,
                function=function,
                job=str(spec.role),
                index=spec.index,
                cluster=addresses,
                host=spec.host,
                allow=self._cluster.allow,
            )
            return value
        except LaunchError:
            if process.failed is not None:
                raise
            return {"lost": why_ended(await asyncio.shield(process.ended))}

    async def close(self) -> None:
        """End the process and release the port."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            await _end(process)
        self._reserved_socket.close()


async def _end(process: Process) -> None:
    process.kill()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(process.ended), _END_SECONDS)
    await process.close()
