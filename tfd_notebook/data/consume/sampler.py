"""The thread that samples the consumers of this process once a second, while one is active."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from typing import TYPE_CHECKING

from tfd_notebook.data.bottleneck.live_limit import ProcessSampler

if TYPE_CHECKING:
    from tfd_notebook.data.consume.consumers import Consumers

_lock = threading.Lock()
_registries: set[Consumers] = set()
# Iterators also end in the garbage collector, where a thread may put into no other queue.
_wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
_process: ProcessSampler | None = None


def watch(registry: Consumers) -> None:
    """Sample the consumers of `registry` until none of them is active."""
    global _process
    with _lock:
        starts = not _registries
        _registries.add(registry)
        if starts:
            _process = ProcessSampler()
            threading.Thread(target=_run, args=(_process,), name="tfd-sampler", daemon=True).start()


def wake() -> None:
    """Take the last sample of the consumers that have just ended."""
    _wakeups.put(None)


def busy_cores() -> float:
    """Return the number of busy cores of this host in the last second, or 0 if unknown."""
    return _process.machine if _process is not None else 0.0


def _run(process: ProcessSampler) -> None:
    global _process
    due, is_active = 0, True
    while is_active:
        due = due or math.floor(time.perf_counter()) + 1
        with contextlib.suppress(queue.Empty):
            _wakeups.get(timeout=max(0.0, due - time.perf_counter()))
        is_due = time.perf_counter() >= due
        if is_due:
            process.sample()
            due = 0
        with _lock:
            registries = tuple(_registries)
            # Before the samples: a consumer that ends in between needs another one.
            _registries.intersection_update([each for each in registries if each.active])
            is_active = bool(_registries)
            if not is_active:
                _process = None  # the next thread must not measure the gap
        for registry in registries:
            registry.sample(process if is_due else None)


def _after_fork() -> None:
    global _lock, _wakeups
    _lock, _wakeups = threading.Lock(), queue.SimpleQueue()
    _registries.clear()


os.register_at_fork(after_in_child=_after_fork)
