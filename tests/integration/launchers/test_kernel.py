"""A cluster in a real kernel that unloads the extension or is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests._waiting import until
from tests.integration._kernel import Kernel
from tfd_notebook.launchers.client import orphans
from tfd_notebook.net import runtime_dir

pytestmark = [pytest.mark.integration, pytest.mark.timeout(170)]

START = "%load_ext tfd_notebook\n%tfd_cluster start --data-workers 2 --name life -o life"
PIDS = """
from tfd_notebook.launchers import local
print("pids", *[task.pid for task in life.tasks], *local.agent_pids())
"""

#: The index of the agent in `pids_of`.
AGENT = 3


def pids_of(kernel: Kernel) -> list[int]:
    """Return the pids of the dispatcher, two workers, the agent and its fork server."""
    pids = [int(word) for word in kernel.run(PIDS).split("pids ")[1].split()]
    assert len(pids) == 5
    return pids


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def files_of(owner: int) -> list[Path]:
    """Return the paths in the runtime directory for the kernel with the pid `owner`."""
    directories = [p for p, state in runtime_dir.agent_states() if state.get("owner_pid") == owner]
    return [*directories, *runtime_dir.runtime_dir().glob(f"{owner}.*")]


UNLOADED = """
import threading, psutil, tfd_notebook as tfd
from IPython.core import magic
magics = get_ipython().magics_manager.magics
print("magics", [name for kind in magics.values() for name in kind if name.startswith("tfd")])
print("clusters", tfd.clusters())
print("threads", [t.name for t in threading.enumerate() if t.name.startswith("tfd")])
print("children", psutil.Process().children(recursive=True))
"""


def test_unloading_removes_magics_clusters_and_threads() -> None:
    with Kernel() as kernel:
        assert "variable 'life'" in kernel.run(START)
        pids = pids_of(kernel)
        output = kernel.run("%unload_ext tfd_notebook\n" + UNLOADED)
        for line in ("magics []", "clusters {}", "threads []", "children []"):
            assert line in output
        until(lambda: not any(runs(pid) for pid in pids))
        assert files_of(kernel.pid) == []


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
