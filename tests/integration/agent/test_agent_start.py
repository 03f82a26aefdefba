"""A slow start of an agent delays only the calls that need the agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

#: Python runs this when it starts. An agent waits until the test opens the gate.
SITE = """
import os
if "TFD_AGENT_DIR" in os.environ:
    open(os.environ["TFD_TEST_GATE"]).close()
"""

PROGRAM = """
import os, sys, threading
from tfd_notebook.errors import LaunchError
from tfd_notebook.launchers import local

def start():
    try:
        local._agent()
        print("started", flush=True)
    except LaunchError as error:
        print(error.what, flush=True)

def run(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        print("the call waits for the agent", flush=True)
        os._exit(1)

starting = threading.Thread(target=start, daemon=True)
starting.start()
run(local.agent_pids)
print("pids", flush=True)
{then}
"""

SHUT_DOWN = """
run(local.shutdown)
starting.join()
"""
OPEN_GATE = """
with open(os.environ["TFD_TEST_GATE"], "w"):
    pass
starting.join()
assert local.agent_pids()
run(local.shutdown)
"""


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (SHUT_DOWN, ["pids", "the agent was shut down during its start"]),
        (OPEN_GATE, ["pids", "started"]),
    ],
    ids=["shutdown", "start"],
)
def test_other_calls_do_not_wait_for_a_starting_agent(
    tmp_path: Path, then: str, expected: list[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    os.mkfifo(tmp_path / "gate")
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(then=then)],
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "TFD_TEST_GATE": str(tmp_path / "gate"),
        },
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert completed.stdout.splitlines() == expected, completed.stderr
    assert completed.returncode == 0, completed.stderr
