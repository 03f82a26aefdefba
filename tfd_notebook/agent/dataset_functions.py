"""The Python functions of a cluster's datasets, for data workers that start or restart."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tfd_notebook.errors import StateError

#: Limit in bytes of the functions that a cluster's agent, and each of its data workers, stores.
LARGEST = 1_000_000_000


class Functions:
    """Pickled functions, in sets, by the tokens that name them in graphs.

    A set is dropped when each of its tokens is unused or is part of a later set.
    """

    def __init__(self) -> None:
        self._sets: dict[tuple[str, ...], bytes] = {}
        self._unused: set[str] = set()

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], bytes]]:
        return iter(tuple(self._sets.items()))

    @property
    def size(self) -> int:
        """The total number of bytes."""
        return sum(map(len, self._sets.values()))

    def add(self, tokens: Collection[str], blob: bytes) -> None:
        """Add a set of functions.

        Raises
        ------
        StateError
            The total size would exceed `LARGEST`.
        """
        key = tuple(tokens)
        size = self.size - len(self._sets.get(key, b"")) + len(blob)
        if size > LARGEST:
            raise StateError(
                f"the Python functions of the datasets in use need {size / 1e6:.0f} MB with the "
                f"data that they refer to, and a data worker stores at most "
                f"{LARGEST / 1e6:.0f} MB",
                fix="delete datasets that are no longer read (del dataset), load the data "
                "inside the functions, or start the cluster again",
            )
        self._sets.pop(key, None)  # move a repeated set to the end
        self._sets[key] = blob
        self._unused.difference_update(key)
        self._drop_unused()

    def remove_unused(self, tokens: Collection[str]) -> None:
        """Remove the sets whose functions no dataset uses any more."""
        self._unused.update(tokens)
        self._drop_unused()

    def remove(self, tokens: Collection[str]) -> None:
        """Remove a set that could not be installed."""
        self._sets.pop(tuple(tokens), None)

    def _drop_unused(self) -> None:
        covered = set(self._unused)
        for key in reversed(tuple(self._sets)):
            if covered.issuperset(key):
                del self._sets[key]
            else:
                covered.update(key)
        self._unused &= {token for key in self._sets for token in key}
