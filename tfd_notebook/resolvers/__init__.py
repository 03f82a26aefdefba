"""Resolvers: implementations of ``tf.distribute.cluster_resolver.ClusterResolver``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfd_notebook._lazy import exports

if TYPE_CHECKING:
    from tfd_notebook.resolvers.base import Resolver as Resolver
    from tfd_notebook.resolvers.cluster import OwnResolver as OwnResolver
    from tfd_notebook.resolvers.gce import GCEResolver as GCEResolver
    from tfd_notebook.resolvers.kubernetes import KubernetesResolver as KubernetesResolver
    from tfd_notebook.resolvers.remote_kernels import KernelResolver as KernelResolver
    from tfd_notebook.resolvers.slurm import SlurmResolver as SlurmResolver
    from tfd_notebook.resolvers.spark import SparkResolver as SparkResolver
    from tfd_notebook.resolvers.static import ClusterFileResolver as ClusterFileResolver
    from tfd_notebook.resolvers.static import SageMakerResolver as SageMakerResolver
    from tfd_notebook.resolvers.static import TFConfigResolver as TFConfigResolver
    from tfd_notebook.resolvers.tpu import TPUResolver as TPUResolver
    from tfd_notebook.resolvers.union import UnionResolver as UnionResolver

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "ClusterFileResolver": "static",
        "GCEResolver": "gce",
        "KernelResolver": "remote_kernels",
        "KubernetesResolver": "kubernetes",
        "OwnResolver": "cluster",
        "Resolver": "base",
        "SageMakerResolver": "static",
        "SlurmResolver": "slurm",
        "SparkResolver": "spark",
        "TFConfigResolver": "static",
        "TPUResolver": "tpu",
        "UnionResolver": "union",
    },
)
