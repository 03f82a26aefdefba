"""Resolver for the tasks of clusters in remote kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from tfd_notebook.errors import NoAnswer, NoTasks, UsageError
from tfd_notebook.model.spec import Endpoint, Role
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import AddressesByJob

_JOBS = (Role.PS, Role.WORKER)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class KernelResolver(Resolver):
    """The workers and parameter servers of all clusters in remote kernels, as one cluster.

    They are numbered in the order of the kernels. By default, tasks accept peers from their own
    host only. Allow the other hosts in each cluster:
    ``launcher=tfd.launchers.Local(allow=[...])``.

    Parameters
    ----------
    *kernels : tfd_notebook.RemoteKernel
        Kernels of the clusters. The address ``localhost`` of a task stands for the host of its
        kernel's server.
    task_type, task_id : optional
        The task of this process. Default: not a task of the cluster.
    rpc_layer : str
        Default ``"grpc"``.
    """

    _server_indexes = False

    def __init__(
        self,
        *kernels: Any,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = "grpc",
    ) -> None:
        if not kernels:
            raise UsageError(
                "invalid kernels: expected at least 1, got none", fix="pass a tfd.RemoteKernel"
            )
        for kernel in kernels:
            if not hasattr(kernel, "clusters"):
                raise UsageError(
                    f"invalid kernel {kernel!r}: expected a tfd.RemoteKernel",
                    fix="use tfd.RemoteKernel(server)",
                )
        super().__init__(task_type, task_id, rpc_layer)
        self._kernels = kernels

    @property
    def place(self) -> str:
        return "the kernels at " + ", ".join(kernel.label for kernel in self._kernels)

    def _find(self) -> AddressesByJob:
        tasks: dict[str, list[str]] = {}
        for kernel in self._kernels:
            if kernel.state != "ready":
                raise NoAnswer(
                    f"the kernel at {kernel.label} is {kernel.state}",
                    fix="create a new tfd.RemoteKernel, and start its cluster again",
                )
            for job, address in _addresses(kernel):
                tasks.setdefault(job, []).append(address)
        if not tasks:
            raise NoTasks(
                f"{self.place} have no worker and no parameter server",
                fix='start tasks: kernel.run("cluster = tfd.Cluster(workers=2, ps=1)")',
            )
        return tasks


def _addresses(kernel: Any) -> Iterator[tuple[str, str]]:
    """Yield job and address of each task that has not ended."""
    host = urlsplit(f"//{kernel.label}").hostname or kernel.label
    for cluster in kernel.clusters.values():
        if cluster.ended:
            continue
        for row in sorted(cluster.snapshot().tasks, key=lambda row: row.index):
            if row.role in _JOBS and row.address and not row.state.ended:
                endpoint = Endpoint.parse(row.address)
                address = host if endpoint.host in _LOOPBACK else endpoint.host
                yield str(row.role), str(Endpoint(address, endpoint.port))
