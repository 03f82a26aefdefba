"""Coordinators are told while somebody looks who could resume them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tfd_notebook.errors import TfdError

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster
    from tfd_notebook.coordinator.coordinator import Coordinator


class Presences:
    """Somebody's presence at clusters; a ``join`` of a paused coordinator waits for them."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Coordinator, contextlib.ExitStack]] = {}

    @property
    def any(self) -> bool:
        """Whether some coordinator was told."""
        return bool(self._held)

    def renew(self, living: Mapping[str, Cluster], looking: Iterable[frozenset[str]]) -> None:
        """Tell the coordinators of the clusters that are looked at, and no longer the others."""
        present = {}
        for name in frozenset().union(*looking) & living.keys():
            with contextlib.suppress(TfdError):
                if living[name].has_coordinator:
                    present[name] = living[name].present_coordinator()
        for name, (coordinator, held) in list(self._held.items()):
            if present.get(name) is not coordinator:
                del self._held[name]
                held.close()
        for name in present.keys() - self._held.keys():
            stack = contextlib.ExitStack()
            # One that is stopped by now, or cannot be paused at all, need not know.
            with contextlib.suppress(TfdError):
                stack.enter_context(present[name].control())
            self._held[name] = present[name], stack
