"""A side of a comparison in a process of its own, which can only use one cluster at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class Side:
    """A process that runs a benchmark's file with ``--child KIND``, and answers line by line.

    It says ``ready`` first.
    """

    def __init__(self, file: str, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, file, "--child", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(file).parent.parent,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asking, self._answers = self._process.stdin, self._process.stdout
        if self._answers.readline().strip() != "ready":
            sys.exit(f"the side {kind} did not start")

    def ask(self, words: str = "") -> list[float]:
        """Send a line and return the numbers of the answer."""
        self._asking.write(f"{words}\n")
        self._asking.flush()
        return [float(number) for number in self._answers.readline().split()]

    def close(self) -> None:
        self._asking.close()
        self._process.wait(30)
