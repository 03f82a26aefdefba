"""The process on each host that starts and supervises tasks, and what runs below it."""
