"""Kernels elsewhere that run this notebook's source, and their clusters as they are seen here."""

from tfd_notebook.remote_kernel.clusters import RemoteCluster, RemoteCoordinator
from tfd_notebook.remote_kernel.kernel import RemoteKernel

__all__ = ["RemoteCluster", "RemoteCoordinator", "RemoteKernel"]
