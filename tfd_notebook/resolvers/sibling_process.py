"""Resolver for a cluster of another process of this user on this host."""

from __future__ import annotations

from tfd_notebook.model.spec import TaskState
from tfd_notebook.net import control_calls
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import AddressesByJob

_SECONDS = 5.0


class SiblingProcessResolver(Resolver):
    """A resolver that requests the tasks of a cluster from its process at each call.

    Parameters
    ----------
    name : str
        Name of the cluster.
    pid : int
        Process of the cluster.
    """

    def __init__(self, name: str, pid: int) -> None:
        super().__init__()
        self.name = name
        self.pid = pid

    @property
    def place(self) -> str:
        return f"the cluster {self.name!r} of the process {self.pid}"

    def _find(self) -> AddressesByJob:
        request = {"command": "snapshot", "name": self.name}
        jobs: dict[str, dict[int, str]] = {}
        for row in control_calls.call(self.pid, request, _SECONDS)["snapshot"]["tasks"]:
            if row["address"] and not TaskState(row["state"]).ended:
                jobs.setdefault(row["role"], {})[row["index"]] = row["address"]
        return jobs
