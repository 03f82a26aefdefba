"""Resolver for the tasks of clusters in remote kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import urlsplit

from tfd_notebook.errors import Malformed, NoAnswer, NoTasks, UsageError
from tfd_notebook.launchers.client.host_addresses import is_private, parse_address
from tfd_notebook.model.spec import Endpoint, Role
from tfd_notebook.net import ports
from tfd_notebook.net.host import addresses_of
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
        kernel's server. Any other address must belong to that host, or be private.
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
            others = {_host(other) for other in self._kernels} - {_host(kernel)}
            for job, address in _addresses(kernel, others):
                tasks.setdefault(job, []).append(address)
        if not tasks:
            raise NoTasks(
                f"{self.place} have no worker and no parameter server",
                fix='start tasks: kernel.run("cluster = tfd.Cluster(workers=2, ps=1)")',
            )
        return tasks


def _host(kernel: Any) -> str:
    return urlsplit(f"//{kernel.label}").hostname or str(kernel.label)


def _addresses(kernel: Any, others: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield job and address of each task that has not ended; `others` are other kernels' hosts."""
    host = _host(kernel)
    for cluster in kernel.clusters.values():
        if cluster.ended:
            continue
        for row in sorted(cluster.snapshot().tasks, key=lambda row: row.index):
            if row.role in _JOBS and row.address and not row.state.ended:
                endpoint = Endpoint.parse(row.address)
                address = host if endpoint.host in _LOOPBACK else endpoint.host
                if not _is_possible(address, host, others):
                    raise Malformed(
                        f"{kernel.label} states the address {row.address} for {row.task}: expected "
                        "an address of its host, or a private address of no other kernel",
                        fix="use a server whose name resolves to that address, or start the tasks "
                        "at localhost",
                    )
                yield str(row.role), str(Endpoint(address, endpoint.port))


def _is_possible(stated: str, host: str, others: Collection[str]) -> bool:
    """Return True if a kernel at `host` may state an address, as for hosts of a launcher."""
    if stated == host:
        return True
    addresses, known = addresses_of(stated), addresses_of(host)
    if addresses <= known:
        return bool(addresses)
    if any(map(addresses.intersection, map(addresses_of, others))):
        return False
    parsed = [parse_address(address) for address in addresses]
    return all(address is not None and is_private(address) for address in parsed) and (
        ports.is_this_host(host) or not ports.is_this_host(stated)
    )
