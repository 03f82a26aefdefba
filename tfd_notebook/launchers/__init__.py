"""Launchers: the objects that ``Cluster(launcher=...)`` accepts.

Subclass `Launcher` and `TaskHost`, or `RemoteLauncher` and `RemoteHost`, to write another launcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfd_notebook._lazy import exports

if TYPE_CHECKING:
    from tfd_notebook.launchers.base import Launcher as Launcher
    from tfd_notebook.launchers.base import TaskHost as TaskHost
    from tfd_notebook.launchers.client.session import Channel as Channel
    from tfd_notebook.launchers.client.session import SocketChannel as SocketChannel
    from tfd_notebook.launchers.dask import Dask as Dask
    from tfd_notebook.launchers.fake import Fake as Fake
    from tfd_notebook.launchers.inprocess import InProcess as InProcess
    from tfd_notebook.launchers.ipyparallel import IPyParallel as IPyParallel
    from tfd_notebook.launchers.jupyter import Jupyter as Jupyter
    from tfd_notebook.launchers.kubernetes import Kubernetes as Kubernetes
    from tfd_notebook.launchers.local import Local as Local
    from tfd_notebook.launchers.ray import Ray as Ray
    from tfd_notebook.launchers.remote import RemoteHost as RemoteHost
    from tfd_notebook.launchers.remote import RemoteLauncher as RemoteLauncher
    from tfd_notebook.launchers.remote import join_agent as join_agent
    from tfd_notebook.launchers.slurm import Slurm as Slurm
    from tfd_notebook.launchers.spark import Spark as Spark
    from tfd_notebook.launchers.ssh import SSH as SSH

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "Channel": "client.session",
        "Dask": "dask",
        "Fake": "fake",
        "IPyParallel": "ipyparallel",
        "InProcess": "inprocess",
        "Jupyter": "jupyter",
        "Kubernetes": "kubernetes",
        "Launcher": "base",
        "Local": "local",
        "Ray": "ray",
        "RemoteHost": "remote",
        "RemoteLauncher": "remote",
        "SSH": "ssh",
        "Slurm": "slurm",
        "SocketChannel": "client.session",
        "Spark": "spark",
        "TaskHost": "base",
        "join_agent": "remote",
    },
)
