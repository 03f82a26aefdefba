"""A slow start of an agent delays only the calls that need the agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

#: Run by Python when it starts: an agent waits until the test releases it.
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

def do(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        print("it waits for the agent", flush=True)
        os._exit(1)

starting = threading.Thread(target=start, daemon=True)
starting.start()
do(local.agent_pids)
print("pids", flush=True)
{then}
"""

SHUT_DOWN = """
do(local.shutdown)
starting.join()
"""
GO_ON = """
with open(os.environ["TFD_TEST_GATE"], "w"):
    pass
starting.join()
assert local.agent_pids()
do(local.shutdown)
"""


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (SHUT_DOWN, ["pids", "the agent was shut down during its start"]),
        (GO_ON, ["pids", "started"]),
    ],
    ids=["shutdown", "start"],
)
def test_nothing_waits_for_an_agent_that_starts(tmp_path: Path, then: str, said: list[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    os.mkfifo(tmp_path / "gate")
    done = subprocess.run(
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
    assert done.stdout.splitlines() == said, done.stderr
    assert done.returncode == 0, done.stderr
