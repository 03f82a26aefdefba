"""Where a cluster's tasks can run: the objects that ``Cluster(launcher=...)`` takes."""

from tfd_notebook.launch.base import Launcher, Node
from tfd_notebook.launch.fake import Fake
from tfd_notebook.launch.inprocess import InProcess
from tfd_notebook.launch.local import Local

__all__ = ["Fake", "InProcess", "Launcher", "Local", "Node"]
