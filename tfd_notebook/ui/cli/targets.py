"""Clusters that a command refers to, and calls to them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tfd_notebook.cluster import attach, commands
from tfd_notebook.errors import StateError, TfdError, UnknownName, UsageError, nearest
from tfd_notebook.net import control_calls


class ClusterTarget:
    """A cluster of this user.

    Parameters
    ----------
    name : str
    pid : int, optional
        Process that holds the cluster. None for a detached cluster that no process holds.
    agent : int, optional
        Process of the agent of such a detached cluster.
    """

    def __init__(self, name: str, pid: int | None, agent: int | None = None) -> None:
        self.name = name
        self.pid = pid
        self.agent = agent
        self._attached = False

    def call(self, command: str, timeout: float = 10.0, **arguments: Any) -> Any:
        """Run a command of `tfd_notebook.cluster.commands`, and return its answer.

        The process of the cluster runs it. A detached cluster that no process holds is attached to
        this process first.

        Raises
        ------
        TfdError
        """
        request = {"command": command, "name": self.name, **arguments}
        if self.pid is not None:
            return control_calls.call(self.pid, request, timeout)
        # This process stays attached from the first call until it ends.
        if not self._attached:
            attach.attach(self.name, connect=False, agent=self.agent)
            self._attached = True
        return commands.perform(request)


def find(options: argparse.Namespace) -> ClusterTarget:
    """Return the cluster that `options` name, or the only running one.

    Raises
    ------
    StateError
        No cluster is running.
    UsageError
        Several clusters match.
    UnknownName
        No cluster has this name or process.
    TimeLimit
        No cluster matches, and a process did not reply or is busy.
    InvalidMessage
        No cluster matches, and a process sent an invalid reply.
    """
    unanswered: list[TfdError] = []
    known = attach.all_clusters(unanswered)
    matches = [
        record
        for record in known
        if options.name in (None, record["name"])
        and options.pid in (None, record["pid"], record.get("agent"))
    ]
    if len(matches) == 1:
        (match,) = matches
        return ClusterTarget(match["name"], match["pid"], match.get("agent"))
    listing = ", ".join(f"{record['name']} ({_where(record)})" for record in matches or known)
    if matches:
        raise UsageError("several clusters match", fix=f"add NAME or --pid: {listing}")
    if unanswered:
        raise unanswered[0]
    if options.name is None and options.pid is None:
        raise StateError("no running cluster", fix="tfd start --data-workers 2")
    name = "" if options.name is None else f" {options.name!r}"
    process = "" if options.pid is None else f" of process {options.pid}"
    names = [record["name"] for record in known]
    raise UnknownName(
        f"no cluster{name}{process}",
        fix=nearest(str(options.name), names) + f"clusters: {listing or 'none'}",
    )


def _where(record: Mapping[str, Any]) -> str:
    if record["pid"] is not None:
        return f"process {record['pid']}"
    return f"detached, agent {record['agent']}" if record["agent"] else "detached"
