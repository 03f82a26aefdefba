"""The kernel stops, or its Java process is killed, in a separate Spark."""

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

#: Timeout in seconds of steps that take the 10 s of the heartbeat limit on an idle machine.
LONG = 90.0

KERNEL = """
import json, sys
from tfd_notebook.spark import TFCluster, session

def function(args, ctx):
    import threading
    threading.Event().wait()

def send(*values):
    print(json.dumps(values), flush=True)

def run():
    cluster = TFCluster.run(spark, function, None, 1, 0, heartbeat_limit=10)
    send(*([n.pid, n.jvm, int(n.address.rpartition(":")[2])] for n in cluster.nodes))
    cluster.wait(200)
    send(cluster.phase, type(cluster.error).__name__, str(cluster.error))

if __name__ == "__main__":
    spark = session(executors=1, cores=1, memory="1g", name="kernel")
    run()
    run()
"""


class Kernel:
    """A kernel that runs two clusters, one after the other."""

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
        self.descendants: set[psutil.Process] = set()
        self.ports: set[int] = set()

    def receive(self) -> list[Any]:
        """Return the next message of the kernel."""
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith("["))
        values: list[Any] = json.loads(line)
        return values

    def nodes(self) -> list[psutil.Process]:
        """Return the nodes' processes and their supervisors of a running cluster."""
        rows = self.receive()
        nodes = [psutil.Process(pid) for pid, *_ in rows]
        self.descendants.update(psutil.Process(self.process.pid).children(recursive=True))
        self.descendants.update(psutil.Process(jvm) for _, jvm, _ in rows)
        self.ports.update(port for *_, port in rows)
        nodes += [node.parent() for node in nodes]
        return nodes

    @property
    def java(self) -> psutil.Process:
        """Return the kernel's Java process. The Java processes of executors are below it."""
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        return next(process for process in descendants if process.name() == "java")

    def await_exit(self) -> None:
        """Wait for the end of all started processes."""
        until(lambda: not any(map(is_running, self.descendants)), LONG)
        for port in self.ports:
            with socket.socket() as free:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                free.bind(("127.0.0.1", port))


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    new_kernel = Kernel(tmp_path)
    yield new_kernel
    new_kernel.process.kill()
    new_kernel.process.communicate()
    new_kernel.await_exit()


def test_nodes_end_with_a_stopped_kernel_and_a_killed_java(kernel: Kernel) -> None:
    nodes = kernel.nodes()
    # SIGSTOP closes no connection, and no message is answered.
    kernel.process.send_signal(signal.SIGSTOP)
    until(lambda: not any(map(is_running, nodes)), LONG)
    assert is_running(kernel.java)
    kernel.process.send_signal(signal.SIGCONT)
    phase, error, _ = kernel.receive()
    assert (phase, error) == ("failed", "NodeLost")

    nodes = kernel.nodes()
    kernel.java.kill()
    phase, error, text = kernel.receive()
    assert (phase, error) == ("failed", "NodeLost")
    assert "its executor has ended" in text
    until(lambda: not any(map(is_running, nodes)), LONG)
    kernel.process.wait(LONG)
