"""TensorFlow's own tests of fault tolerance: what passes on its coordinator passes on ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fault_tolerance")
#: TensorFlow has twenty; fewer would mean that they were not found or not run.
FEWEST = 15
_temporary: list[str] = []


def start(which: str, log: Path, tests: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    # Sockets lie in it, whose names may not be long.
    temporary = tempfile.mkdtemp(prefix="ft-")
    _temporary.append(temporary)
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *(f"FaultTolerance.{test}" for test in tests)],
            env=dict(os.environ, PATH=path, TFD_COORDINATOR=which, TMPDIR=temporary),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    finally:
        process.kill()
        process.wait()


def _clean_up() -> None:
    while _temporary:
        shutil.rmtree(_temporary.pop(), ignore_errors=True)


def verdicts(log: Path) -> dict[str, str]:
    found = re.findall(
        r"^\[ +(OK|FAILED|SKIPPED) \] FaultTolerance\.(\w+)", log.read_text(), re.MULTILINE
    )
    return {test: verdict for verdict, test in found if test != "test_session"}


@pytest.mark.timeout(1_200)
def test_what_passes_on_tensorflows_coordinator_passes_on_ours(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(_clean_up)
    logs = {which: tmp_path / f"{which}.log" for which in ("tensorflow", "ours")}
    # Beside each other: most of the time they wait.
    running = [start(which, log) for which, log in logs.items()]
    for process in running:
        end(process, 600)
    theirs, ours = (verdicts(log) for log in logs.values())
    passed = {test for test, verdict in theirs.items() if verdict == "OK"}
    assert len(passed) >= FEWEST, logs["tensorflow"].read_text()[-4_000:]
    failed = {test for test in passed if ours.get(test) != "OK"}
    if failed:
        # They have time limits of their own, which a busy machine misses with either coordinator.
        again = tmp_path / "again.log"
        end(start("ours", again, sorted(failed)), 300)
        ours |= verdicts(again)
    assert {test for test in passed if ours.get(test) != "OK"} == set()
