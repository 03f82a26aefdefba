"""Code suggestions for the next cell, given a resolved cluster or a place for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfd_notebook.net.slurm_queue import Partition
from tfd_notebook.resolvers.validation import Tasks

#: Number of tasks and minutes of a suggested Slurm job, if the partition allows them.
TASKS = 2
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
SPARK = f"{LOCAL}  # on the driver's host: Spark has no information about TensorFlow tasks"
RAY = f"{LOCAL}  # on this host: Ray has no information about TensorFlow tasks"

_ATTACHED = ("chief", "evaluator", "master", "ps", "worker")


def srun(*components: Sequence[str], then: str = "") -> str:
    """Return the cell that starts servers in this process's allocation.

    Parameters
    ----------
    *components : sequence of str
        Options of ``srun`` for each component of a heterogeneous step. Default: one, without any.
    then : str
        Code that resolves the servers. Default: none.
    """
    options = ("".join(f'"{word}", ' for word in words) for words in components or ((),))
    command = ', ":", '.join(f'{words}sys.executable, "-c", TASK' for words in options)
    return f"""\
import subprocess, sys
TASK = '''
{_TASK}'''
step = subprocess.Popen(["srun", "--overlap", {command}])""" + (f"\n# then: {then}" if then else "")


def sbatch(partition: Partition | None) -> str:
    """Return the cell that submits a job within the limits of a partition.

    Parameters
    ----------
    partition : Partition, optional
        None if the partitions are unknown.
    """
    tasks, minutes, options = TASKS, _MINUTES, []
    if partition is not None:
        tasks = max(1, min(tasks, partition.cpus))
        limit = partition.minutes
        minutes = minutes if limit is None else max(1, min(minutes, limit))
        if not partition.default:
            options = [f"--partition={partition.name}"]
    options = [f"--ntasks={tasks}", f"--time={minutes}", *options]
    return _SBATCH.replace("{options}", ", ".join(f'"{option}"' for option in options))


def which_of(names: Sequence[str]) -> str:
    """Return the cell that selects one of several clusters."""
    return f'tfd.resolve("local", name={names[0]!r})'


def call(resolver: str, options: Mapping[str, Any]) -> str:
    """Return the source of a call that repeats a resolution."""
    arguments = [repr(resolver)] if resolver and resolver != "auto" else []
    arguments += [f"{name}={value!r}" for name, value in options.items()]
    return f"tfd.resolve({', '.join(arguments)})"


def use(tasks: Tasks, call: str, own: tuple[str, int] | None, rule: str) -> str:
    """Return the cell that uses a cluster.

    Parameters
    ----------
    tasks : dict
    call : str
        Source of an expression that repeats the resolution.
    own : tuple, optional
        Job and index of the task that this process is.
    rule : str
        ``"tpu"`` for a TPU.
    """
    if rule == "tpu":
        return (
            f"resolver = {call}.resolver\n"
            "tf.config.experimental_connect_to_cluster(resolver)\n"
            "tf.tpu.experimental.initialize_tpu_system(resolver)\n"
            "strategy = tf.distribute.TPUStrategy(resolver)"
        )
    if own and own[0] == "evaluator":
        return f"# an evaluator starts no server: it reads checkpoints\nresolver = {call}.resolver"
    if own and own[0] != "chief" and own[1] in tasks.get(own[0], {}):
        return f"resolver = {call}.resolver\nserver = {_SERVER}"
    if "dispatcher" in tasks:
        address = next(iter(tasks["dispatcher"].values()))
        return f'cluster = tfd.attach("grpc://{address}")'
    if not set(tasks) <= set(_ATTACHED):
        return f"spec = {call}.cluster_spec()"
    strategy = "\nstrategy = cluster.strategy()" if {"ps", "worker"} <= set(tasks) else ""
    return f"cluster = {call}.attach(){strategy}"
