"""A wait for conditions that no event signals."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: Seconds for servers of the tf.data service. If TensorFlow's autotuning thread misses the end of
#: an iterator, it ends at its next period. That is up to 60 s later.
SERVER_STOP_SECONDS = 75.0


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until `holds()` is true, and return its value."""
    deadline = time.monotonic() + seconds
    began = time.thread_time()
    while not (value := holds()):
        assert time.monotonic() < deadline, "the condition was not met in time"
        # Expensive checks take at most a fifth of a core.
        time.sleep(max(0.01, 4 * (time.thread_time() - began)))
        began = time.thread_time()
    return value
