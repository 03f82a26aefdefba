"""The Python functions of a cluster's datasets, for data workers that start or restart."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tfd_notebook.errors import StateError

#: Bytes of functions that a cluster's agent, and each of its data workers, holds.
LARGEST = 1_000_000_000


class Functions:
    """Pickled functions, each set of them under the tokens that name them in graphs.

    A set is dropped when all its tokens are forgotten or are part of a later set.
    """

    def __init__(self) -> None:
        self._sets: dict[tuple[str, ...], bytes] = {}
        self._forgotten: set[str] = set()

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], bytes]]:
        return iter(tuple(self._sets.items()))

    @property
    def size(self) -> int:
        """The total number of bytes."""
        return sum(map(len, self._sets.values()))

    def add(self, tokens: Collection[str], blob: bytes) -> None:
        """Keep a set of functions.

        Raises
        ------
        StateError
            All together would be larger than `LARGEST`.
        """
        key = tuple(tokens)
        size = self.size - len(self._sets.get(key, b"")) + len(blob)
        if size > LARGEST:
            raise StateError(
                f"the Python functions of the datasets in use would have {size / 1e6:.0f} MB with "
                f"the data that they refer to, and a data worker keeps at most "
                f"{LARGEST / 1e6:.0f} MB",
                fix="delete datasets that are not read any more (del dataset), load the data "
                "inside the functions, or start the cluster again",
            )
        self._sets.pop(key, None)  # a set that is repeated is the latest
        self._sets[key] = blob
        self._forgotten.difference_update(key)
        self._drop_unused()

    def forget(self, tokens: Collection[str]) -> None:
        """Note functions that no dataset uses any more."""
        self._forgotten.update(tokens)
        self._drop_unused()

    def remove(self, tokens: Collection[str]) -> None:
        """Drop a set that could not be installed."""
        self._sets.pop(tuple(tokens), None)

    def _drop_unused(self) -> None:
        covered = set(self._forgotten)
        for key in reversed(tuple(self._sets)):
            if covered.issuperset(key):
                del self._sets[key]
            else:
                covered.update(key)
        self._forgotten &= {token for key in self._sets for token in key}
