"""Launch of a node from a Spark task or on the driver's host: plan, environment and request."""

from __future__ import annotations

import base64
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tfd_notebook.agent.bridges.spark_bootstrap import SECRETS
from tfd_notebook.net.secure_channel import Secret
from tfd_notebook.spark import roles
from tfd_notebook.spark.executor import fork_server
from tfd_notebook.spark.executor.executor import Executor
from tfd_notebook.spark.roles import Assignment


@dataclass(frozen=True)
class Plan:
    """Settings shared by all nodes of a cluster, sent in the closure of Spark's tasks.

    Parameters
    ----------
    cluster : int
        The cluster's id.
    nodes : tuple of Assignment
    driver : str
        Address of the driver.
    secret : Secret
        Authenticates the driver and the nodes to each other.
    closure : bytes
        The user's function and its arguments, pickled.
    input_mode : {"SPARK", "TENSORFLOW"}
    queues : tuple of str
    default_fs : str
    release_port : bool
    heartbeat_limit : float
        Seconds without a message from the driver after which a node ends.
    tensorboard : str
        Directory for a TensorBoard; empty for none.
    environment : mapping
        Variables in addition to those of the executor.
    """

    cluster: int
    nodes: tuple[Assignment, ...]
    driver: str
    secret: Secret
    closure: bytes = field(repr=False)
    input_mode: str
    queues: tuple[str, ...]
    default_fs: str
    release_port: bool
    heartbeat_limit: float
    tensorboard: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def holds_slot(self, node: Assignment) -> bool:
        """Return True if the Spark task of a node lasts as long as the node.

        Its slot then receives no rows.
        """
        return not node.on_driver and (self.input_mode == "TENSORFLOW" or not node.is_fed)

    def runs_tensorboard(self, node: Assignment) -> bool:
        """Return True if TensorBoard runs next to this node: the leader, or the first worker."""
        fed = [other for other in self.nodes if other.is_fed]
        return bool(self.tensorboard) and node == fed[0]


def node_environment(extra: Mapping[str, str], gpus: tuple[str, ...] | None) -> dict[str, str]:
    """Return a node's environment: that of this process, with `extra` and its GPUs.

    Secrets that Spark gave to this process are removed.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
    environment = {**inherited, **extra}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment


def launch(
    plan: Plan,
    node: Assignment,
    owner: Executor,
    environment: Mapping[str, str],
    reserved_port: socket.socket,
    addresses: Mapping[int, str],
) -> int:
    """Fork a node; return the pid of its supervisor.

    Parameters
    ----------
    plan : Plan
    node : Assignment
    owner : Executor
        The node ends with this process.
    environment : mapping
    reserved_port : socket.socket
        Reserves the node's port.
    addresses : mapping of int to str
        ``"host:port"`` of every node.
    """
    spec = roles.cluster_spec(plan.nodes, addresses)
    config = roles.tf_config(spec, node.role, node.index)
    host = addresses[node.node].rpartition(":")[0]
    request = {
        "cluster": plan.cluster,
        "node": node.node,
        "name": node.name,
        "role": node.role,
        "index": node.index,
        "host": host.strip("[]"),
        "jvm": [owner.pid, owner.started],
        "driver": plan.driver,
        "secret": base64.b64encode(plan.secret).decode(),
        "closure": base64.b64encode(plan.closure).decode(),
        "heartbeat_limit": plan.heartbeat_limit,
        "input_mode": plan.input_mode,
        "queues": list(plan.queues),
        "default_fs": plan.default_fs,
        "release_port": plan.release_port,
        "spec": spec,
        "peers": networks([*addresses.values(), plan.driver]),
        "environment": {**environment, "TF_CONFIG": config},
        "directory": os.getcwd(),
        "path": [os.path.abspath(entry) for entry in sys.path],
        "tensorboard": plan.tensorboard if plan.runs_tensorboard(node) else "",
    }
    return fork_server.fork(owner, environment, request, [reserved_port.fileno(), 2])


def networks(addresses: Iterable[str]) -> list[str]:
    """Return the hosts of the addresses, each as a network with one address."""
    hosts = set()
    for address in addresses:
        host, _, port = address.rpartition(":")
        for answer in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
            hosts.add(str(answer[4][0]).partition("%")[0])
    return sorted(hosts)
