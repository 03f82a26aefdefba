"""What others want to be told of clusters, without knowing more of them."""

from __future__ import annotations

from collections.abc import Callable

_starting: list[Callable[[], object]] = []


def when_one_starts(told: Callable[[], object]) -> None:
    """Have `told` called whenever a cluster of this process starts."""
    _starting.append(told)


def forget(told: Callable[[], object]) -> None:
    """Call it no more."""
    if told in _starting:
        _starting.remove(told)


def one_starts() -> None:
    """Tell all who asked."""
    for told in tuple(_starting):
        told()
