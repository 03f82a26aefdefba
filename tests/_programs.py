"""Python programs in separate processes, which print a line when they are ready."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def program(code: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `code`, yield its process and the first line of its output, and wait for its end."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process, process.stdout.readline()
        except BaseException:
            process.kill()
            raise
