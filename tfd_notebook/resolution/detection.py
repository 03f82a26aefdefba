"""Where does this notebook run? One rule after the other; the first that fits decides.

A rule looks at variables, files and what is imported already. None asks a metadata server, and
none imports anything that the user did not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfd_notebook._compat import pyspark as private
from tfd_notebook.cluster import control_socket, registry
from tfd_notebook.errors import UsageError
from tfd_notebook.launchers import profiles
from tfd_notebook.launchers.client import detached
from tfd_notebook.model.resolution import RuleResult
from tfd_notebook.resolution import suggestions
from tfd_notebook.resolvers import providers
from tfd_notebook.resolvers.slurm_queue import partitions

#: Where Kubernetes puts the credentials of a pod.
TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
#: Seconds for Slurm's controller.
_PING_SECONDS = 3.0
#: Seconds for each other process of this user, and what clusters of no use are.
_OTHERS_SECONDS = 2.0
_ENDED = ("new", "stopped", "failed", "lost", "left")
#: Characters of what Slurm says.
_MOST_SAID = 300
_TPU = ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME", "TPU_CONFIG")


@dataclass(frozen=True)
class RuleOutcome:
    """What a rule says.

    Parameters
    ----------
    outcome : {"fired", "close", "no"}
    why : str
    resolver : str
        Which resolver knows the tasks, by name; empty where none does, and `cell` is an offer.
    cell : str
        What to run next; empty where that depends on the tasks.
    """

    outcome: str
    why: str
    resolver: str = ""
    cell: str = ""


def detect(options: dict[str, Any]) -> tuple[tuple[RuleResult, ...], RuleOutcome]:
    """Return what became of the rules, to the first that fired; and what that one says.

    Parameters
    ----------
    options : dict
        What the resolver will be given.
    """
    considered = [RuleResult("argument", "no", "no resolver was named")]
    for name, rule in RULES.items():
        verdict = rule(options)
        considered.append(RuleResult(name, verdict.outcome, verdict.why))
        if verdict.outcome == "fired":
            return tuple(considered), verdict
    raise AssertionError("the last rule fires always")


def _no(why: str) -> RuleOutcome:
    return RuleOutcome("no", why)


def _close(why: str) -> RuleOutcome:
    return RuleOutcome("close", why)


def _tf_config(options: dict[str, Any]) -> RuleOutcome:
    text = os.environ.get("TF_CONFIG", "").strip()
    if not text:
        return _no("TF_CONFIG is not set")
    try:
        said = json.loads(text)
    except ValueError:
        # What is wrong with it is the resolver's to say.
        return RuleOutcome("fired", "TF_CONFIG is set", "tf_config")
    if isinstance(said, dict) and not said.get("cluster"):
        return _close("TF_CONFIG is set, and has no cluster in it")
    return RuleOutcome("fired", "TF_CONFIG has a cluster", "tf_config")


def _sagemaker(options: dict[str, Any]) -> RuleOutcome:
    names = ("SM_HOSTS", "SM_CURRENT_HOST")
    there = [name for name in names if os.environ.get(name)]
    if len(there) == len(names):
        return RuleOutcome("fired", "SM_HOSTS and SM_CURRENT_HOST are set", "sagemaker")
    if there:
        missing = next(name for name in names if name not in there)
        return _close(f"{there[0]} is set, but {missing} is not")
    return _no("SM_HOSTS is not set")


def _step_tasks() -> int | None:
    """Return how many tasks the Slurm step has that this process is in; None in no step."""
    if not os.environ.get("SLURM_STEP_ID"):
        return None
    text = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    return int(text) if text.isdecimal() else 0


def _slurm(options: dict[str, Any]) -> RuleOutcome:
    tasks = _step_tasks()
    if tasks is None:
        return _no("SLURM_STEP_ID is not set: in no step of Slurm")
    if tasks > 1:
        return RuleOutcome("fired", f"a step of Slurm with {tasks} tasks", "slurm")
    said = os.environ.get("SLURM_STEP_NUM_TASKS")
    return _close(f"a step of Slurm, with SLURM_STEP_NUM_TASKS={said}: more than 1 is a cluster")


def _allocation(options: dict[str, Any]) -> RuleOutcome:
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return _no("SLURM_JOB_ID is not set: in no allocation of Slurm")
    if _step_tasks() is not None:
        return _close(f"in Slurm's job {job}, but in a step of it, which has no other task")
    why = f"in the allocation of Slurm's job {job}, in no step: its tasks are yours to start"
    return RuleOutcome("fired", why, "slurm", suggestions.SRUN)


def _tpu(options: dict[str, Any]) -> RuleOutcome:
    there = [name for name in _TPU if os.environ.get(name)]
    if not there:
        return _no("no variable names a TPU")
    value = os.environ[there[0]]
    if value.startswith("grpc://") or value == "local":
        return RuleOutcome("fired", f"{there[0]} is set", "tpu")
    # A name is looked up at Google's API, whose credentials may come from the metadata server.
    return RuleOutcome(
        "fired", f"{there[0]} names a TPU; Google is only asked if you say so", "", suggestions.TPU
    )


def _kubernetes(options: dict[str, Any]) -> RuleOutcome:
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    token = TOKEN.is_file()
    if not host:
        return (
            _close(f"KUBERNETES_SERVICE_HOST is not set, though {TOKEN} is there")
            if token
            else (_no("KUBERNETES_SERVICE_HOST is not set: in no pod"))
        )
    if not token:
        return _close("in a pod of Kubernetes, but it has no token of a service account")
    if "jobs" in options:
        return RuleOutcome("fired", "in a pod of Kubernetes, with a service account", "kubernetes")
    why = "in a pod of Kubernetes, with a service account; which pods are meant is not known"
    return RuleOutcome("fired", why, "", suggestions.KUBERNETES)


def _spark(options: dict[str, Any]) -> RuleOutcome:
    if "pyspark" not in sys.modules:
        return _no("pyspark is not imported")
    if providers.spark_clusters():
        return RuleOutcome("fired", "a TFCluster of this process runs on Spark", "spark")
    if private.active_context() is None:
        return _close("pyspark is imported, and no SparkContext lives here")
    return RuleOutcome("fired", "a SparkContext lives here", "", suggestions.SPARK)


def _ray(options: dict[str, Any]) -> RuleOutcome:
    if os.environ.get("RAY_ADDRESS"):
        return RuleOutcome("fired", "RAY_ADDRESS is set", "", suggestions.RAY)
    ray = sys.modules.get("ray")
    if ray is None:
        return _no("RAY_ADDRESS is not set, and ray is not imported")
    if not ray.is_initialized():
        return _close("ray is imported, and not initialised")
    return RuleOutcome("fired", "ray is initialised", "", suggestions.RAY)


def _jupyter(options: dict[str, Any]) -> RuleOutcome:
    kernels = providers.remote_kernels()
    if any(kernel.clusters for kernel in kernels):
        return RuleOutcome("fired", "kernels elsewhere have clusters", "jupyter")
    read = profiles.profiles().values()
    known = [
        one.name for one in read if isinstance(one, profiles.Profile) and one.launcher == "jupyter"
    ]
    if known:
        why = f"a Jupyter server is configured: the profile {known[0]!r}"
        return RuleOutcome("fired", why, "", suggestions.start_with(known[0]))
    if kernels:
        return _close("kernels elsewhere are open, and none has a cluster")
    for one in read:
        if isinstance(one, UsageError):
            return _close(one.what)
    return _no('no profile has launcher = "jupyter", and no tfd.RemoteKernel is open')


def _slurm_reached(options: dict[str, Any]) -> RuleOutcome:
    if shutil.which("sinfo") is None or shutil.which("scontrol") is None:
        return _no("there is no sinfo and scontrol here")
    try:
        done = subprocess.run(
            ["scontrol", "ping"], capture_output=True, text=True, timeout=_PING_SECONDS
        )
    except subprocess.TimeoutExpired:
        return _close(f"sinfo is here, but scontrol ping took more than {_PING_SECONDS:g} s")
    except OSError as error:
        return _close(f"sinfo is here, but scontrol does not run: {error}")
    if done.returncode or " UP" not in done.stdout:
        said = " ".join((done.stdout or done.stderr).split())
        return _close(f"sinfo is here, but Slurm's controller does not answer: {said[:_MOST_SAID]}")
    known = partitions()
    up = [one for one in known if one.up]
    if known and not up:
        return _close("Slurm's controller answers, but no partition is up")
    cell = suggestions.sbatch(up[0] if up else None)
    return RuleOutcome("fired", "Slurm's controller answers: jobs can be submitted", "", cell)


def sibling_process_clusters() -> dict[str, int]:
    """Return the clusters of this user's other processes on this host: their pids by name."""
    known = control_socket.clusters(_OTHERS_SECONDS, but=os.getpid())
    return {one["name"]: one["pid"] for one in known if one["state"] not in _ENDED}


def _local(options: dict[str, Any]) -> RuleOutcome:
    found = list(registry.clusters())
    if len(found) == 1 or options.get("name") in found:
        name = options.get("name", found[0])
        return RuleOutcome("fired", f"nothing else: the cluster {name!r} of this process", "local")
    if found:
        why = f"nothing else: this process has the clusters {', '.join(map(repr, found))}"
        return RuleOutcome("fired", why, "", suggestions.which_of(found))
    theirs = sibling_process_clusters()
    if len(theirs) == 1 or options.get("name") in theirs:
        name = options.get("name", next(iter(theirs)))
        why = f"nothing else: the cluster {name!r} of the process {theirs[name]}"
        return RuleOutcome("fired", why, "local")
    if theirs:
        why = f"nothing else: other processes have the clusters {', '.join(map(repr, theirs))}"
        return RuleOutcome("fired", why, "", suggestions.which_of(list(theirs)))
    staying = [one.name for one in detached.detached()]
    if staying:
        why = f"nothing else; {staying[0]!r} is a detached cluster of yours"
        return RuleOutcome("fired", why, "", suggestions.attach_to(staying[0]))
    return RuleOutcome("fired", "nothing else: tasks can run on this host", "", suggestions.LOCAL)


#: The rules in their order; an argument comes before all of them.
RULES: dict[str, Callable[[dict[str, Any]], RuleOutcome]] = {
    "tf_config": _tf_config,
    "sagemaker": _sagemaker,
    "slurm": _slurm,
    "slurm_allocation": _allocation,
    "tpu": _tpu,
    "kubernetes": _kubernetes,
    "spark": _spark,
    "ray": _ray,
    "jupyter": _jupyter,
    "slurm_controller": _slurm_reached,
    "local": _local,
}
