"""Context of a process that runs the user's function for one worker."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from tfd_notebook.errors import Unsupported
from tfd_notebook.net.hadoop_paths import hdfs_path


class RankContext:
    """The argument ``ctx`` of a function that `Cluster.run` calls for each training worker.

    Attributes
    ----------
    executor_id : int
        The rank, which is the number of the process, from 0. `worker_num` is the same.
    job_name : str
        The role of the process, such as ``"worker"``.
    task_index : int
        Index among the processes of this role.
    cluster_spec : dict of str to list of str
        Addresses (``"host:port"``) of all processes, by role.
    num_workers : int
        Number of processes that train: workers, and the chief or master.
    defaultFS : str
        Default file system for paths without a scheme, such as ``"hdfs://namenode:8020"``.
    working_dir : str
        Directory that relative paths start at.
    port : int
        The port of the process in `cluster_spec`, for TensorFlow's server. 0 without one.
    mgr, tmp_socket : None
        Only nodes on Spark have queues, or a socket that the function must close.

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
        default_fs: str = "file:" + "//",
        working_dir: str = ".",
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
        self.mgr: Any = None
        self.tmp_socket: socket.socket | None = None
        addresses = self.cluster_spec.get(job_name, [])[task_index:]
        self.port = int(addresses[0].rpartition(":")[2]) if addresses else 0

    def absolute_path(self, path: str) -> str:
        """Return `path` with scheme and directory. It is relative to `working_dir`."""
        return hdfs_path(self, path)

    def get_data_feed(self, *args: Any, **options: Any) -> Any:
        """Raise `Unsupported`: only Spark feeds rows to a function."""
        raise no_rows()

    def release_port(self) -> None:
        """Do nothing: TensorFlow's server shares `port` with the socket that reserves it."""


def no_rows() -> Unsupported:
    """Return the error of a function that reads rows without Spark."""
    return Unsupported(
        "cluster.run feeds no rows to the function",
        fix="read files in it, or a dataset with cluster.distribute(...)",
    )
