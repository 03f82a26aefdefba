"""Paths of Hadoop's file systems, as TensorFlowOnSpark completes them."""

from __future__ import annotations

import getpass
from typing import Any

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


def without_path(root: str) -> str:
    """Return the root of a file system without trailing slashes, except those of ``hdfs://``."""
    scheme, separator, rest = root.partition("://")
    return scheme + separator + rest.rstrip("/")
