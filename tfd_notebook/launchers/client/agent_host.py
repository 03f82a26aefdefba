"""Typed requests to an agent. Only `AgentClient` itself sends another, to resynchronise."""

# `forwarded` implements the methods that have no body.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from tfd_notebook.errors import StartTimeout, TfdError
from tfd_notebook.launchers.base import (
    AdoptedCluster,
    ForwardingTaskHost,
    GpuReport,
    OnEvent,
    forwarded,
)
from tfd_notebook.launchers.client.agent_client import AgentClient, EndpointOf
from tfd_notebook.model.spec import ClusterConfig, TaskSpec


def submit_preload(
    client: AgentClient, environment: Mapping[str, str], path: Sequence[str] | None = None
) -> concurrent.futures.Future[list[str]]:
    """Import TensorFlow for the tasks of an agent; `await_preload` waits for the reply."""
    return client.submit("preload", environment=environment, path=path)


def await_preload(
    reply: concurrent.futures.Future[list[str]], host: str, timeout: float
) -> list[str]:
    """Return the variables that have changed since an earlier import on `host`."""
    try:
        return reply.result(timeout)
    except concurrent.futures.TimeoutError:
        if reply.done():  # an error of the agent
            raise
        raise StartTimeout(
            f"{host} did not import TensorFlow within {timeout:g} s",
            fix="allow more time with tfd.Policy(start_timeout=...)",
        ) from None


def open_cluster(
    client: AgentClient,
    config: ClusterConfig,
    on_event: OnEvent,
    environment: Mapping[str, Any],
    allow: Sequence[str] = (),
    endpoint_of: EndpointOf | None = None,
) -> str:
    """Open a new cluster with an agent and return its directory on the agent's host.

    Parameters
    ----------
    client : AgentClient
    config : ClusterConfig
    on_event : callable
    environment : mapping
        ``environment``, ``directory`` and ``path`` of the tasks.
    allow : sequence of str
        Networks that may connect to the tasks, in addition to those of `config`.
    endpoint_of : callable, optional
        See `AgentClient.listen`.
    """
    client.listen(config.name, on_event, endpoint_of)
    try:
        directory: str = client.request(
            "open",
            30.0,
            cluster=config.name,
            policy=vars(config.policy),
            preload=list(config.preload),
            allow=[*config.allow, *allow],
            description={},
            **environment,
        )
    except BaseException:
        client.listen(config.name, None)
        raise
    return directory


def adopt(
    client: AgentClient, cluster: str, on_event: OnEvent, endpoint_of: EndpointOf | None = None
) -> AdoptedCluster:
    """Receive the events of a running cluster, as `AgentClient.listen`; return its state."""
    client.listen(cluster, on_event, endpoint_of)
    adopted: AdoptedCluster = client.request("adopt", 30.0, cluster=cluster)
    return adopted


def clusters(client: AgentClient, timeout: float) -> list[dict[str, Any]]:
    """Return a summary of each cluster of an agent."""
    summaries: list[dict[str, Any]] = client.request("clusters", timeout)
    return summaries


class AgentTaskHost(ForwardingTaskHost):
    """The tasks of a cluster under one agent.

    Parameters
    ----------
    client : AgentClient
    cluster : str
    directory : str
        Directory of the cluster on the agent's host.
    on_end : callable, optional
        Called when this process has closed the cluster, or has detached from it.
    """

    #: Networks that may connect to the tasks.
    allowed_networks: tuple[str, ...] = ()
    #: The other end of this process's own connection to the host, if known.
    peer_address = ""

    def __init__(
        self,
        client: AgentClient,
        cluster: str,
        directory: str = "",
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = client.host
        self.directory = directory
        self._client = client
        self._cluster = cluster
        self._on_end = on_end

    def request(self, method: str, timeout: float, **arguments: Any) -> Any:
        """Send a request about the cluster to the agent, and return its reply."""
        return self._client.request(method, timeout, cluster=self._cluster, **arguments)

    def reserve_ports(self, tasks: Sequence[TaskSpec], *, timeout: float = 30.0) -> dict[str, str]:
        addresses: dict[str, str] = self.request(
            "reserve_ports", timeout, tasks=[vars(task) for task in tasks]
        )
        return addresses

    def gpus(self, *, timeout: float = 30.0) -> list[GpuReport]:
        gpus = {"host": self.label or "localhost", **self.request("gpus", timeout)}
        return [cast(GpuReport, gpus)]

    @forwarded
    def release_ports(self, tasks: Sequence[str], *, timeout: float = 30.0) -> None:
        """Release the ports of tasks that have not started, and remove the tasks."""

    @forwarded
    def allow(self, networks: Sequence[str], *, timeout: float = 30.0) -> None:
        """Accept connections to the tasks from further networks."""

    @forwarded
    def check_reachability(
        self, addresses: Mapping[str, str], *, timeout: float = 30.0
    ) -> dict[str, tuple[str, str]]:
        """Return for each task why this host cannot reach it, and the host's source address.

        The reason is empty for a reachable task. The source address is empty if it is unknown.
        """

    @forwarded
    def listening_addresses(self, port: int) -> list[str]:
        """Return the addresses on which this host listens at `port`."""

    @forwarded
    def open_tunnels(self, authority: str, name: str) -> dict[str, Any]:
        """Accept peers of an authority, or return a signing request if no endpoint is open."""

    @forwarded
    def certify_tunnels(self, authority: str, name: str, certificate: str) -> dict[str, Any]:
        """Open this host's tunnel endpoint with a certificate signed by `authority`."""

    @forwarded
    def serve_tunnel(self, port: int) -> None:
        """Accept tunnels to `port` of this host."""

    @forwarded
    def forward_tunnel(self, port: int, address: str, name: str, authority: str) -> None:
        """Forward `port` of this host to the endpoint `name` at `address`."""

    @forwarded
    def close_tunnel(self, port: int) -> None:
        """Close the tunnel at `port` of this host."""

    def close(self, timeout: float = 10.0) -> None:
        self._end("close", timeout)

    def detach(self) -> None:
        self._end("detach", 5.0)

    def _end(self, method: str, timeout: float) -> None:
        if not self._client.is_forked:  # else the cluster belongs to the parent process
            try:
                if self._client.alive:
                    self._client.request(method, timeout, cluster=self._cluster)
            except TfdError:
                # The channel ended in the meantime, and with it every task.
                pass
            finally:
                self._client.listen(self._cluster, None)
        self._on_end()
