"""Resolver for a cluster of another process of this user on this host."""

from __future__ import annotations

from tfd_notebook.model.spec import MAX_TASKS_PER_ROLE, Role, TaskState
from tfd_notebook.net import control_calls, validation
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import AddressesByJob

_SECONDS = 5.0
_TASKS = validation.listing(
    validation.record_with(
        {
            "role": validation.one_of(*Role),
            "index": validation.integer(0, MAX_TASKS_PER_ROLE - 1),
            "address": validation.text,
            "state": validation.one_of(*TaskState),
        }
    )
)
_ANSWER = validation.record_with({"snapshot": validation.record_with({"tasks": _TASKS})})


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
        answer = control_calls.call(self.pid, request, _SECONDS)
        for row in control_calls.checked(self.pid, _ANSWER, answer)["snapshot"]["tasks"]:
            if row["address"] and not TaskState(row["state"]).ended:
                jobs.setdefault(row["role"], {})[row["index"]] = row["address"]
        return jobs
