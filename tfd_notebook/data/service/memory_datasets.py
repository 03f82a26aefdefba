"""Datasets of TensorFlow's own ``distribute`` that take elements from memory."""

from __future__ import annotations

from typing import Any

from tfd_notebook._compat.tf_data import graph
from tfd_notebook.errors import NoWorkers, TfdError
from tfd_notebook.model.spec import Endpoint
from tfd_notebook.net.ports import listening_fds
from tfd_notebook.net.probe import dispatcher_workers

_SECONDS = 2.0


def check_transfer(dataset: Any) -> None:
    """Refuse in-memory transfer from data workers of other processes.

    Raises
    ------
    NoWorkers
        No data worker of the service runs in this process; TensorFlow would wait forever.
    """
    for read in graph.plain_reads(dataset):
        if graph.transfer_protocol(read) != "local":
            continue
        address = graph.service_address(read)
        try:
            workers = dispatcher_workers(address, timeout=_SECONDS)
            ports = [Endpoint.parse(worker).port for worker in workers]
        except TfdError:
            continue
        if workers and not any(map(listening_fds, ports)):
            raise NoWorkers(
                'data_transfer_protocol="local" takes elements from the memory of this process, '
                f"but the data workers of the dispatcher at {address} run in other processes: "
                f"{', '.join(workers[:5])}",
                fix="leave data_transfer_protocol out, so that they come by gRPC",
            )
