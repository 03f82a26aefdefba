"""Checks of datasets that read from memory through TensorFlow's own ``distribute``."""

from __future__ import annotations

from typing import Any

from tfd_notebook._compat.tf_data import graph
from tfd_notebook.errors import NoWorkers, TfdError
from tfd_notebook.model.spec import Endpoint
from tfd_notebook.net.ports import listening_fds
from tfd_notebook.net.probe import dispatcher_workers

_TIMEOUT_SECONDS = 2.0


def check_transfer(dataset: Any) -> None:
    """Reject the in-memory transfer protocol if the data workers run in other processes.

    Raises
    ------
    NoWorkers
        No data worker of the service runs in this process. TensorFlow would wait forever.
    """
    for read in graph.plain_reads(dataset):
        if graph.transfer_protocol(read) != "local":
            continue
        address = graph.service_address(read)
        try:
            workers = dispatcher_workers(address, timeout=_TIMEOUT_SECONDS)
            ports = [Endpoint.parse(worker).port for worker in workers]
        except TfdError:
            continue
        if workers and not any(map(listening_fds, ports)):
            raise NoWorkers(
                'data_transfer_protocol="local" reads elements from the memory of this process, '
                f"but the data workers of the dispatcher at {address} run in other processes: "
                f"{', '.join(workers[:5])}",
                fix="omit data_transfer_protocol, so that elements are sent by gRPC",
            )
