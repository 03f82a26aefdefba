"""The notebook's process, or its Java, stops or is killed: with a Spark of its own for each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests._waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

#: Seconds for what takes ten, the limit of the heartbeat, on an idle machine.
LONG = 90.0

KERNEL = """
import json, sys
from tfd_notebook.spark import TFCluster, session

def function(args, ctx):
    import threading
    threading.Event().wait()

def say(*values):
    print(json.dumps(values), flush=True)

def run():
    cluster = TFCluster.run(spark, function, None, 2, 0, heartbeat_limit=10)
    say(*([n.pid, n.jvm, int(n.address.rpartition(":")[2])] for n in cluster.nodes))
    cluster.wait(200)
    say(cluster.phase, type(cluster.error).__name__, str(cluster.error))

if __name__ == "__main__":
    spark = session(executors=2, cores=1, memory="1g", name="kernel")
    run()
    run()
"""


class Kernel:
    """A notebook's process that runs two clusters, one after the other."""

    def __init__(self, directory: Path) -> None:
        script = directory / "kernel.py"
        script.write_text(KERNEL)
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=directory,
            env={
                **os.environ,
                "TMPDIR": str(directory),
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            },
        )
        self.below: set[psutil.Process] = set()
        self.ports: set[int] = set()

    def hear(self) -> list[Any]:
        """Return what it says next."""
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith("["))
        found: list[Any] = json.loads(line)
        return found

    def nodes(self) -> list[psutil.Process]:
        """Return the nodes' processes and their supervisors, when a cluster runs."""
        said = self.hear()
        nodes = [psutil.Process(pid) for pid, *_ in said]
        self.below.update(psutil.Process(self.process.pid).children(recursive=True))
        self.below.update(psutil.Process(jvm) for _, jvm, _ in said)
        self.ports.update(port for *_, port in said)
        nodes += [node.parent() for node in nodes]
        return nodes

    @property
    def java(self) -> psutil.Process:
        """Its own Java, which the executors' are below."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return next(process for process in below if process.name() == "java")

    def leaves_nothing(self) -> None:
        """Wait for the end of all that it has started."""
        until(lambda: not any(map(lives, self.below)), LONG)
        for port in self.ports:
            with socket.socket() as free:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                free.bind(("127.0.0.1", port))


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path)
    yield made
    made.process.kill()
    made.process.communicate()
    made.leaves_nothing()


def test_the_kernel_is_killed(kernel: Kernel) -> None:
    nodes = kernel.nodes()
    kernel.process.kill()
    until(lambda: not any(map(lives, nodes)), LONG)


def test_the_kernel_stops_and_then_its_java_is_killed(kernel: Kernel) -> None:
    nodes = kernel.nodes()
    # No connection is closed, nobody answers.
    kernel.process.send_signal(signal.SIGSTOP)
    until(lambda: not any(map(lives, nodes)), LONG)
    assert lives(kernel.java)
    kernel.process.send_signal(signal.SIGCONT)
    phase, error, _ = kernel.hear()
    assert (phase, error) == ("failed", "NodeLost")

    nodes = kernel.nodes()
    kernel.java.kill()
    phase, error, text = kernel.hear()
    assert (phase, error) == ("failed", "NodeLost")
    assert "its executor has ended" in text
    until(lambda: not any(map(lives, nodes)), LONG)
    kernel.process.wait(LONG)
