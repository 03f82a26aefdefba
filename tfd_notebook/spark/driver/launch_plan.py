"""What is launched as a node, and how: from a task of Spark, or beside the notebook."""

from __future__ import annotations

import base64
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfd_notebook.agent.bridges.spark_bootstrap import SECRETS
from tfd_notebook.net.secure_channel import Secret
from tfd_notebook.spark.driver import roles
from tfd_notebook.spark.driver.roles import Assignment
from tfd_notebook.spark.executor.executor import Executor
from tfd_notebook.spark.executor.fork_server import ForkServerClient


@dataclass(frozen=True)
class Plan:
    """All that the nodes of a cluster share; it travels in the closure of Spark's tasks.

    Parameters
    ----------
    cluster : int
        The cluster's id.
    nodes : tuple of Assignment
    driver : str
        Where the driver listens.
    secret : Secret
        What proves to driver and nodes that they belong to each other.
    closure : bytes
        The user's function and its arguments, pickled.
    input_mode : {"SPARK", "TENSORFLOW"}
    queues : tuple of str
    default_fs : str
    release_port : bool
    heartbeat_limit : float
        Seconds without a word of the driver's after which a node ends.
    tensorboard : str
        Directory that a TensorBoard shows; empty for none.
    environment : mapping
        Variables that nodes get beside those of their executor.
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
        """Whether Spark's task stays while the node lives, so that no rows come to its slot."""
        return not node.on_driver and (self.input_mode == "TENSORFLOW" or not node.is_fed)

    def shows_board(self, node: Assignment) -> bool:
        """Whether TensorBoard runs beside this node: the leader, or the first worker."""
        fed = [other for other in self.nodes if other.is_fed]
        return bool(self.tensorboard) and node == fed[0]


def environment_of(more: Mapping[str, str], gpus: tuple[str, ...] | None) -> dict[str, str]:
    """Return a node's environment: that of this process, what is `more`, and its GPUs.

    Without the secrets that Spark gave to this process alone.
    """
    mine = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
    found = {**mine, **more}
    if gpus is not None:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return found


def reservation(
    node: Assignment, place: Executor, address: str, gpus: tuple[str, ...] | None
) -> dict[str, Any]:
    """Return what a node tells the others and the driver of itself: JSON values."""
    return {
        "node": node.node,
        "address": address,
        "executor": place.id,
        "host": place.host,
        "jvm": place.pid,
        "gpu": ",".join(gpus or ()),
    }


def launch(
    plan: Plan,
    node: Assignment,
    place: Executor,
    zygote: ForkServerClient,
    environment: Mapping[str, str],
    held: socket.socket,
    addresses: Mapping[int, str],
) -> int:
    """Have a node forked; return the pid of its supervisor.

    Parameters
    ----------
    plan : Plan
    node : Assignment
    place : Executor
        Whose end is the node's.
    zygote : Zygote
    environment : mapping
    held : socket.socket
        Holds the node's port.
    addresses : mapping of int to str
        ``"host:port"`` of every node.
    """
    request = _request(plan, node, place, environment, addresses)
    return zygote.fork(request, [held.fileno(), 2])


def _request(
    plan: Plan,
    node: Assignment,
    place: Executor,
    environment: Mapping[str, str],
    addresses: Mapping[int, str],
) -> dict[str, Any]:
    """Return what `node.run` takes: JSON values."""
    spec = roles.cluster_spec(plan.nodes, addresses)
    config = roles.tf_config(spec, node.role, node.index)
    host = addresses[node.node].rpartition(":")[0]
    return {
        "cluster": plan.cluster,
        "node": node.node,
        "name": node.name,
        "role": node.role,
        "index": node.index,
        "host": host.strip("[]"),
        "jvm": [place.pid, place.started],
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
        "tensorboard": plan.tensorboard if plan.shows_board(node) else "",
    }


def networks(addresses: Iterable[str]) -> list[str]:
    """Return the hosts of these addresses, each as a network of itself."""
    found = set()
    for address in addresses:
        host, _, port = address.rpartition(":")
        for answer in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
            found.add(str(answer[4][0]).partition("%")[0])
    return sorted(found)
