"""Cancelling what one thread calls: TensorFlow's own context of it is one for all threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tensorflow.python.eager import cancellation

CancellationManager = cancellation.CancellationManager
_everybodys = cancellation.context
_local = threading.local()


@contextlib.contextmanager
def by(manager: Any) -> Iterator[None]:
    """Have the functions that this thread calls be cancelled by `manager`."""
    before = getattr(_local, "manager", None)
    _local.manager = manager
    try:
        yield
    finally:
        _local.manager = before


def current() -> Any:
    """Return what would cancel a function that this thread calls, None where nothing would."""
    return getattr(_local, "manager", None) or _everybodys()


cancellation.context = current
