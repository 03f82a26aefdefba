"""Resolvers by name, for the command line, forms and the detection rules."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook import resolvers
from tfd_notebook.errors import NoTasks, NotThere, UnknownName, UsageError, one_of
from tfd_notebook.model.spec import Role
from tfd_notebook.resolvers import providers
from tfd_notebook.resolvers.detection import sibling_process_clusters
from tfd_notebook.resolvers.validation import checked

#: The choices, each with a description, and with the name of its class if it has only one.
_RESOLVERS = {
    "auto": ("the first rule that matches", ""),
    "tf_config": ("the variable TF_CONFIG", "TFConfigResolver"),
    "sagemaker": ("a training job of SageMaker", "SageMakerResolver"),
    "slurm": ("a step, allocation or job of Slurm", "SlurmResolver"),
    "spark": ("the nodes of a TFCluster of this process", "SparkResolver"),
    "tpu": ("a Cloud TPU", "TPUResolver"),
    "kubernetes": ("pods of Kubernetes", "KubernetesResolver"),
    "gce": ("an instance group of Compute Engine", "GCEResolver"),
    "jupyter": ("clusters in remote kernels", ""),
    "file": ("a JSON or TOML file", "ClusterFileResolver"),
    "local": ("a cluster of this process, or of your other processes on this host", ""),
}
#: The choices, each with a description.
CHOICES = {name: description for name, (description, _) in _RESOLVERS.items()}
_CLASSES = {name: kind for name, (_, kind) in _RESOLVERS.items() if kind}


def create_resolver(name: str, options: Mapping[str, Any]) -> Any:
    """Return the resolver with this name.

    Parameters
    ----------
    name : str
        One of `CHOICES` except ``"auto"``, or the path of a cluster file.
    options : mapping
        Arguments of the resolver's class, or ``name`` for ``"local"``.

    Raises
    ------
    UsageError
        The name or an option is unknown.
    NotThere, NoTasks
        The source of the tasks does not exist, or has no tasks.
    """
    if name == "local":
        return _local(**_checked(_local, "local", options))
    if name == "jupyter":
        return _kernels(**_checked(_kernels, "jupyter", options))
    if name not in _CLASSES and (name.endswith((".json", ".toml")) or os.sep in name):
        options = {"path": name, **options}
        name = "file"
    if name not in _CLASSES:
        raise UnknownName(
            f"no resolver {name!r}",
            fix=f"{one_of(name, CHOICES)}, or the path of a .json or .toml file",
        )

    kind = getattr(resolvers, _CLASSES[name])
    return kind(**_checked(kind, name, options))


def of_mapping(jobs: Any) -> Any:
    """Return a resolver of a ``tf.train.ClusterSpec``, or of a mapping that describes one."""
    import tensorflow as tf

    if isinstance(jobs, Mapping):
        jobs = tf.train.ClusterSpec(checked(jobs, "the mapping"))
    return tf.distribute.cluster_resolver.SimpleClusterResolver(jobs)


def _checked(kind: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    signature = inspect.signature(kind)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise UsageError(
            f"invalid arguments of the resolver {name!r}: {error}",
            fix=f"use {', '.join(signature.parameters)}",
        ) from None
    return options


def _kernels(task_type: str | None = None, task_id: int | None = None) -> Any:
    kernels = providers.remote_kernels()
    if not kernels:
        raise NotThere(
            "no remote kernel is open",
            fix='kernel = tfd.RemoteKernel("https://host:8888/?token=...")',
        )
    return resolvers.KernelResolver(*kernels, task_type=task_type, task_id=task_id)


def _local(name: str | None = None) -> Any:
    """Return the resolver of a cluster of this process, or else of a sibling process."""
    clusters = providers.clusters()
    pids = sibling_process_clusters() if name not in clusters and (name or not clusters) else {}
    if name is None and len(clusters or pids) == 1:
        name = next(iter(clusters or pids))
    if name in pids:
        # Import time: this imports TensorFlow, which the command line does not need otherwise.
        from tfd_notebook.resolvers.sibling_process import SiblingProcessResolver

        return SiblingProcessResolver(name, pids[name])
    if name is None or name not in clusters:
        names = [*clusters, *pids]
        if name:
            what = f"no cluster {name!r} on this host"
        else:
            what = f"{'several clusters' if names else 'no cluster'} on this host"
        raise UnknownName(
            what,
            fix=f"name= one of {', '.join(names)}" if names else "tfd.Cluster(workers=2, ps=1)",
        )
    cluster = clusters[name]
    tasks = [row for row in cluster.snapshot().tasks if row.address and not row.state.ended]
    if any(row.role in (Role.PS, Role.WORKER) for row in tasks):
        return cluster.resolver
    if not tasks:
        raise NoTasks(f"cluster {name!r} has no running task", fix="scale or start it")
    jobs: dict[str, dict[int, str]] = {}
    for row in tasks:
        jobs.setdefault(str(row.role), {})[row.index] = str(row.address)
    return of_mapping(jobs)
