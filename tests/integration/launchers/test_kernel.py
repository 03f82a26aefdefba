"""A cluster in a real kernel that is interrupted, restarted and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration._kernel import Kernel
from tfd_notebook.launchers.client import orphans
from tfd_notebook.net import runtime_dir

pytestmark = [pytest.mark.integration, pytest.mark.timeout(170)]

START = "%load_ext tfd_notebook\n%tfd_cluster start --data-workers 2 --name life -o life"
PIDS = """
from tfd_notebook.launchers import local
print("pids", *[task.pid for task in life.tasks], *local.agent_pids())
"""
# The factor identifies the function that a worker runs.
PIPELINE = """
import tensorflow as tf
factor = {factor}
def times(x):
    return x * factor
numbers = tf.data.Dataset.range(4).map(lambda x: tf.numpy_function(times, [x], tf.int64))
print(sorted(int(x) for x in numbers.apply(life.distribute("dynamic"))))
"""
READ = """
import tensorflow as tf
endless = tf.data.Dataset.range(10**9).apply(life.distribute("off"))
for number, _ in enumerate(endless):
    if number == 10:
        print("reading", flush=True)
"""
READ_SILENT = READ.replace(
    "        print(",
    "        import os, signal; [os.kill(task.pid, signal.SIGSTOP) for task in life.tasks[1:]]\n"
    "        print(",
)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        assert "variable 'life'" in kernel.run(START)
        yield kernel


#: The index of the agent in `pids_of`.
AGENT = 3


def pids_of(kernel: Kernel) -> list[int]:
    """Return the pids of the dispatcher, two workers, the agent and its fork server."""
    pids = [int(word) for word in kernel.run(PIDS).split("pids ")[1].split()]
    assert len(pids) == 5
    return pids


def left_after(pids: list[int], seconds: float) -> list[psutil.Process]:
    """Return the processes of `pids` that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [p for pid in pids if (p := running(pid))]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def running(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    return None


def files_of(owner: int) -> list[Path]:
    """Return the paths in the runtime directory for the kernel with the pid `owner`."""
    directories = [p for p, state in runtime_dir.agent_states() if state.get("owner_pid") == owner]
    return [*directories, *runtime_dir.runtime_dir().glob(f"{owner}.*")]


@pytest.mark.parametrize("cell", [READ, READ_SILENT], ids=["reading", "blocked"])
def test_interrupt_ends_the_cell_only(kernel: Kernel, cell: str) -> None:
    pids = pids_of(kernel)
    reading = kernel.begin(cell, until="reading")
    try:
        if cell is READ_SILENT:
            time.sleep(0.5)  # the loop reads the buffered elements
        kernel.manager.interrupt_kernel()
        assert "KeyboardInterrupt" in kernel.finish(reading, timeout=60)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert pids_of(kernel) == pids
    assert "[0, 3, 6, 9]" in kernel.run(PIPELINE.format(factor=3))


UNLOADED = """
import threading, psutil, tfd_notebook as tfd
from IPython.core import magic
magics = get_ipython().magics_manager.magics
print("magics", [name for kind in magics.values() for name in kind if name.startswith("tfd")])
print("clusters", tfd.clusters())
print("threads", [t.name for t in threading.enumerate() if t.name.startswith("tfd")])
print("children", psutil.Process().children(recursive=True))
"""


def test_unloading_removes_magics_clusters_and_threads(kernel: Kernel) -> None:
    """This is the last test with the shared kernel."""
    pids = pids_of(kernel)
    output = kernel.run("%unload_ext tfd_notebook\n" + UNLOADED)
    for line in ("magics []", "clusters {}", "threads []", "children []"):
        assert line in output
    assert left_after(pids, 60) == []
    assert files_of(kernel.pid) == []


@pytest.mark.slow
def test_kernel_restart_and_shutdown_end_all_tasks() -> None:
    with Kernel() as kernel:
        kernel.run(START)
        pids = pids_of(kernel)
        assert "[0, 5, 10, 15]" in kernel.run(PIPELINE.format(factor=5))
        kernel.restart()
        assert left_after(pids, 60) == []
        assert "variable 'life'" in kernel.run(START)
        assert "[0, 7, 14, 21]" in kernel.run(PIPELINE.format(factor=7))
        pids, owner = pids_of(kernel), kernel.pid
        kernel.manager.shutdown_kernel(now=False)
        assert left_after(pids, 60) == []
        assert files_of(owner) == []


@pytest.mark.parametrize("agent", ["alive", "killed"])
def test_killed_kernel_leaves_nothing_behind(agent: str) -> None:
    with Kernel() as kernel, contextlib.ExitStack() as stack:
        kernel.run(START)
        pids, owner = pids_of(kernel), kernel.pid
        ends = [stack.enter_context(runtime_dir.watched(pid)) for pid in (*pids, owner)]
        if agent == "killed":
            os.kill(pids[AGENT], signal.SIGKILL)
        os.kill(owner, signal.SIGKILL)
        # An agent keeps the lock of its directory until its last thread ends.
        assert all(has_ended(60) for has_ended in ends)
        if agent == "killed":  # no process is left to remove the files
            assert files_of(owner)
            orphans.sweep()
        assert files_of(owner) == []
