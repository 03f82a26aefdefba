"""A wait for conditions that no event signals."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(holds: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait until `holds()` is true, and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)
    return value
