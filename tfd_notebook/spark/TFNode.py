"""What a user's function calls inside a node. Follows ``tensorflowonspark.TFNode``."""

from __future__ import annotations

import getpass
from typing import Any, NoReturn

from tfd_notebook.errors import Unsupported
from tfd_notebook.spark.feed.datafeed import DataFeed

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
        With a scheme: returned as it is. Absolute: below the default file system. Relative: below
        the working directory where that is of the host, below the user's directory else.

    Returns
    -------
    str
    """
    scheme = path.partition(":")[0]
    if "://" in path and scheme.rstrip("s") in {name.rstrip("s") for name in _SCHEMES}:
        return path
    root = ctx.defaultFS.rstrip("/")
    if root in ("file:", "file"):
        root = "file:" + "//"
    if path.startswith("/"):
        return f"{root}{path}"
    if root.startswith("file:"):
        return f"{root}{'/' if not ctx.working_dir.startswith('/') else ''}{ctx.working_dir}/{path}"
    return f"{root}/user/{getpass.getuser()}/{path}"


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
