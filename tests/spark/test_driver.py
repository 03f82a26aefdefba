"""The kernel stops, or its Java process is killed, in a separate Spark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.spark._processes import await_end
from tfd_notebook.net.runtime_dir import process_start

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
    cluster = TFCluster.run(spark, function, None, 2, 0, heartbeat_limit=10)
    send(*([n.pid, n.jvm, int(n.address.rpartition(":")[2])] for n in cluster.nodes))
    cluster.wait(200)
    send(cluster.phase, type(cluster.error).__name__, str(cluster.error))

if __name__ == "__main__":
    spark = session(executors=2, cores=1, memory="1g", name="kernel")
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
        #: Pids and start times.
        self.descendants: set[tuple[int, float | None]] = set()
        self.ports: set[int] = set()

    def receive(self) -> list[Any]:
        """Return the next message of the kernel."""
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith("["))
        values: list[Any] = json.loads(line)
        return values

    def nodes(self) -> list[tuple[int, float | None]]:
        """Return pids and start times of a running cluster's nodes and their supervisors."""
        rows = self.receive()
        assert len({jvm for _, jvm, _ in rows}) == 2
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        pids = {*(process.pid for process in descendants), *(jvm for _, jvm, _ in rows)}
        self.descendants.update((pid, process_start(pid)) for pid in pids)
        self.ports.update(port for *_, port in rows)
        nodes = [pid for pid, *_ in rows]
        nodes += [psutil.Process(pid).ppid() for pid in nodes]
        return [(pid, process_start(pid)) for pid in nodes]

    @property
    def java(self) -> psutil.Process:
        """Return the kernel's Java process. The Java processes of executors are below it."""
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        return next(process for process in descendants if process.name() == "java")


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    new_kernel = Kernel(tmp_path)
    yield new_kernel
    new_kernel.process.kill()
    new_kernel.process.communicate()
    await_end(new_kernel.descendants, LONG, new_kernel.ports)


def test_nodes_end_with_a_stopped_kernel_and_a_killed_java(kernel: Kernel) -> None:
    nodes = kernel.nodes()
    # SIGSTOP closes no connection, and no message is answered.
    kernel.process.send_signal(signal.SIGSTOP)
    await_end(nodes, LONG)
    assert process_start(kernel.java.pid)
    kernel.process.send_signal(signal.SIGCONT)
    phase, error, _ = kernel.receive()
    assert (phase, error) == ("failed", "NodeLost")

    nodes = kernel.nodes()
    kernel.java.kill()
    phase, error, text = kernel.receive()
    assert (phase, error) == ("failed", "NodeLost")
    assert "its executor has ended" in text
    await_end(nodes, LONG)
    kernel.process.wait(LONG)
