"""TensorFlow's tests of fault tolerance on the package's coordinator."""

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
#: These fail after the others in the same process, also on TensorFlow's own coordinator.
ALONE = ("testClusterCoordinatorDestroyed", "testPSPreemptionErrorType")


class Run:
    """Some of TensorFlow's tests in a separate process."""

    def __init__(self, log: Path, tests: Sequence[str]) -> None:
        self.log = log
        # It contains sockets, whose paths have a maximum length.
        self._temporary = tempfile.mkdtemp(prefix="ft-")
        path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *(f"FaultTolerance.{test}" for test in tests)],
                env=dict(os.environ, PATH=path, PYTHONPATH=os.getcwd(), TMPDIR=self._temporary),
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
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    together = [name for name in NAMES if name not in ALONE]
    run = Run(tmp_path_factory.mktemp("fault-tolerance") / "run.log", together)
    yield run
    run.end()


@pytest.mark.timeout(235)
@pytest.mark.parametrize("test", [name for name in NAMES if name not in ALONE])
def test_tensorflows_test_passes(run: Run, test: str) -> None:
    assert run.verdict(test) == "OK", run.log.read_text()[-4_000:]


@pytest.mark.parametrize("test", ALONE)
def test_tensorflows_test_passes_alone(test: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run.log", [test])
    try:
        assert run.verdict(test) == "OK", run.log.read_text()[-4_000:]
    finally:
        run.end()


def test_tensorflows_tests_are_found() -> None:
    assert len(NAMES) >= FEWEST
    assert set(ALONE) <= set(NAMES)
