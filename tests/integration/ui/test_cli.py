"""``tfd`` in a separate process from the kernel or shell that started the cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

TFD = [sys.executable, "-m", "tfd_notebook"]
# The cell below never ends, so only the threads of the package can answer `tfd`.
NOTEBOOK = """
import tfd_notebook as tfd
cluster = tfd.Cluster(data_workers=1, name="cell", preload=["noisy"])
print("ready", flush=True)
while not cluster.ended:
    sum(range(100_000))
"""


def tfd(*arguments: str, status: int = 0) -> str:
    completed = subprocess.run([*TFD, *arguments], capture_output=True, text=True, timeout=90)
    assert completed.returncode == status, completed.stderr
    return completed.stdout


#: Prints codes that clear the screen and set the title of the window.
NOISY = 'print("\\x1b[2J\\x1b]0;title\\x07noise\\tafter\\rtab\\r")'


def on_terminal(*arguments: str) -> bytes:
    """Return the output of ``tfd`` on a terminal."""
    primary, secondary = os.openpty()
    with (
        open(primary, "rb", buffering=0) as terminal,
        open(secondary, "wb", buffering=0) as writer,
    ):
        completed = subprocess.run([*TFD, *arguments], stdout=writer, timeout=90)
        assert completed.returncode == 0
        return terminal.read(65536)


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    (tmp_path / "noisy.py").write_text(NOISY)

    def start(*command: str) -> subprocess.Popen[str]:
        # Level 0 makes TensorFlow log its start, so that the logs of tasks are not empty.
        environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="0", PYTHONPATH=str(tmp_path))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait(30)
        assert process.stdout
        process.stdout.close()


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Return the output of a process up to a line that matches; the test has a timeout."""
    output = ""
    assert process.stdout
    for line in process.stdout:
        output += line
        if re.search(pattern, line):
            return output
    raise AssertionError(f"the process ended with {process.wait()} after:\n{output}")


def test_busy_process_is_listed_watched_and_stopped(
    spawn: Callable[..., subprocess.Popen[str]],
) -> None:
    notebook = spawn(sys.executable, "-c", NOTEBOOK)
    read_until(notebook, "ready")
    (listed,) = json.loads(tfd("list", "--json"))
    assert (listed["name"], listed["state"], listed["pid"]) == ("cell", "ready", notebook.pid)
    assert "\x1b[2J" in tfd("logs", "cell", "data_worker:0")
    shown = on_terminal("logs", "cell", "data_worker:0").decode()
    assert "WorkerServer running" in shown
    assert "noise\tafter\r\ntab\r\n" in shown
    assert not set(shown) & {"\x1b", "\x07"}

    watcher = spawn(*TFD, "watch", "cell", "--interval", "0.2")
    read_until(watcher, r"data_worker:0 +● ready")
    following = spawn(*TFD, "logs", "cell", "data_worker:0", "--follow")
    read_until(following, "WorkerServer running")
    worker = json.loads(tfd("watch", "cell", "--once", "--json"))["tasks"][1]["pid"]
    os.kill(worker, signal.SIGKILL)
    read_until(watcher, "it is being restarted")
    read_until(following, "WorkerServer running")

    assert tfd("stop", "cell") == "cluster 'cell' is stopped\n"
    assert notebook.wait(30) == 0
    read_until(watcher, "cluster 'cell' has ended")
    assert (watcher.wait(30), following.wait(30)) == (0, 0)
    assert tfd("list") == "no running cluster\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_start_in_the_foreground_stops_at_a_signal(
    spawn: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    holder = spawn(*TFD, "start", "--data-workers", "1", "--name", "held", "--foreground")
    read_until(holder, r"data_worker:0 +● ready")
    left = psutil.Process(holder.pid).children(recursive=True)
    assert left
    holder.send_signal(number)
    read_until(holder, "cluster 'held' stopped")
    assert holder.wait(30) == 0
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive


def test_sweep_ends_orphans_of_a_killed_process(
    spawn: Callable[..., subprocess.Popen[str]],
) -> None:
    holder = spawn(*TFD, "start", "--name", "lost")
    read_until(holder, r"dispatcher:0 +● ready")
    holder.kill()
    holder.wait(30)
    tfd("sweep")
    assert tfd("sweep") == "no orphans\n"
    assert tfd("list") == "no running cluster\n"
