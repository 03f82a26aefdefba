"""Start of a dispatcher and 16 data workers until they answer, against ``import tensorflow``.

Each figure comes from a new process. The start of Python does not count.

warm
    ``tfd.Cluster(data_workers=16)`` after ``%load_ext`` has imported TensorFlow in the background,
    as in most notebooks.
cold
    ``import tfd_notebook`` and the same call, including the start and import of agent and fork
    server.
memory
    Proportional set size (PSS) of each data worker, with its share of agent and fork server. The
    counterpart is an idle process that has imported TensorFlow.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import _pairs

WORKERS = 16

COMMON = """
import json, os, psutil, time

def pss(*pids):
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / 1e6
"""

IMPORT = """
began = time.perf_counter()
import tensorflow
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "process": pss(os.getpid())}))
"""

LOAD_EXTENSION = """
import tfd_notebook
from tfd_notebook.launchers import local
from tfd_notebook.model.spec import ClusterConfig
assert local.preload()
# The connection is ready after the import.
(node,) = local.Local().connect(ClusterConfig(name="waits"), lambda event: None)
node.close()
"""

START = f"""
began = time.perf_counter()
import tfd_notebook as tfd
with tfd.Cluster(data_workers={WORKERS}) as cluster:
    seconds = time.perf_counter() - began
    tasks = cluster.tasks
    assert [task.state for task in tasks] == ["ready"] * {WORKERS + 1}, cluster
    from tfd_notebook.launchers import local
    agent, fork_server = local.agent_pids()
    print(json.dumps({{
        "seconds": seconds,
        "workers": pss(*(task.pid for task in tasks if task.role == "data_worker")),
        "agent": pss(agent),
        "fork server": pss(fork_server),
    }}))
"""


def fresh(*parts: str) -> dict[str, Any]:
    """Run the parts as one program in a new process; return the printed figures."""
    with tempfile.TemporaryDirectory(prefix="tfd-") as directory:
        completed = subprocess.run(
            [sys.executable, "-c", "\n".join((COMMON, *parts))],
            env=dict(
                os.environ,
                TFD_PRELOAD="on",
                TFD_RUNTIME_DIR=directory,
                TF_CPP_MIN_LOG_LEVEL="2",
                CUDA_VISIBLE_DEVICES="",
            ),
            capture_output=True,
            text=True,
            timeout=300,
        )
    if completed.returncode:
        sys.exit(completed.stderr)
    figures: dict[str, Any] = json.loads(completed.stdout)
    return figures


def main() -> None:
    rounds = 2 if _pairs.arguments(__doc__).quick else 5
    starts: list[dict[str, Any]] = []
    bare: list[float] = []

    def start(*before: str) -> float:
        starts.append(fresh(*before, START))
        return float(starts[-1]["seconds"])

    def import_tensorflow() -> float:
        figures = fresh(IMPORT)
        bare.append(figures["process"])
        return float(figures["seconds"])

    figures = _pairs.interleave(
        {
            "import": import_tensorflow,
            "warm": lambda: start(LOAD_EXTENSION),
            "cold": start,
        },
        rounds,
    )
    for name in ("workers", "agent", "fork server"):
        print(f"PSS of the {name}: {statistics.median(s[name] for s in starts):.1f} MB")
    each = [(s["workers"] + s["agent"] + s["fork server"]) / WORKERS for s in starts]
    memory = _pairs.compare(each, [statistics.median(bare)] * len(each))
    warm, cold = (_pairs.compare(figures[name], figures["import"]) for name in ("warm", "cold"))
    for name, result in (("memory", memory), ("warm", warm), ("cold", cold)):
        print(f"{name}: {result}")
    _pairs.report("start_cluster (PSS per data worker)", memory, "MB")
    _pairs.report("start_cluster (cold)", cold, "seconds")
    _pairs.report("start_cluster", warm, "seconds after the background import")


if __name__ == "__main__":
    main()
