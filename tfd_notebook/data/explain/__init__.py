"""Runs of a pipeline that measure its bottleneck and try a fix."""
