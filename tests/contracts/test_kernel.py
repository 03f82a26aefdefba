"""Promises of README.md about cells that hang and processes that stay behind, in one kernel."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.integration._kernel import Kernel

pytestmark = pytest.mark.integration

START = "%load_ext tfd_notebook\n%tfd_cluster start --data-workers 2 --name life -o life"
#: Prints the pids of all processes of the kernel, and of the data workers.
PIDS = """
import psutil
print("pids", *(child.pid for child in psutil.Process().children(recursive=True)))
print("workers", *(task.pid for task in life.tasks if task.role == "data_worker"))
"""
DATASET = """
import tensorflow as tf
numbers = tf.data.Dataset.range(100).apply(life.distribute("dynamic"))
"""
READ = "print('read', sorted(int(n) for n in numbers))"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        assert "variable 'life'" in kernel.run(START)
        yield kernel


def pids_of(kernel: Kernel) -> tuple[list[int], list[int]]:
    """Return the pids of all processes of the kernel, and those of the data workers."""
    lines = dict(line.split(" ", 1) for line in kernel.run(PIDS).splitlines())
    every, workers = ([int(pid) for pid in lines[name].split()] for name in ("pids", "workers"))
    assert len(workers) == 2
    assert {*workers} < {*every}
    return every, workers


def test_second_run_of_a_start_cell_keeps_the_cluster(kernel: Kernel) -> None:
    before = pids_of(kernel)
    assert "variable 'life'" in kernel.run(START)
    assert pids_of(kernel) == before


def test_one_interrupt_ends_a_blocked_cell_only(kernel: Kernel) -> None:
    before = pids_of(kernel)
    kernel.run(DATASET)
    for pid in before[1]:
        os.kill(pid, signal.SIGSTOP)
    try:
        # Python ignores an earlier interrupt if it hits a destructor of TensorFlow.
        cell = kernel.begin(READ, until="does not answer .* waits? for data")
        kernel.manager.interrupt_kernel()
        assert "KeyboardInterrupt" in kernel.finish(cell)
    finally:
        for pid in before[1]:
            os.kill(pid, signal.SIGCONT)
    assert pids_of(kernel) == before
    assert f"read {list(range(100))}" in kernel.run(READ)


def test_restart_and_shutdown_of_the_kernel_leave_no_process(kernel: Kernel) -> None:
    """This is the last test, because it ends the kernel."""
    processes = [psutil.Process(pid) for pid in pids_of(kernel)[0]]
    kernel.restart()
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert "variable 'life'" in kernel.run(START)
    processes = [psutil.Process(pid) for pid in pids_of(kernel)[0]]
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=False)
    assert psutil.wait_procs(processes, timeout=60)[1] == []
