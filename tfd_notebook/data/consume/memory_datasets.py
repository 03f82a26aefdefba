"""Checks of datasets that read elements from the memory of a process."""

from __future__ import annotations

from collections.abc import Iterable
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


def check_sent(function: Any, readers: Iterable[str]) -> None:
    """Reject a dataset that reads from the memory of this process, for readers in other processes.

    Parameters
    ----------
    function : tf.types.experimental.ConcreteFunction
        Creates the dataset in each reader.
    readers : iterable of str
        The addresses of the readers.

    Raises
    ------
    NoWorkers
        A reader is another process. TensorFlow would wait forever there.
    """
    reads = [
        read
        for definition in graph.definitions_in(function)
        for read in graph.service_reads(definition)
        if read.transfer_protocol == "local" or read.target_workers == "LOCAL"
    ]
    others = [each for each in readers if not listening_fds(Endpoint.parse(each).port)]
    if reads and others:
        service = f"the tf.data service at {reads[0].address}" if reads[0].address else "a service"
        raise NoWorkers(
            f"the dataset reads {service} from the memory of the data workers' process, but the "
            f"training worker at {others[0]} is another process and would wait indefinitely",
            fix='read by gRPC: cluster.distribute(..., data_transfer_protocol="grpc") without '
            'target_workers, or use data workers with their own processes: launcher="local"',
        )
