"""TensorFlow's own tests of fault tolerance: what passes on its coordinator passes on ours."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests._waiting import until

SCRIPT = Path(__file__).with_name("fault_tolerance")
#: TensorFlow has twenty; fewer would mean that they were not found or not run.
FEWEST = 15
#: Seconds for one of them, with processes that it starts and kills, on a machine that is busy.
EACH_SECONDS = 120


def _names() -> list[str]:
    spec = find_spec("tensorflow.python.distribute.coordinator.fault_tolerance_test_base")
    assert spec is not None
    assert spec.origin is not None
    found = re.findall(r"^  def (test\w+)\(self", Path(spec.origin).read_text(), re.MULTILINE)
    return sorted(set(found))  # the order in which unittest runs them


NAMES = _names()


class Run:
    """Some of TensorFlow's tests, running in processes of their own; all, unless some are named."""

    def __init__(self, which: str, log: Path, tests: Sequence[str] = ()) -> None:
        self.log = log
        # Sockets lie in it, whose names may not be long.
        self._temporary = tempfile.mkdtemp(prefix="ft-")
        path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *(f"FaultTolerance.{test}" for test in tests)],
                env=dict(os.environ, PATH=path, TFD_COORDINATOR=which, TMPDIR=self._temporary),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def verdict(self, test: str) -> str:
        """Wait for what became of a test, empty if that cannot be told in time."""
        found: list[str] = []

        def is_known() -> bool:
            ended = self._process.poll() is not None
            # Not always at the beginning of a line: other processes write, too.
            pattern = rf"\[ +(OK|FAILED|SKIPPED) +\] FaultTolerance\.{test}\b"
            found[:] = re.findall(pattern, self.log.read_text(errors="replace"))
            return bool(found) or ended

        try:
            until(is_known, EACH_SECONDS)
        except AssertionError:
            self.end()  # what comes after it has no chance either
        return found[0] if found else ""

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    logs = tmp_path_factory.mktemp("fault-tolerance")
    # Beside each other: most of the time they wait.
    started = {which: Run(which, logs / f"{which}.log") for which in ("tensorflow", "ours")}
    yield started
    for run in started.values():
        run.end()


@pytest.mark.timeout(235)
@pytest.mark.parametrize("test", NAMES)
def test_what_passes_on_tensorflows_coordinator_passes_on_ours(
    runs: dict[str, Run], test: str, tmp_path: Path
) -> None:
    if runs["tensorflow"].verdict(test) != "OK" or runs["ours"].verdict(test) == "OK":
        return
    # They have time limits of their own, which a busy machine misses with either coordinator.
    again = Run("ours", tmp_path / "again.log", [test])
    try:
        assert again.verdict(test) == "OK", again.log.read_text()[-4_000:]
    finally:
        again.end()


def test_enough_of_them_pass_on_tensorflows(runs: dict[str, Run]) -> None:
    passed = [test for test in NAMES if runs["tensorflow"].verdict(test) == "OK"]
    assert len(passed) >= FEWEST, runs["tensorflow"].log.read_text()[-4_000:]
