"""The ClusterResolver of a `Cluster`. It reports the current tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from tfd_notebook._compat.tf_coordinator import connection
from tfd_notebook.model.handle import Handle
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import AddressesByJob


class OwnResolver(Resolver, Handle):
    """The running workers and parameter servers of a `Cluster`: ``cluster.resolver``.

    Once this process is connected to them, it is their ``chief``.

    Parameters
    ----------
    spec : callable
        Returns the addresses by job.
    connected : callable
        Called when this process is connected to them.
    connect_within : callable
        Returns the context manager within which a strategy connects to them.
    name : str
        Name of the cluster.
    """

    _instead = "send cluster_spec().as_dict()"

    def __init__(
        self,
        spec: Callable[[], Mapping[str, list[str]]],
        connected: Callable[[], None],
        connect_within: Callable[[], AbstractContextManager[None]],
        name: str,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._connected = connected
        self.connect_within = connect_within
        self.name = name

    @property
    def place(self) -> str:
        return f"the cluster {self.name!r}"

    def _find(self) -> AddressesByJob:
        spec = {job: list(tasks) for job, tasks in self._spec().items()}
        chief = connection.address_in(spec)
        if chief is not None:
            # Every strategy calls `cluster_spec` after it has connected.
            self._connected()
            spec["chief"] = [chief]
        return spec
