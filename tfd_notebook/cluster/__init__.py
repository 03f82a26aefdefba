"""Clusters: the `Cluster` class and its components."""
