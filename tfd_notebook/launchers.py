"""Where a cluster's tasks can run: the objects that ``Cluster(launcher=...)`` takes.

`Launcher` and `Node`, or `RemoteLauncher` and `RemoteHost`, are for those who write one of their
own.
"""

from tfd_notebook.launch.base import Launcher, Node
from tfd_notebook.launch.fake import Fake
from tfd_notebook.launch.inprocess import InProcess
from tfd_notebook.launch.jupyter import Jupyter
from tfd_notebook.launch.link import Channel, SocketChannel
from tfd_notebook.launch.local import Local
from tfd_notebook.launch.remote import RemoteHost, RemoteLauncher, join_agent
from tfd_notebook.launch.spark import Spark
from tfd_notebook.launch.ssh import SSH

__all__ = [
    "SSH",
    "Channel",
    "Fake",
    "InProcess",
    "Jupyter",
    "Launcher",
    "Local",
    "Node",
    "RemoteHost",
    "RemoteLauncher",
    "SocketChannel",
    "Spark",
    "join_agent",
]
