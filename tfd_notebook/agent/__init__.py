"""The process on each host that starts and supervises tasks, and its helper processes."""
