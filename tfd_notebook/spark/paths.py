"""Paths as executors see them."""

from __future__ import annotations

import os
from typing import Any

from tfd_notebook._compat import spark_context
from tfd_notebook.errors import Unsupported, UsageError


def located(sc: Any, path: str) -> str:
    """Return where a path is for all executors: under Spark's default file system.

    Parameters
    ----------
    sc : pyspark.SparkContext
    path : str
        A relative one counts from the directory of this process, or from the user's home where the
        default file system is no local one.
    """
    path = str(path)
    if not path:
        raise UsageError("the directory has no name")
    if path.startswith("file:"):
        return "/" + path.removeprefix("file:").lstrip("/")
    if "://" in path:
        return path
    root = spark_context.default_fs(sc)
    if root.startswith("file:"):
        return os.path.abspath(path)
    home = "" if path.startswith("/") else f"/user/{sc.sparkUser()}/"
    return f"{without_path(root)}{home}{path}"


def without_path(root: str) -> str:
    """Return the root of a file system, such as ``hdfs:///``, without the slashes of its path."""
    scheme, separator, rest = root.partition("://")
    return scheme + separator + rest.rstrip("/")


class understood:  # noqa: N801 - it reads as a word
    """Turns TensorFlow's word for a file system that it does not know into an error that helps."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and type(error).__name__ == "UnimplementedError":
            raise Unsupported(
                f"this TensorFlow does not know the file system of {self._place}",
                fix="a directory that all hosts have mounted, or the package tensorflow-io "
                "here and on the executors",
            ) from None
