"""Finding the cluster that a notebook belongs to: which one it is, and how its tasks are."""

from tfd_notebook.resolution.resolution import Resolution, resolve

__all__ = ["Resolution", "resolve"]
