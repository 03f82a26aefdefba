"""Clusters: the object that users hold, and its components."""
