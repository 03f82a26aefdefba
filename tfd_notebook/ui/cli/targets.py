"""Which cluster a command means, and how it is asked: through its process, or taken over."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tfd_notebook.cluster import attach, commands, control_socket
from tfd_notebook.errors import StateError, UnknownName, UsageError
from tfd_notebook.ui.argparsing import Parser, nearest


class ClusterTarget:
    """A cluster of this user.

    Parameters
    ----------
    name : str
    pid : int, optional
        The process that holds it; None for a detached one that no process holds.
    agent : int, optional
        The process of the agent of such a one.
    """

    def __init__(self, name: str, pid: int | None, agent: int | None = None) -> None:
        self.name = name
        self._pid = pid
        self._agent = agent
        self._held = False

    def ask(self, command: str, timeout: float = 10.0, **arguments: Any) -> Any:
        """Have a command of `tfd_notebook.cluster.commands` done, and return its answer.

        Raises
        ------
        TfdError
        """
        request = {"command": command, "name": self.name, **arguments}
        if self._pid is not None:
            return control_socket.call(self._pid, request, timeout)
        # This process holds it from the first question until its own end.
        if not self._held:
            attach.attach(self.name, connect=False, agent=self._agent)
            self._held = True
        return commands.perform(request)


def add_arguments(parser: Parser) -> None:
    """Add what names a cluster."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="which cluster, where several live")
    add_pid(parser)


def add_pid(parser: Parser) -> None:
    """Add what tells clusters of one name apart."""
    parser.add_argument("--pid", type=int, help="its process or agent, where two are called NAME")


def find(options: argparse.Namespace) -> ClusterTarget:
    """Return the cluster that is meant.

    Raises
    ------
    StateError, UsageError, UnknownName
        No cluster lives; several could be meant; none has that name.
    """
    known = attach.everywhere()
    found = [
        one
        for one in known
        if options.name in (None, one["name"])
        and options.pid in (None, one["pid"], one.get("agent"))
    ]
    if len(found) == 1:
        return ClusterTarget(found[0]["name"], found[0]["pid"], found[0].get("agent"))
    said = ", ".join(f"{one['name']} ({_where(one)})" for one in found or known)
    if found:
        raise UsageError("several clusters could be meant", fix=f"add NAME or --pid: {said}")
    if options.name is None and options.pid is None:
        raise StateError("no cluster of this user lives", fix="tfd start --data-workers 2")
    meant = options.name if options.name is not None else f"of process {options.pid}"
    names = [one["name"] for one in known]
    raise UnknownName(
        f"there is no cluster {meant}",
        fix=nearest(str(options.name), names) + f"clusters: {said or 'none'}",
    )


def _where(one: Mapping[str, Any]) -> str:
    if one["pid"] is not None:
        return f"process {one['pid']}"
    return f"detached, agent {one['agent']}" if one["agent"] else "detached"
