"""Remote kernels that run code of this notebook, and proxies of their clusters."""

from tfd_notebook.remote_kernel.clusters import RemoteCluster, RemoteCoordinator
from tfd_notebook.remote_kernel.kernel import RemoteKernel

__all__ = ["RemoteCluster", "RemoteCoordinator", "RemoteKernel"]
