"""Which of Spark's slots the clusters of this process hold, for whoever needs some."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_holders: list[Callable[[], Mapping[str, int]]] = []


def ask(holders: Callable[[], Mapping[str, int]]) -> None:
    """Have `holders` asked for the names of clusters and how many slots each holds."""
    _holders.append(holders)


def held() -> dict[str, int]:
    """Return how many slots each cluster holds, by its name; only those that hold any."""
    return {name: count for holders in _holders for name, count in holders().items() if count}


def told(slots: int, holding: Mapping[str, int]) -> str:
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
