"""Which of Spark's slots the clusters of this process hold, for whoever needs some."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook._compat import pyspark as private

_holders: list[Callable[[], Mapping[str, int]]] = []


def register_slot_holder(holders: Callable[[], Mapping[str, int]]) -> None:
    """Have `holders` asked for the names of clusters and how many slots each holds."""
    _holders.append(holders)


def slots_held() -> dict[str, int]:
    """Return how many slots each cluster holds, by its name; only those that hold any."""
    return {name: count for holders in _holders for name, count in holders().items() if count}


def report(slots: int, holding: Mapping[str, int]) -> str:
    """Return in words how many tasks Spark runs at once, and for how many there is room."""
    said = f"Spark can run {slots} task{'s' * (slots != 1)} at once"
    if not holding:
        return said
    free = left(slots, holding)
    holders = ", ".join(f"cluster {name!r} holds {count}" for name, count in holding.items())
    return f"{said}, of which {free} {'is' if free == 1 else 'are'} free: {holders}"


def left(slots: int, holding: Mapping[str, int]) -> int:
    """Return how many slots no cluster holds; other jobs of Spark give theirs back."""
    return max(slots - sum(holding.values()), 0)


#: Seconds for executors that are expected and not there yet.
ARRIVE_SECONDS = 60.0

#: Where nobody knows how many there will be, no other has come for so many seconds.
_SETTLED_SECONDS = 1.0


def expected(context: Any) -> int:
    """Return how many executors Spark was asked for; 0 where that cannot be known."""
    settings = context.getConf()
    if found := re.fullmatch(r"local-cluster\[\s*(\d+).*", context.master):
        return int(found[1])
    if instances := settings.get("spark.executor.instances"):
        return int(instances)
    most, cores = settings.get("spark.cores.max"), settings.get("spark.executor.cores")
    return int(most) // int(cores) if most and cores else 0


def are_coming(context: Any) -> bool:
    """Whether there will be more executors than there are."""
    settings = context.getConf()
    dynamic = settings.get("spark.dynamicAllocation.enabled", "false").strip().lower() == "true"
    if dynamic or re.match(r"local(\[|$)", context.master):
        return False
    if wanted := expected(context):
        return len(private.executors(context)) < wanted
    return time.time() - float(context.startTime) / 1000 < ARRIVE_SECONDS


def wait_for_executors(context: Any, enough: Callable[[], bool]) -> None:
    """Wait until there are enough, no more are to come, or a minute has passed."""
    deadline = time.monotonic() + ARRIVE_SECONDS
    while not enough() and are_coming(context) and time.monotonic() < deadline:
        time.sleep(0.1)


class AllExecutorsRegistered:
    """Whether all are there, as far as can be known: an `enough` for `wait`."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._seen, self._since = -1, time.monotonic()

    def __call__(self) -> bool:
        count = len(private.executors(self._context))
        if count != self._seen:
            self._seen, self._since = count, time.monotonic()
        if wanted := expected(self._context):
            return count >= wanted
        return count > 0 and time.monotonic() - self._since > _SETTLED_SECONDS
