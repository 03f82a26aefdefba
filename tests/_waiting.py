"""Waiting for what no event tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(holds: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait until `holds()` is true, and return what it is."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value
