"""The C library's way of keeping memory, on Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_memory_of_large_rows_is_reused() -> None:
    code = """
import resource, sys
from tfd_notebook.spark.feed import decode
if sys.argv[1] == "keep":
    assert decode.reuse_large_buffers()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    rows = [bytes([1]) * 150_000 for _ in range(50)]
    del rows
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    root = Path(__file__).parents[2]

    def faults(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", code, how],
            env=dict(os.environ, PYTHONPATH=str(root)),
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return int(done.stdout)

    assert faults("keep") < faults("not") / 5
