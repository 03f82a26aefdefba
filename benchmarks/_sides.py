"""Child process for one side of a comparison. A process can use one cluster at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class Side:
    """A process that runs the file of a benchmark with ``--child KIND``.

    It prints ``ready``, and then one line of numbers for each line that it reads.
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
        self._requests, self._answers = self._process.stdin, self._process.stdout
        if self._answers.readline().strip() != "ready":
            sys.exit(f"the side {kind} did not start")

    def request(self, request: str = "") -> list[float]:
        """Send a line and return the numbers of the answer."""
        self._requests.write(f"{request}\n")
        self._requests.flush()
        return [float(number) for number in self._answers.readline().split()]

    def close(self) -> None:
        self._requests.close()
        self._process.wait(30)
