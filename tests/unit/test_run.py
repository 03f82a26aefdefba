"""The test runner repeats failed tests once in a new process. A second failure is final."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

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

FAILS = """
def test_fails():
    assert False
"""
INTERRUPTED = """
import signal, subprocess, sys

def test_sigint_is_not_ignored_here_nor_in_a_child():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"True\\n"
"""
#: As shells start a program in the background.
IGNORING = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")


def run(directory: Path, source: str, prefix: Sequence[str] = ()) -> CompletedProcess[str]:
    (directory / "test_it.py").write_text(source)
    return subprocess.run(
        [*prefix, sys.executable, str(RUN), "--rootdir", str(directory), "test_it.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_test_that_passes_the_second_time_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, ONCE)
    assert done.returncode == 0, done.stdout
    assert "1 failed, 1 passed" in done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("PASSED ONLY IN A SECOND RUN")
    assert "test_the_second_time" in last


def test_second_failures_are_distinguished_from_passes(tmp_path: Path) -> None:
    done = run(tmp_path, ONCE + FAILS)
    assert done.returncode == 1, done.stdout
    *_, once, twice = (line for line in done.stdout.splitlines() if line)
    assert once == "PASSED ONLY IN A SECOND RUN, to fix: test_it.py::test_the_second_time"
    assert twice == "failed twice: test_it.py::test_fails"


def test_interrupted_second_run_clears_nothing(tmp_path: Path) -> None:
    cut = ONCE.replace("assert before", "assert before and __import__('os')._exit(3)")
    done = run(tmp_path, cut)
    assert done.returncode == 3, done.stdout
    assert done.stdout.splitlines()[-1] == "failed twice: test_it.py::test_the_second_time"


def test_tests_receive_sigint_if_the_caller_ignores_it(tmp_path: Path) -> None:
    done = run(tmp_path, INTERRUPTED, IGNORING)
    assert done.returncode == 0, done.stdout


def test_tests_without_the_runner_receive_sigint() -> None:
    tests = Path(__file__).with_name("test_interrupt.py")
    completed = subprocess.run(
        [*IGNORING, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=RUN.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout


@pytest.mark.parametrize(
    ("source", "status", "message"),
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
def test_passes_and_final_failures_are_counted(
    tmp_path: Path, source: str, status: int, message: str
) -> None:
    done = run(tmp_path, source)
    assert done.returncode == status, done.stdout
    assert message in done.stdout.replace("\n", " ")
    assert ("Once more" in done.stdout) == ("twice" in message)
