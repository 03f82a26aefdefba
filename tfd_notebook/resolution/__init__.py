"""Detection of the cluster that a notebook belongs to, and of the state of its tasks."""

from tfd_notebook.resolution.resolution import Resolution, resolve

__all__ = ["Resolution", "resolve"]
