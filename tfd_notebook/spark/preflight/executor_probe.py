"""Probe that runs on an executor.

Its source is sent to the executor and only imports the standard library.
"""

from __future__ import annotations

import glob
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def executor_probe(
    host: str, port: int, seconds: float
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return the function of a task that inspects its executor.

    It tests the connection to this process at ``host:port`` with a timeout of `seconds`.
    """

    def probe(_: Iterable[Any]) -> Iterator[dict[str, Any]]:
        yield {
            "host": socket.gethostname(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "package": version("tfd-notebook"),
            "tensorflow": tensorflow(),
            "free_bytes": shutil.disk_usage(os.getcwd()).free,
            "unreachable": reach(),
            "gpus": len(glob.glob("/dev/nvidia[0-9]*")),
        }

    def version(name: str) -> str | None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(name)
        except PackageNotFoundError:
            return None

    def tensorflow() -> str | None:
        import importlib.util

        for name in ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos"):
            if installed := version(name):
                return installed
        return "unknown" if importlib.util.find_spec("tensorflow") else None

    def reach() -> str:
        try:
            socket.create_connection((host, port), seconds).close()
        except OSError as error:
            return str(error)
        return ""

    return probe
