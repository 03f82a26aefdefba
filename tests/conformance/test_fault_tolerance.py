"""TensorFlow's tests of fault tolerance, with its coordinator and with the package's."""

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
#: TensorFlow has 20 tests. A smaller number means that tests were not found or not run.
FEWEST = 15
#: Timeout of one test, which starts and kills processes, on a busy machine, in seconds.
EACH_SECONDS = 120


def _names() -> list[str]:
    spec = find_spec("tensorflow.python.distribute.coordinator.fault_tolerance_test_base")
    assert spec is not None
    assert spec.origin is not None
    result = re.findall(r"^  def (test\w+)\(self", Path(spec.origin).read_text(), re.MULTILINE)
    return sorted(set(result))  # the order of unittest


NAMES = _names()


class Run:
    """TensorFlow's tests, or the selected ones, in a separate process."""

    def __init__(self, which: str, log: Path, tests: Sequence[str] = ()) -> None:
        self.log = log
        # It contains sockets, whose paths have a maximum length.
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
        """Wait for the outcome of a test; empty after the timeout."""
        results: list[str] = []

        def is_known() -> bool:
            ended = self._process.poll() is not None
            # Not always at the start of a line, because other processes also write to the stream.
            pattern = rf"\[ +(OK|FAILED|SKIPPED) +\] FaultTolerance\.{test}\b"
            results[:] = re.findall(pattern, self.log.read_text(errors="replace"))
            return bool(results) or ended

        try:
            until(is_known, EACH_SECONDS)
        except AssertionError:
            self.end()  # later tests would not finish either
        return results[0] if results else ""

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    logs = tmp_path_factory.mktemp("fault-tolerance")
    # Concurrently, because the tests mostly wait.
    started = {which: Run(which, logs / f"{which}.log") for which in ("tensorflow", "ours")}
    yield started
    for run in started.values():
        run.end()


@pytest.mark.timeout(235)
@pytest.mark.parametrize("test", NAMES)
def test_tensorflows_tests_pass_on_both_coordinators(
    runs: dict[str, Run], test: str, tmp_path: Path
) -> None:
    if runs["tensorflow"].verdict(test) != "OK" or runs["ours"].verdict(test) == "OK":
        return
    # A busy machine exceeds the timeouts of TensorFlow's tests, with either coordinator.
    again = Run("ours", tmp_path / "again.log", [test])
    try:
        assert again.verdict(test) == "OK", again.log.read_text()[-4_000:]
    finally:
        again.end()


def test_enough_tests_pass_on_tensorflows_coordinator(runs: dict[str, Run]) -> None:
    passed = [test for test in NAMES if runs["tensorflow"].verdict(test) == "OK"]
    assert len(passed) >= FEWEST, runs["tensorflow"].log.read_text()[-4_000:]
