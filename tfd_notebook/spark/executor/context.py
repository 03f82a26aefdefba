"""What the user's function is given beside its arguments."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import Any

#: Seconds for the supervisor of a node and the task of Spark to close the socket.
_RELEASE_SECONDS = 10.0


class TFNodeContext:
    """One node, as the user's function sees it: the second argument of ``map_fun(args, ctx)``.

    Attributes
    ----------
    executor_id : int
        The node's number in the cluster, 0 or more; `worker_num` is the same.
    job_name : {"ps", "chief", "master", "evaluator", "worker"}
    task_index : int
        Among the nodes of that name.
    cluster_spec : dict of str to list of str
        Addresses (``"host:port"``) of all nodes, by name.
    num_workers : int
        How many take rows: workers, and the chief or master.
    defaultFS : str
        File system of paths without a scheme, such as ``"hdfs://namenode:8020"``.
    working_dir : str
        Where relative paths begin.
    mgr
        The node's queues; `get_data_feed` and ``TFNode.DataFeed`` read them.
    tmp_socket : socket.socket or None
        Holds the node's port, with ``run(release_port=False)`` and until `release_port` is called.
        None else: the port is free.
    port : int
        The node's port, where TensorFlow's server is to listen.

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
        self.executor_id = self.worker_num = executor_id
        self.job_name = job_name
        self.task_index = task_index
        self.cluster_spec = dict(cluster_spec or {})
        self.num_workers = sum(
            len(nodes) for job, nodes in self.cluster_spec.items() if job not in ("ps", "evaluator")
        )
        self.defaultFS = default_fs
        self.working_dir = working_dir
        self.mgr = mgr
        self.tmp_socket = tmp_socket
        self.port: int = tmp_socket.getsockname()[1] if tmp_socket is not None else 0

    def absolute_path(self, path: str) -> str:
        """Return `path` with scheme and directory: relative to `working_dir` on `defaultFS`."""
        from tfd_notebook.spark.TFNode import hdfs_path

        return hdfs_path(self, path)

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
            Whether rows are only taken (default), or answered with `batch_results`.
        qname_in, qname_out : str
            Names of the queues.
        input_mapping : mapping of str to str, optional
            Name of each column, in the rows' order, to that of the tensor made of it.
        """
        from tfd_notebook.spark.TFNode import DataFeed

        return DataFeed(self.mgr, train_mode, qname_in, qname_out, input_mapping)

    def release_port(self) -> None:
        """Release the node's port, so that a server can listen there.

        Needed after ``run(release_port=False)`` only. Returns when the port is free.
        """
        if self.tmp_socket is not None:
            self.tmp_socket.close()
            self.tmp_socket = None
            _await_free(self.port)


def _await_free(port: int) -> None:
    """Wait until the processes that started the node have closed their copies of its socket.

    A port that another program has taken is left to the server that cannot listen there.
    """
    deadline = time.monotonic() + _RELEASE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return
        time.sleep(0.01)
