"""Where tasks run, and what looks after them there."""
