"""Context of a node, the second argument of the user's function."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import Any

from tfd_notebook.agent.rank_context import RankContext
from tfd_notebook.model.handle import Handle

#: Timeout in seconds for the node's supervisor and the Spark task to close the socket.
_RELEASE_SECONDS = 10.0


class TFNodeContext(RankContext, Handle):
    """The context of one node, the second argument of ``map_fun(args, ctx)``.

    Attributes
    ----------
    executor_id : int
        The node's number in the cluster, from 0; `worker_num` is the same.
    job_name : {"ps", "chief", "master", "evaluator", "worker"}
    task_index : int
        Index among the nodes of this role.
    cluster_spec : dict of str to list of str
        Addresses (``"host:port"``) of all nodes, by role.
    num_workers : int
        Number of nodes that receive rows: workers, and the chief or master.
    defaultFS : str
        Default file system for paths without a scheme, such as ``"hdfs://namenode:8020"``.
    working_dir : str
        Directory that relative paths start at.
    mgr
        The node's queues, which `get_data_feed` and ``TFNode.DataFeed`` read.
    tmp_socket : socket.socket or None
        The socket that reserves the node's port, with ``run(release_port=False)`` and until
        `release_port` is called. Otherwise None: the port is free.
    port : int
        The node's port, for TensorFlow's server.

    See Also
    --------
    tensorflowonspark.TFSparkNode.TFNodeContext
    """

    def __init__(
        self,
        executor_id: int = 0,
        job_name: str = "",
        task_index: int = 0,
        cluster_spec: Mapping[str, list[str]] | None = None,
        default_fs: str = "",
        working_dir: str = ".",
        mgr: Any = None,
        tmp_socket: socket.socket | None = None,
    ) -> None:
        super().__init__(executor_id, job_name, task_index, cluster_spec, default_fs, working_dir)
        self.mgr = mgr
        self.tmp_socket = tmp_socket
        if tmp_socket is not None:
            self.port = tmp_socket.getsockname()[1]

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the ``TFNode.DataFeed`` of this node.

        Parameters
        ----------
        train_mode : bool
            If true (default), rows are only consumed. Otherwise `batch_results` returns results.
        qname_in, qname_out : str
            Names of the queues.
        input_mapping : mapping of str to str, optional
            From column names, in the order of the rows, to names of tensors.
        """
        # Import time: it imports NumPy, which this module must not need in the fork server.
        from tfd_notebook.spark.TFNode import DataFeed

        return DataFeed(self.mgr, train_mode, qname_in, qname_out, input_mapping)

    def release_port(self) -> None:
        """Release the node's port, so that a server can listen on it.

        Only needed after ``run(release_port=False)``. Returns when the port is free.
        """
        if self.tmp_socket is not None:
            self.tmp_socket.close()
            self.tmp_socket = None
            _await_free(self.port)


def _await_free(port: int) -> None:
    """Wait until the processes that started the node have closed their copies of its socket.

    If another program takes the port meanwhile, the user's server fails with the error.
    """
    deadline = time.monotonic() + _RELEASE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return
        time.sleep(0.01)
