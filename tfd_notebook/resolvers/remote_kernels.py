"""The tasks of clusters that run in kernels elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from tfd_notebook.errors import NoAnswer, NoTasks, UsageError
from tfd_notebook.model.spec import Endpoint, Role
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import Found

_JOBS = (Role.PS, Role.WORKER)
_HERE = ("localhost", "127.0.0.1", "::1")


class KernelResolver(Resolver):
    """The workers and parameter servers of all clusters in kernels elsewhere, as one cluster.

    They are numbered in the order of the kernels. Open each cluster to the hosts that shall use it
    (``launcher=tfd.launchers.Local(allow=[...])``): tasks take peers from their own host only.

    Parameters
    ----------
    *kernels : tfd_notebook.RemoteKernel
        Where they run. A task at ``localhost`` there is at the host of the kernel's server.
    task_type, task_id : optional
        Which task this process is. Default: none.
    rpc_layer : str
        Default ``"grpc"``.
    """

    _numbers_are_theirs = False

    def __init__(
        self,
        *kernels: Any,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = "grpc",
    ) -> None:
        if not kernels:
            raise UsageError("no kernel to look at", fix="name a tfd.RemoteKernel at least")
        for kernel in kernels:
            if not hasattr(kernel, "clusters"):
                raise UsageError(
                    f"{kernel!r} is no kernel elsewhere", fix="use tfd.RemoteKernel(server)"
                )
        super().__init__(task_type, task_id, rpc_layer)
        self._kernels = kernels

    @property
    def place(self) -> str:
        return "the kernels at " + ", ".join(kernel.label for kernel in self._kernels)

    def _find(self) -> Found:
        found: dict[str, list[str]] = {}
        for kernel in self._kernels:
            if kernel.state != "ready":
                raise NoAnswer(
                    f"the kernel at {kernel.label} is {kernel.state}",
                    fix="make another tfd.RemoteKernel, and start its cluster again",
                )
            for job, address in _addresses(kernel):
                found.setdefault(job, []).append(address)
        if not found:
            raise NoTasks(
                f"{self.place} have no worker and no parameter server",
                fix='start some: kernel.run("cluster = tfd.Cluster(workers=2, ps=1)")',
            )
        return found


def _addresses(kernel: Any) -> Iterator[tuple[str, str]]:
    """Yield job and address of each task that has not ended."""
    host = urlsplit(f"//{kernel.label}").hostname or kernel.label
    for cluster in kernel.clusters.values():
        if cluster.ended:
            continue
        for row in sorted(cluster.snapshot().tasks, key=lambda row: row.index):
            if row.role in _JOBS and row.address and not row.state.ended:
                at = Endpoint.parse(row.address)
                yield str(row.role), str(Endpoint(host if at.host in _HERE else at.host, at.port))
