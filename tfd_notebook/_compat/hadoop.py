"""What pyspark knows and does not say in public."""

from __future__ import annotations

from typing import Any


def default_fs(sc: Any) -> str:
    """Return the file system of paths without a scheme, such as ``hdfs://namenode:8020``."""
    found = str(sc._jsc.hadoopConfiguration().get("fs.defaultFS") or "")
    # The slash belongs to the path.
    return found[:-1] if found.startswith("file:") and found.endswith("///") else found
