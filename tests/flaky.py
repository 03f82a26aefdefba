"""Repeat a command, and report which runs and which tests failed.

Each third run has two other processes that keep the cores busy. ``make flaky N=12`` repeats the
tests of ``make test``.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_BUSY = [sys.executable, "-c", "while True: pass"]


def main(count: str, *command: str) -> int:
    rows = []
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(1, int(count) + 1):
            rows.append(run(number, command))
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
    with tempfile.TemporaryFile("w+") as file:  # a process that stays behind may keep it open
        try:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
        finally:
            for process in others:
                process.kill()
                process.wait()
        file.seek(0)
        output = file.read()
    seconds = time.monotonic() - began
    if status:
        print(output, flush=True)
    failed = sorted(set(_FAILED.findall(output)))
    result = "passed" if not status else ", ".join(failed) or "failed"
    row = (str(number), str(len(others) or "-"), f"{seconds:.0f}", result)
    print(*row, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
