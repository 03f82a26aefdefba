"""Helpers for the user's function inside a node. Follows ``tensorflowonspark.TFNode``."""

from __future__ import annotations

from typing import Any, NoReturn

from tfd_notebook.errors import Unsupported
from tfd_notebook.net.hadoop_paths import hdfs_path
from tfd_notebook.spark.feed.datafeed import DataFeed

__all__ = ["DataFeed", "hdfs_path", "start_cluster_server"]


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
