"""Private methods of the SparkContext."""

from __future__ import annotations

from typing import Any

from tfd_notebook._compat.pyspark import private_name


def default_fs(sc: Any) -> str:
    """Return the file system of paths without a scheme, such as ``hdfs://namenode:8020``."""
    with private_name("SparkContext.hadoopConfiguration"):
        found = str(sc._jsc.hadoopConfiguration().get("fs.defaultFS") or "")
    # The slash belongs to the path.
    return found[:-1] if found.startswith("file:") and found.endswith("///") else found


def cancel_stage(sc: Any, stage: int, reason: str) -> None:
    """End the jobs that need a stage; who waits for them gets an error with `reason`."""
    with private_name("SparkContext.cancelStage"):
        sc._jsc.sc().cancelStage(stage, reason)


def cancel_group(sc: Any, group: str) -> None:
    """End the jobs of a group, those that are still to come among them."""
    with private_name("SparkContext.cancelJobGroupAndFutureJobs"):
        sc._jsc.sc().cancelJobGroupAndFutureJobs(group)
