"""The agents of a cluster on other hosts, reached again by a process that did not start them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfd_notebook.errors import StateError, TfdError
from tfd_notebook.launchers.base import OnEvent
from tfd_notebook.launchers.client.multi_host import Several
from tfd_notebook.launchers.client.session import Link
from tfd_notebook.model.spec import ClusterConfig

if TYPE_CHECKING:
    from tfd_notebook.launchers.remote import RemoteHost, RemoteLauncher


class ReachedHosts:
    """Sessions with the agents of all hosts of a cluster.

    Parameters
    ----------
    launcher : RemoteLauncher
    hosts : sequence of RemoteHost
    links : sequence of Link
        One for each host.
    """

    def __init__(
        self, launcher: RemoteLauncher, hosts: Sequence[RemoteHost], links: Sequence[Link]
    ) -> None:
        self._launcher = launcher
        self._hosts = hosts
        self._links = links

    def clusters(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        # Each agent is told the same of what concerns the whole cluster.
        found: list[dict[str, Any]] = self._links[0].client.request("clusters", timeout)
        return found

    def adopt(self, config: ClusterConfig, on_event: OnEvent) -> tuple[Several, dict[str, Any]]:
        """Hear of the cluster from now on, and have its tunnels lead here, too."""
        made = self._launcher.rejoin(self._hosts, self._links, config, on_event)
        told = []
        founds = []
        for position, node in enumerate(made.nodes):
            found = node.request("adopt")
            if not found["about"]:
                raise StateError(
                    f"cluster {config.name!r} is not wholly described on {node.label}",
                    fix=f"tfd stop {config.name}, and start it again",
                )
            founds.append(found)
            told += [(position, {**event, "host": node.label}) for event in found["tasks"]]
        try:
            made.adopt(told)
        except BaseException:
            made.leave()
            raise
        return made, {**founds[0], "tasks": [event for _, event in told]}

    def end(self, cluster: str) -> None:
        """End what is left of the cluster; never raises."""
        for link in self._links:
            with contextlib.suppress(TfdError):
                link.client.request("close", 30.0, cluster=cluster)
        self.close()

    def close(self) -> None:
        for link in self._links:
            link.close()
        for host in self._hosts:
            host.close()
