"""Connections from the kernel to agents."""
