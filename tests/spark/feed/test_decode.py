"""Reuse of large buffers by the C library on Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_memory_of_large_rows_is_reused() -> None:
    code = """
import resource, sys
from tfd_notebook.spark.feed import decode
if sys.argv[1] == "reuse":
    assert decode.reuse_large_buffers()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    rows = [bytes([1]) * 150_000 for _ in range(50)]
    del rows
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    root = Path(__file__).parents[3]

    def page_faults(mode: str) -> int:
        completed = subprocess.run(
            [sys.executable, "-c", code, mode],
            env=dict(os.environ, PYTHONPATH=str(root)),
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return int(completed.stdout)

    assert page_faults("reuse") < page_faults("default") / 5
