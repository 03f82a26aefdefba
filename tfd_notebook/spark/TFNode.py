"""Helpers for the user's function inside a node. Follows ``tensorflowonspark.TFNode``."""

from __future__ import annotations

import getpass
from typing import Any, NoReturn

from tfd_notebook.errors import Unsupported
from tfd_notebook.spark.feed.datafeed import DataFeed
from tfd_notebook.spark.tfrecords import without_path

__all__ = ["DataFeed", "hdfs_path", "start_cluster_server"]

#: Schemes of Hadoop's file systems. A path that starts with one is complete.
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
    """Return `path` with a scheme, for Hadoop's and TensorFlow's file systems.

    Parameters
    ----------
    ctx : object
        The node's context, with ``defaultFS`` and ``working_dir``.
    path : str
        With a scheme: returned unchanged. Absolute: appended to the default file system. Relative:
        on a local file system, below the working directory. On ``hdfs`` and ``viewfs``, below the
        user's directory. On any other, below the root.

    Returns
    -------
    str
        For example ``"hdfs:///data"`` if the default file system names no host.
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
    """Raise `Unsupported`: it started servers for sessions of TensorFlow 1, which are removed.

    Raises
    ------
    Unsupported
        Always.
    """
    raise Unsupported(
        "TFNode.start_cluster_server started a server for sessions of TensorFlow 1",
        fix="create a tf.distribute strategy in the function; TF_CONFIG is set",
    )
