"""What failed once is run once more in a process of its own; what fails twice has failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "run.py"
ONCE = """
import pathlib
seen = pathlib.Path(__file__).with_suffix(".seen")

def test_passes():
    pass

def test_the_second_time():
    before = seen.exists()
    seen.touch()
    assert before
"""


def run(directory: Path, source: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_it.py").write_text(source)
    return subprocess.run(
        [sys.executable, str(RUN), "--rootdir", str(directory), "test_it.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_passes_the_second_time_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, ONCE)
    assert done.returncode == 0, done.stdout
    assert "1 failed, 1 passed" in done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("PASSED ONLY IN A SECOND RUN")
    assert "test_the_second_time" in last


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("def test_ok():\n    pass\n", 0, "1 passed"),
        ("def test_no():\n    assert False\n", 1, "failed twice: test_it.py::test_no"),
        (
            "import pytest\n@pytest.mark.parametrize('i', range(4))\n"
            "def test_no(i):\n    assert False\n",
            1,
            "4 failed",
        ),
        ("nonsense(", 2, "1 error"),
    ],
)
def test_what_passes_and_what_fails_for_good(
    tmp_path: Path, source: str, status: int, said: str
) -> None:
    done = run(tmp_path, source)
    assert done.returncode == status, done.stdout
    assert said in done.stdout.replace("\n", " ")
    assert ("Once more" in done.stdout) == ("twice" in said)
