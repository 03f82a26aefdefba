"""The ClusterResolver of a cluster of ours: its answers are those of this moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfd_notebook._compat.tf_coordinator import connection
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import Found


class OwnResolver(Resolver):
    """The workers and parameter servers of a `Cluster` that have not ended: ``cluster.resolver``.

    Once this process is connected to them it is the ``chief`` among them.

    Parameters
    ----------
    spec : callable
        Returns the addresses by job.
    connected : callable
        Called when this process is found to be connected to them.
    name : str
        Of the cluster.
    """

    def __init__(
        self,
        spec: Callable[[], Mapping[str, list[str]]],
        connected: Callable[[], None],
        name: str,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._connected = connected
        self.name = name

    @property
    def place(self) -> str:
        return f"the cluster {self.name!r}"

    def _find(self) -> Found:
        spec = {job: list(tasks) for job, tasks in self._spec().items()}
        chief = connection.address_in(spec)
        if chief is not None:
            # A strategy asks again when it has connected: here it is noticed, whoever makes it.
            self._connected()
            spec["chief"] = [chief]
        return spec
