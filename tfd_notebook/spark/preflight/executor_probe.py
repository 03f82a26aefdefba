"""What an executor says of itself. It is sent there as it stands, and imports Python's own only."""

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
    """Return what a task runs to tell of its executor; the address is this process's."""

    def look(_: Iterable[Any]) -> Iterator[dict[str, Any]]:
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
            if found := version(name):
                return found
        return "unknown" if importlib.util.find_spec("tensorflow") else None

    def reach() -> str:
        try:
            socket.create_connection((host, port), seconds).close()
        except OSError as error:
            return str(error)
        return ""

    return look
