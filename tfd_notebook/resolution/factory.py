"""Resolvers by name, for those who choose one: in a line, in a form, or by a rule."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook.cluster import registry
from tfd_notebook.errors import NoTasks, NotThere, UnknownName, UsageError
from tfd_notebook.model.spec import Role
from tfd_notebook.resolution.detection import sibling_process_clusters
from tfd_notebook.resolvers import providers

#: What can be chosen, in words; the first is chosen by rules.
CHOICES = {
    "auto": "the first of the rules that fits",
    "tf_config": "the variable TF_CONFIG",
    "sagemaker": "a training job of SageMaker",
    "slurm": "a step, allocation or job of Slurm",
    "spark": "the nodes of a TFCluster of this process",
    "tpu": "a Cloud TPU",
    "kubernetes": "pods of Kubernetes",
    "gce": "an instance group of Compute Engine",
    "jupyter": "clusters in kernels elsewhere",
    "file": "a JSON or TOML file",
    "local": "a cluster of this process, or of another one of yours on this host",
}

_CLASSES = {
    "tf_config": "TFConfigResolver",
    "sagemaker": "SageMakerResolver",
    "slurm": "SlurmResolver",
    "spark": "SparkResolver",
    "tpu": "TPUResolver",
    "kubernetes": "KubernetesResolver",
    "gce": "GCEResolver",
    "file": "ClusterFileResolver",
}


def create_resolver(name: str, options: Mapping[str, Any]) -> Any:
    """Return the resolver of that name.

    Parameters
    ----------
    name : str
        One of `CHOICES` but ``"auto"``, or the path of a cluster file.
    options : mapping
        Arguments of its class; ``name`` for ``"local"``.

    Raises
    ------
    UsageError
        There is none of that name, or it has no such option.
    NotThere, NoTasks
        What it would ask is not there.
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
            f"there is no resolver {name!r}",
            fix=f"use one of {', '.join(CHOICES)}, or the path of a .json or .toml file",
        )
    from tfd_notebook import resolvers

    kind = getattr(resolvers, _CLASSES[name])
    return kind(**_checked(kind, name, options))


def of_mapping(jobs: Any) -> Any:
    """Return a resolver of a ``tf.train.ClusterSpec``, or of what one is made from."""
    import tensorflow as tf

    from tfd_notebook.resolvers.validation import checked

    if isinstance(jobs, Mapping):
        jobs = tf.train.ClusterSpec(checked(jobs, "the mapping"))
    return tf.distribute.cluster_resolver.SimpleClusterResolver(jobs)


def _checked(kind: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    signature = inspect.signature(kind)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise UsageError(
            f"the resolver {name!r}: {error}", fix=f"it takes {', '.join(signature.parameters)}"
        ) from None
    return options


def _kernels(task_type: str | None = None, task_id: int | None = None) -> Any:
    kernels = providers.remote_kernels()
    if not kernels:
        raise NotThere(
            "no kernel elsewhere is open here",
            fix='kernel = tfd.RemoteKernel("https://host:8888/?token=...")',
        )
    from tfd_notebook.resolvers import KernelResolver

    return KernelResolver(*kernels, task_type=task_type, task_id=task_id)


def _local(name: str | None = None) -> Any:
    """Return the resolver of a cluster on this host, of this process before those of others."""
    known = registry.clusters()
    theirs = sibling_process_clusters() if name not in known and (name or not known) else {}
    if name is None and len(known or theirs) == 1:
        name = next(iter(known or theirs))
    if name in theirs:
        # Imports TensorFlow, which the command line does without.
        from tfd_notebook.resolution.sibling_process import SiblingProcessResolver

        return SiblingProcessResolver(name, theirs[name])
    if name not in known:
        names = [*known, *theirs]
        raise UnknownName(
            f"there is no cluster {name!r} on this host"
            if name
            else f"there {'are several clusters' if names else 'is no cluster'} on this host",
            fix=f"name= one of {', '.join(names)}" if names else "tfd.Cluster(workers=2, ps=1)",
        )
    cluster = known[name]
    tasks = [row for row in cluster.snapshot().tasks if row.address and not row.state.ended]
    if any(row.role in (Role.PS, Role.WORKER) for row in tasks):
        return cluster.resolver
    if not tasks:
        raise NoTasks(f"the cluster {name!r} has no task", fix="scale or start it")
    jobs: dict[str, dict[int, str]] = {}
    for row in tasks:
        jobs.setdefault(str(row.role), {})[row.index] = str(row.address)
    return of_mapping(jobs)
