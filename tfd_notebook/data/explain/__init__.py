"""Measurements that find the bottleneck of an input pipeline."""
