"""The next cell: what somebody who found a cluster, or where one could be, may want to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfd_notebook.resolvers.slurm_queue import Partition
from tfd_notebook.resolvers.validation import Tasks

#: What the job of a cell asks for, where the partition allows it; time in minutes.
_TASKS = 2
_MINUTES = 60

_SERVER = (
    "tf.distribute.Server(resolver.cluster_spec(), "
    "job_name=resolver.task_type, task_index=resolver.task_id)"
)
_TASK = f"""\
import sys
sys.path[:] = filter(None, sys.path)  # import nothing from the working directory
import tensorflow as tf, tfd_notebook as tfd
resolver = tfd.resolvers.SlurmResolver()
{_SERVER}.join()
"""

SRUN = f"""\
import subprocess, sys
TASK = '''
{_TASK}'''
step = subprocess.Popen(["srun", "--overlap", sys.executable, "-c", TASK])"""

_SBATCH = f"""\
import shlex, subprocess, sys
TASK = '''
{_TASK}'''
script = shlex.join(["srun", sys.executable, "-c", TASK])
job = subprocess.check_output(
    ["sbatch", "--parsable", {{options}}, "--wrap", script], text=True
).strip()
# when it runs: tfd.resolve("slurm", job=job)"""

TPU = 'tfd.resolve("tpu")'
KUBERNETES = """\
tfd.resolve("kubernetes", jobs={
    "ps": "app=train,role=ps",  # label selectors
    "worker": "app=train,role=worker",
})"""
LOCAL = "cluster = tfd.Cluster(workers=2, ps=1)"
SPARK = f"{LOCAL}  # on the driver's host: Spark tells of no task of TensorFlow's"
RAY = f"{LOCAL}  # on this host: Ray tells of no task of TensorFlow's"

_ATTACHED = ("chief", "evaluator", "master", "ps", "worker")


def sbatch(partition: Partition | None) -> str:
    """Return the cell that submits a job within the limits of a partition.

    Parameters
    ----------
    partition : Partition, optional
        None where nothing is known of the partitions.
    """
    tasks, minutes, options = _TASKS, _MINUTES, []
    if partition is not None:
        tasks = max(1, min(tasks, partition.cpus))
        limit = partition.minutes
        minutes = minutes if limit is None else max(1, min(minutes, limit))
        if not partition.default:
            options = [f"--partition={partition.name}"]
    options = [f"--ntasks={tasks}", f"--time={minutes}", *options]
    return _SBATCH.replace("{options}", ", ".join(f'"{option}"' for option in options))


def start_with(launcher: str) -> str:
    """Return the cell that starts a cluster by a launcher's profile."""
    return f"cluster = tfd.Cluster(workers=2, ps=1, launcher={launcher!r})"


def attach_to(name: str) -> str:
    """Return the cell that takes up a detached cluster."""
    return f"cluster = tfd.attach({name!r})"


def own(name: str) -> str:
    """Return the cell that takes a cluster of this process."""
    return f"cluster = tfd.clusters()[{name!r}]"


def which_of(names: Sequence[str]) -> str:
    """Return the cell that says which cluster is meant."""
    return f'tfd.resolve("local", name={names[0]!r})'


def call(said: str, options: Mapping[str, Any]) -> str:
    """Return how to resolve the same again."""
    words = [repr(said)] if said and said != "auto" else []
    words += [f"{name}={value!r}" for name, value in options.items()]
    return f"tfd.resolve({', '.join(words)})"


def use(tasks: Tasks, again: str, own: tuple[str, int] | None, rule: str) -> str:
    """Return the cell that uses a cluster.

    Parameters
    ----------
    tasks : dict
    again : str
        An expression for the resolution.
    own : tuple, optional
        Which of the tasks this process is.
    rule : str
    """
    if rule == "tpu":
        return (
            f"resolver = {again}.resolver\n"
            "tf.config.experimental_connect_to_cluster(resolver)\n"
            "tf.tpu.experimental.initialize_tpu_system(resolver)\n"
            "strategy = tf.distribute.TPUStrategy(resolver)"
        )
    if own and own[0] != "chief" and own[1] in tasks.get(own[0], {}):
        return f"resolver = {again}.resolver\nserver = {_SERVER}"
    if "dispatcher" in tasks:
        address = next(iter(tasks["dispatcher"].values()))
        return f'cluster = tfd.attach("grpc://{address}")'
    if not set(tasks) <= set(_ATTACHED):
        return f"spec = {again}.cluster_spec()"
    strategy = "\nstrategy = cluster.strategy()" if {"ps", "worker"} <= set(tasks) else ""
    return f"cluster = {again}.attach(){strategy}"
