"""The sum of the inputs of ``make fuzz``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECEIVERS = """
import pytest

@pytest.mark.parametrize("count", [3, 4, 5])
def test_receiver(count, record_property):
    record_property("inputs", count)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "line", "status"),
    [(12, "3 receivers: 12 inputs\n", 0), (13, "3 receivers: 12 inputs, fewer than 13\n", 1)],
)
def test_inputs_of_all_processes_are_added(
    tmp_path: Path, asked: int, line: str, status: int
) -> None:
    (tmp_path / "test_receivers.py").write_text(RECEIVERS)
    options = ("-p", "tests._fuzz_total", "-p", "no:nbval", "-p", "no:cacheprovider", "-n", "2")
    completed = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            "-c",
            os.devnull,
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        cwd=ROOT,
        env={**os.environ, "TFD_TEST_INPUTS": str(asked)},
        capture_output=True,
        text=True,
    )
    assert line in completed.stdout, completed.stdout + completed.stderr
    assert completed.returncode == status
