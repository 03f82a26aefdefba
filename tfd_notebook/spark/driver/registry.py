"""The clusters on Spark of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfd_notebook.cluster import registry
from tfd_notebook.launchers import spark_slots

if TYPE_CHECKING:
    from tfd_notebook.spark.driver.cluster import Life
    from tfd_notebook.spark.TFCluster import TFCluster

_lock = threading.Lock()
_living: dict[str, Any] = {}
_last: Any = None
_callbacks: list[Callable[[], None]] = []


def living() -> Mapping[str, TFCluster]:
    """Return those that have not ended, by name, the newest last."""
    with _lock:
        return dict(_living)


def last() -> TFCluster | None:
    """Return the newest, ended or not; None where there was none."""
    found: TFCluster | None = _last
    return found


def on_change(callback: Callable[[], None]) -> None:
    """Have `callback` called when a cluster starts or ends."""
    with _lock:
        if callback not in _callbacks:
            _callbacks.append(callback)


def forget(callback: Callable[[], None]) -> None:
    """Call it no more."""
    with _lock, contextlib.suppress(ValueError):
        _callbacks.remove(callback)


def add(cluster: Life, name: str | None) -> str:
    """Note a cluster that starts; return its name, which no other living one has."""
    global _last
    with _lock:
        number, chosen = 1, name or "spark"
        while chosen in _living:
            number += 1
            chosen = f"{name or 'spark'}-{number}"
        _living[chosen] = cluster
        _last = cluster
    _tell()
    registry.one_starts()
    return chosen


def remove(cluster: Life) -> None:
    """Note that a cluster has ended."""
    with _lock:
        for name in [name for name, other in _living.items() if other is cluster]:
            del _living[name]
    _tell()


def _tell() -> None:
    with _lock:
        callbacks = list(_callbacks)
    for callback in callbacks:
        callback()


spark_slots.ask(lambda: {name: one.slots_held for name, one in living().items()})
