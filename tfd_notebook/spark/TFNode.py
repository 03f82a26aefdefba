"""What a user's function calls inside a node. Follows ``tensorflowonspark.TFNode``."""

from __future__ import annotations

import getpass
from typing import Any, NoReturn

from tfd_notebook.errors import Unsupported
from tfd_notebook.spark.feed.datafeed import DataFeed
from tfd_notebook.spark.tfrecords import without_path

__all__ = ["DataFeed", "hdfs_path", "start_cluster_server"]

#: What begins a path that is complete as it is: schemes of Hadoop's file systems.
_SCHEMES = (
    "adl",
    "file",
    "gs",
    "hdfs",
    "oss",
    "s3",
    "s3a",
    "s3n",
    "swift",
    "viewfs",
    "wasb",
    "abfs",
)


def hdfs_path(ctx: Any, path: str) -> str:
    """Return `path` with a scheme, for Hadoop's file systems and for TensorFlow's.

    Parameters
    ----------
    ctx : object
        The node's context: ``defaultFS`` and ``working_dir`` are read.
    path : str
        With a scheme: returned as it is. Absolute: appended to the default file system. Relative:
        below the working directory of a local file system, below the user's directory of ``hdfs``
        and ``viewfs``, and below the root of any other.

    Returns
    -------
    str
        Such as ``"hdfs:///data"`` where the default file system names no host.
    """
    scheme = path.partition(":")[0]
    if "://" in path and scheme.rstrip("s") in {name.rstrip("s") for name in _SCHEMES}:
        return path
    root = "file:" + "//" if ctx.defaultFS.startswith("file") else without_path(ctx.defaultFS)
    if path.startswith("/"):
        return f"{root}{path}"
    if root.startswith("file:"):
        return f"{root}{'/' if not ctx.working_dir.startswith('/') else ''}{ctx.working_dir}/{path}"
    if root.startswith(("hdfs:", "viewfs:")):
        return f"{root}/user/{getpass.getuser()}/{path}"
    return f"{root}/{path}"


def start_cluster_server(*_: Any, **__: Any) -> NoReturn:
    """Refuse: sessions of TensorFlow 1, which this started servers for, are gone.

    Raises
    ------
    Unsupported
        Always.
    """
    raise Unsupported(
        "TFNode.start_cluster_server started a server for sessions of TensorFlow 1",
        fix="make a tf.distribute strategy in the function instead: TF_CONFIG is set",
    )
