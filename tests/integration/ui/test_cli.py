"""``tfd`` in a separate process from the kernel or shell that started the cluster."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests._ports import free_port
from tests._waiting import until

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
            process.wait(60)
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
    assert notebook.wait(60) == 0
    read_until(watcher, "cluster 'cell' has ended")
    assert (watcher.wait(60), following.wait(60)) == (0, 0)
    assert tfd("list") == "no running cluster\n"


def test_attach_uses_a_detached_cluster_and_leaves_it_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Without this variable, IPython queries the terminal, which this one does not answer.
    monkeypatch.setenv("IPY_TEST_SIMPLE_PROMPT", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    tfd("start", "--data-workers", "1", "--name", "kept", "--detach", "1")
    try:
        assert json.loads(tfd("attach", "kept", "--json"))["observed"]["data_worker"] == 1
        assert "data_worker:0" in tfd("attach", "kept")
        primary, secondary = os.openpty()
        with open(primary, "r+b", buffering=0) as terminal:
            session = subprocess.Popen(
                [*TFD, "attach", "kept"], stdin=secondary, stdout=secondary, stderr=secondary
            )
            os.close(secondary)
            terminal.write(b"print(cluster.name * 2, len(cluster.tasks) + 40)\nexit\n")
            shown = b""
            with contextlib.suppress(OSError):  # the end of a terminal
                while chunk := terminal.read(4096):
                    shown += chunk
        assert session.wait(60) == 0
        assert b"it is in the variable 'cluster'" in shown
        assert b"keptkept 42" in shown
        (listed,) = json.loads(tfd("list", "--json"))
        assert (listed["name"], listed["observed"]) == ("kept", 2)
    finally:
        tfd("stop", "kept")


def test_lab_serves_the_tutorials(
    spawn: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("CONFIG", "DATA", "RUNTIME"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / name.lower()))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "jupyter_server_config.json").write_text(
        json.dumps({"ServerApp": {"allow_root": True}, "IdentityProvider": {"token": "secret"}})
    )
    port = free_port()
    server = spawn(*TFD, "lab", str(tmp_path / "tutorials"), "--no-browser", "--port", str(port))

    def contents() -> Any:
        url = f"http://127.0.0.1:{port}/api/contents?token=secret"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["content"]
        assert server.poll() is None
        return None

    names = [entry["name"] for entry in until(contents, 80.0)]
    assert "01_quickstart.ipynb" in names
    assert server.stdout
    assert re.match(rf"{len(names)} tutorials copied to .*tutorials\n", server.stdout.readline())
    server.terminate()
    server.wait(60)


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
    assert holder.wait(60) == 0
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive


def test_sweep_ends_orphans_of_a_killed_process(
    spawn: Callable[..., subprocess.Popen[str]],
) -> None:
    holder = spawn(*TFD, "start", "--name", "lost")
    read_until(holder, r"dispatcher:0 +● ready")
    holder.kill()
    holder.wait(60)
    tfd("sweep")
    assert tfd("sweep") == "no orphans\n"
    assert tfd("list") == "no running cluster\n"
