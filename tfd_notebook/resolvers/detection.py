"""Rules that detect where this notebook runs. The first rule that matches decides.

A rule reads environment variables, files and already imported modules. No rule queries a metadata
server, or imports a module that the user has not imported.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.data.bottleneck.usage import processors
from tfd_notebook.errors import UsageError
from tfd_notebook.launchers import profiles
from tfd_notebook.launchers.client import detached
from tfd_notebook.model.resolution import RuleResult
from tfd_notebook.net import control_calls, slurm_queue
from tfd_notebook.net.slurm_queue import het_components, partitions
from tfd_notebook.resolvers import providers, suggestions

#: Path of the token of a pod's service account in Kubernetes.
TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
#: Timeout in seconds for ``scontrol ping``.
_PING_SECONDS = 3.0
#: Timeout in seconds for each of the user's other processes.
_CALL_SECONDS = 2.0
#: States of clusters without running tasks.
_ENDED = ("new", "stopped", "failed", "lost", "left")
#: Maximum number of characters of Slurm's output in a reason.
_MAX_OUTPUT = 300
_TPU = ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME", "TPU_CONFIG")


@dataclass(frozen=True)
class RuleOutcome:
    """The result of a rule.

    Parameters
    ----------
    outcome : {"fired", "partial", "no"}
        ``"partial"``: a part of the condition is met.
    why : str
    resolver : str
        Name of the resolver that finds the tasks. Empty if `cell` is only a suggestion.
    cell : str
        Code for the next cell. Empty if it depends on the tasks.
    """

    outcome: str
    why: str
    resolver: str = ""
    cell: str = ""


def detect(options: dict[str, Any]) -> tuple[tuple[RuleResult, ...], RuleOutcome]:
    """Return the results of the rules up to the first that fired, and its outcome.

    Parameters
    ----------
    options : dict
        Arguments of the resolver.
    """
    considered = [RuleResult("argument", "no", "no resolver was named")]
    for name, rule in RULES.items():
        outcome = rule(options)
        considered.append(RuleResult(name, outcome.outcome, outcome.why))
        if outcome.outcome == "fired":
            return tuple(considered), outcome
    raise AssertionError("the last rule always fires")


def _no(why: str) -> RuleOutcome:
    return RuleOutcome("no", why)


def _partial(why: str) -> RuleOutcome:
    return RuleOutcome("partial", why)


def _tf_config(options: dict[str, Any]) -> RuleOutcome:
    text = os.environ.get("TF_CONFIG", "").strip()
    if not text:
        return _no("TF_CONFIG is not set")
    try:
        config = json.loads(text)
    except ValueError:
        # The resolver raises the error with the position in the text.
        return RuleOutcome("fired", "TF_CONFIG is set", "tf_config")
    if isinstance(config, dict) and not config.get("cluster"):
        return _partial("TF_CONFIG is set, but has no cluster")
    return RuleOutcome("fired", "TF_CONFIG has a cluster", "tf_config")


def _sagemaker(options: dict[str, Any]) -> RuleOutcome:
    names = ("SM_HOSTS", "SM_CURRENT_HOST")
    present = [name for name in names if os.environ.get(name)]
    if len(present) == len(names):
        return RuleOutcome("fired", "SM_HOSTS and SM_CURRENT_HOST are set", "sagemaker")
    if present:
        missing = next(name for name in names if name not in present)
        return _partial(f"{present[0]} is set, but {missing} is not")
    return _no("SM_HOSTS is not set")


def _step_tasks() -> int | None:
    """Return the number of tasks of this process's Slurm step, or None outside a step."""
    if not os.environ.get("SLURM_STEP_ID"):
        return None
    return _number("SLURM_STEP_NUM_TASKS")


def _slurm(options: dict[str, Any]) -> RuleOutcome:
    tasks = _step_tasks()
    if tasks is None:
        return _no("SLURM_STEP_ID is not set: not in a Slurm step")
    if tasks > 1:
        return RuleOutcome("fired", f"in a Slurm step with {tasks} tasks", "slurm")
    count = os.environ.get("SLURM_STEP_NUM_TASKS")
    return _partial(
        f"in a Slurm step with SLURM_STEP_NUM_TASKS={count}, but a cluster has more than 1 task"
    )


def _allocation(options: dict[str, Any]) -> RuleOutcome:
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return _no("SLURM_JOB_ID is not set: not in a Slurm allocation")
    tasks, components = _step_tasks(), range(het_components())
    if tasks is None:
        why = f"in the allocation of Slurm job {job}, outside its steps: you can start tasks in it"
        groups = ",".join(map(str, components))
        cell = suggestions.srun([f"--het-group={groups}"] if groups else [])
        return RuleOutcome("fired", why, "slurm", cell)
    # In a step, the variables without a component describe the step's own one.
    suffixes = [f"_HET_GROUP_{component}" for component in components] or [""]
    counts = [_number(f"SLURM_JOB_NUM_NODES{suffix}") for suffix in suffixes]
    cpus, nodes = _number("SLURM_JOB_CPUS_PER_NODE"), sum(counts)
    if tasks != 1 or not all(counts):
        return _partial(f"in Slurm job {job}, but in a step without other tasks")
    if nodes > 1:
        each, where = 1, f"{nodes} nodes"
    elif cpus > processors():
        each, where = min(suggestions.TASKS, cpus), f"{cpus} CPUs"
    else:
        return _partial(f"in a step with one task, which has this host of Slurm job {job}")
    arguments = [[f"--nodes={count}", f"--ntasks={count * each}"] for count in counts]
    for component in components:
        arguments[component].insert(0, f"--het-group={component}")
    cell = suggestions.srun(
        *arguments,
        then=f'tfd.resolve("slurm", job="{job}", tasks_per_node={each})',
    )
    why = f"in a step with one task: you can start tasks on the {where} of Slurm job {job}"
    return RuleOutcome("fired", why, "", cell)


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if slurm_queue.is_count(text) else 0


def _tpu(options: dict[str, Any]) -> RuleOutcome:
    present = [name for name in _TPU if os.environ.get(name)]
    if not present:
        return _no("no variable names a TPU")
    value = os.environ[present[0]]
    if value.startswith("grpc://") or value == "local":
        return RuleOutcome("fired", f"{present[0]} is set", "tpu")
    # Google's API resolves the name, with credentials that may be from the metadata server.
    why = f"{present[0]} names a TPU; the query to Google needs your request"
    return RuleOutcome("fired", why, "", suggestions.TPU)


def _kubernetes(options: dict[str, Any]) -> RuleOutcome:
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    token = TOKEN.is_file()
    if not host:
        return (
            _partial(f"{TOKEN} exists, but KUBERNETES_SERVICE_HOST is not set")
            if token
            else _no("KUBERNETES_SERVICE_HOST is not set: not in a pod")
        )
    if not token:
        return _partial("in a Kubernetes pod, but it has no token of a service account")
    if "jobs" in options:
        return RuleOutcome("fired", "in a Kubernetes pod with a service account", "kubernetes")
    why = "in a Kubernetes pod with a service account; jobs= must name the pods"
    return RuleOutcome("fired", why, "", suggestions.KUBERNETES)


def _spark(options: dict[str, Any]) -> RuleOutcome:
    if "pyspark" not in sys.modules:
        return _no("pyspark is not imported")
    if providers.spark_clusters():
        return RuleOutcome("fired", "a TFCluster of this process runs on Spark", "spark")
    if compat_pyspark.active_context() is None:
        return _partial("pyspark is imported, but this process has no SparkContext")
    return RuleOutcome("fired", "this process has a SparkContext", "", suggestions.SPARK)


def _ray(options: dict[str, Any]) -> RuleOutcome:
    if os.environ.get("RAY_ADDRESS"):
        return RuleOutcome("fired", "RAY_ADDRESS is set", "", suggestions.RAY)
    ray = sys.modules.get("ray")
    if ray is None:
        return _no("RAY_ADDRESS is not set, and ray is not imported")
    if not ray.is_initialized():
        return _partial("ray is imported, but not initialized")
    return RuleOutcome("fired", "ray is initialized", "", suggestions.RAY)


def _jupyter(options: dict[str, Any]) -> RuleOutcome:
    kernels = providers.remote_kernels()
    if any(kernel.clusters for kernel in kernels):
        return RuleOutcome("fired", "remote kernels have clusters", "jupyter")
    entries = profiles.profiles().values()
    names = [
        entry.name
        for entry in entries
        if isinstance(entry, profiles.Profile) and entry.launcher == "jupyter"
    ]
    if names:
        why = f"the profile {names[0]!r} configures a Jupyter server"
        cell = f"cluster = tfd.Cluster(workers=2, ps=1, launcher={names[0]!r})"
        return RuleOutcome("fired", why, "", cell)
    if kernels:
        return _partial("remote kernels are open, but none has a cluster")
    for entry in entries:
        if isinstance(entry, UsageError):
            return _partial(entry.what)
    return _no('no profile has launcher = "jupyter", and no tfd.RemoteKernel is open')


def _slurm_controller(options: dict[str, Any]) -> RuleOutcome:
    if job := os.environ.get("SLURM_JOB_ID"):
        return _partial(f"in Slurm job {job}: another one would wait for hosts")
    if shutil.which("sinfo") is None or shutil.which("scontrol") is None:
        return _no("sinfo and scontrol are not installed")
    try:
        completed = slurm_queue.run(["scontrol", "ping"], _PING_SECONDS)
    except subprocess.TimeoutExpired:
        return _partial(f"sinfo is installed, but scontrol ping took more than {_PING_SECONDS:g} s")
    except OSError as error:
        return _partial(f"sinfo is installed, but running scontrol failed: {error}")
    if completed.returncode or " UP" not in completed.stdout:
        output = " ".join((completed.stdout or completed.stderr).split())[:_MAX_OUTPUT]
        return _partial(f"sinfo is installed, but the Slurm controller does not respond: {output}")
    known = partitions()
    up = [partition for partition in known if partition.up]
    if known and not up:
        return _partial("the Slurm controller responds, but no partition is up")
    cell = suggestions.sbatch(up[0] if up else None)
    return RuleOutcome("fired", "the Slurm controller responds: you can submit jobs", "", cell)


def sibling_process_clusters() -> dict[str, int]:
    """Return the pids of the user's other processes on this host, by their clusters' names."""
    records = control_calls.clusters(_CALL_SECONDS, but=os.getpid())
    return {record["name"]: record["pid"] for record in records if record["state"] not in _ENDED}


def _local(options: dict[str, Any]) -> RuleOutcome:
    names = list(providers.clusters())
    if len(names) == 1 or options.get("name") in names:
        name = options.get("name", names[0])
        why = f"no other rule matches; using the cluster {name!r} of this process"
        return RuleOutcome("fired", why, "local")
    if names:
        why = f"no other rule matches; this process has the clusters {_quoted(names)}"
        return RuleOutcome("fired", why, "", suggestions.which_of(names))
    pids = sibling_process_clusters()
    if len(pids) == 1 or options.get("name") in pids:
        name = options.get("name", next(iter(pids)))
        why = f"no other rule matches; using the cluster {name!r} of the process {pids[name]}"
        return RuleOutcome("fired", why, "local")
    if pids:
        why = f"no other rule matches; other processes have the clusters {_quoted(pids)}"
        return RuleOutcome("fired", why, "", suggestions.which_of(list(pids)))
    detached_names = [record.name for record in detached.detached()]
    if detached_names:
        why = f"no other rule matches; {detached_names[0]!r} is a detached cluster"
        return RuleOutcome("fired", why, "", f"cluster = tfd.attach({detached_names[0]!r})")
    why = "no other rule matches; tasks can run on this host"
    return RuleOutcome("fired", why, "", suggestions.LOCAL)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


#: The rules in their order. An argument precedes all of them.
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
    "slurm_controller": _slurm_controller,
    "local": _local,
}
