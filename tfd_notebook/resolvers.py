"""Where a cluster's tasks are found: each a ``tf.distribute.cluster_resolver.ClusterResolver``."""

from tfd_notebook.resolving.base import Resolver
from tfd_notebook.resolving.described import (
    ClusterFileResolver,
    SageMakerResolver,
    TFConfigResolver,
)
from tfd_notebook.resolving.gce import GCEResolver
from tfd_notebook.resolving.kernels import KernelResolver
from tfd_notebook.resolving.kubernetes import KubernetesResolver
from tfd_notebook.resolving.own import OwnResolver
from tfd_notebook.resolving.slurm import SlurmResolver
from tfd_notebook.resolving.spark import SparkResolver
from tfd_notebook.resolving.tpu import TPUResolver
from tfd_notebook.resolving.union import UnionResolver

__all__ = [
    "ClusterFileResolver",
    "GCEResolver",
    "KernelResolver",
    "KubernetesResolver",
    "OwnResolver",
    "Resolver",
    "SageMakerResolver",
    "SlurmResolver",
    "SparkResolver",
    "TFConfigResolver",
    "TPUResolver",
    "UnionResolver",
]
