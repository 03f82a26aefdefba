"""Python programs in a process of their own, which say when they are there."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def program(code: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `code`; give its process and the first line that it says, and wait for its end."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process, process.stdout.readline()
        except BaseException:
            process.kill()
            raise
