"""Time from submission to 12 ready tasks on 3 nodes of Slurm, against imports of TensorFlow.

One side starts a cluster with a dispatcher and 11 data workers. Its start ends when all tasks are
ready. The other side is ``srun`` on the same nodes, in which 12 processes import TensorFlow. The
second figure is for 3 processes, one on each node. No job waits for another one, because each side
waits until the nodes are idle again.

The nodes are network namespaces of this machine, which share its cores. Needs root, ``ip``,
``nft``, ``munge`` and Slurm's daemons.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1]))

import _pairs

import tfd_notebook as tfd
from tests._waiting import until
from tests.hosts._hosts import Hosts
from tests.hosts._slurm import Slurm
from tfd_notebook.net.runtime_dir import variables

NODES = 3
TASKS = 12
#: The simulated hosts share the file system, so these differ from this process's.
PROLOGUE = "export TFD_RUNTIME_DIR=/run/tfd TMPDIR=/run/tmp HOME=/run/home"


def await_idle(slurm: Slurm) -> None:
    """Wait until the nodes have no job."""
    idle = ["idle"] * NODES
    states = ("sinfo", "-p", "all", "-h", "-N", "-o", "%T")
    until(lambda: slurm.run(*states).stdout.split() == idle, 60)


def cluster(slurm: Slurm, output: str) -> float:
    """Return the seconds until all tasks of a cluster are ready."""
    launcher = tfd.launchers.Slurm(NODES, prologue=PROLOGUE, output=output)
    began = time.perf_counter()
    started = tfd.Cluster(data_workers=TASKS - 1, name="start", launcher=launcher)
    seconds = time.perf_counter() - began
    assert len(started.tasks) == TASKS
    started.stop()
    await_idle(slurm)
    return seconds


def imports(slurm: Slurm, processes: int) -> float:
    """Return the seconds until processes of ``srun`` have imported TensorFlow and ended."""
    code = "import tensorflow"
    began = time.perf_counter()
    slurm.run(
        "srun", f"-N{NODES}", f"-n{processes}", sys.executable, "-c", code, check=True, timeout=300
    )
    seconds = time.perf_counter() - began
    await_idle(slurm)
    return seconds


def main() -> None:
    rounds = 3 if _pairs.arguments(__doc__).quick else 5
    if os.geteuid():
        sys.exit("slurm_start needs root to create network namespaces")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts())
        hosts.full_speed()
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        output = stack.enter_context(tempfile.TemporaryDirectory())
        slurm = stack.enter_context(Slurm(hosts, directory))
        stack.enter_context(variables(slurm.home_env))
        figures = _pairs.interleave(
            {
                "cluster": lambda: cluster(slurm, output),
                "all": lambda: imports(slurm, TASKS),
                "one": lambda: imports(slurm, NODES),
            },
            rounds,
        )
    for side, name in (("one", "slurm_start, one import on each node"), ("all", "slurm_start")):
        result = _pairs.compare(figures["cluster"], figures[side])
        print(f"{name}: {result}")
        _pairs.report(name, result, "seconds to ready")


if __name__ == "__main__":
    main()
