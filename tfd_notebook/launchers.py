"""Where a cluster's tasks can run: the objects that ``Cluster(launcher=...)`` takes."""

from tfd_notebook.launch.base import Launcher, Node
from tfd_notebook.launch.fake import Fake
from tfd_notebook.launch.inprocess import InProcess
from tfd_notebook.launch.local import Local
from tfd_notebook.launch.ssh import SSH

__all__ = ["SSH", "Fake", "InProcess", "Launcher", "Local", "Node"]
