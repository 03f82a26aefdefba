"""Registry of the Spark task slots held by this process's clusters."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook._compat import pyspark as private

_holders: list[Callable[[], Mapping[str, int]]] = []


def register_slot_holder(holders: Callable[[], Mapping[str, int]]) -> None:
    """Register a callable that returns the number of slots held by each cluster, by name."""
    _holders.append(holders)


def slots_held() -> dict[str, int]:
    """Return the number of slots of each cluster that holds any, by name."""
    return {name: count for holders in _holders for name, count in holders().items() if count}


def report(slots: int, holding: Mapping[str, int]) -> str:
    """Return a sentence about the number of tasks Spark runs at once, and the free slots."""
    summary = f"Spark can run {slots} task{'s' * (slots != 1)} at once"
    if not holding:
        return summary
    free = left(slots, holding)
    holders = ", ".join(f"cluster {name!r} holds {count}" for name, count in holding.items())
    return f"{summary}, of which {free} {'is' if free == 1 else 'are'} free: {holders}"


def left(slots: int, holding: Mapping[str, int]) -> int:
    """Return the number of slots that no cluster holds. Other Spark jobs release theirs."""
    return max(slots - sum(holding.values()), 0)


#: Seconds to wait for expected executors that have not registered yet.
ARRIVE_SECONDS = 60.0

#: Seconds without a new executor after which all are assumed present, if the number is unknown.
_SETTLED_SECONDS = 1.0


def expected(context: Any) -> int:
    """Return the number of executors requested from Spark; 0 if it is unknown."""
    settings = context.getConf()
    if local_cluster := re.fullmatch(r"local-cluster\[\s*(\d+).*", context.master):
        return int(local_cluster[1])
    if instances := settings.get("spark.executor.instances"):
        return int(instances)
    most, cores = settings.get("spark.cores.max"), settings.get("spark.executor.cores")
    return int(most) // int(cores) if most and cores else 0


def are_coming(context: Any) -> bool:
    """Return True if more executors are expected than have registered."""
    settings = context.getConf()
    dynamic = settings.get("spark.dynamicAllocation.enabled", "false").strip().lower() == "true"
    if dynamic or re.match(r"local(\[|$)", context.master):
        return False
    if requested := expected(context):
        return len(private.executors(context)) < requested
    return time.time() - float(context.startTime) / 1000 < ARRIVE_SECONDS


def wait_for_executors(context: Any, enough: Callable[[], bool]) -> None:
    """Wait until enough executors registered, no more are expected, or a minute has passed."""
    deadline = time.monotonic() + ARRIVE_SECONDS
    while not enough() and are_coming(context) and time.monotonic() < deadline:
        time.sleep(0.1)


class AllExecutorsRegistered:
    """A condition for `wait_for_executors`: all executors registered, as far as is known."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._count, self._since = -1, time.monotonic()

    def __call__(self) -> bool:
        count = len(private.executors(self._context))
        if count != self._count:
            self._count, self._since = count, time.monotonic()
        if requested := expected(self._context):
            return count >= requested
        return count > 0 and time.monotonic() - self._since > _SETTLED_SECONDS
