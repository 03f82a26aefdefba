"""Repeat a command, and report which runs and which tests failed.

Each third run has two other processes that keep the cores busy. ``make flaky N=12`` repeats the
tests of ``make test``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_BUSY = [sys.executable, "-c", "while True: pass"]


def main(count: str, *command: str) -> int:
    rows = [run(number, command) for number in range(1, int(count) + 1)]
    print("\n| run | other processes | seconds | result |\n|---|---|---|---|")
    for row in rows:
        print("|", " | ".join(row), "|")
    failures = sum(row[-1] != "passed" for row in rows)
    print(f"\n{len(rows) - failures} passed, {failures} failed")
    return bool(failures)


def run(number: int, command: Sequence[str]) -> tuple[str, str, str, str]:
    """Run `command`; return the number, the other processes, the seconds and the result."""
    others = [subprocess.Popen(_BUSY) for _ in range(0 if number % 3 else 2)]
    began = time.monotonic()
    try:
        completed = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    finally:
        for process in others:
            process.kill()
            process.wait()
    seconds = time.monotonic() - began
    if completed.returncode:
        print(completed.stdout, flush=True)
    failed = sorted(set(_FAILED.findall(completed.stdout)))
    result = "passed" if not completed.returncode else ", ".join(failed) or "failed"
    row = (str(number), str(len(others) or "-"), f"{seconds:.0f}", result)
    print(*row, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
