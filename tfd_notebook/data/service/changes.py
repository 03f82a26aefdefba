"""Reports of the changes that a tf.data service makes to elements: refusals and warnings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfd_notebook.errors import DataChanged, UnknownName

#: Values of the argument ``semantics``.
SEMANTICS = ("checked", "same", "tensorflow")


@dataclass(frozen=True)
class Change:
    """A difference between an epoch through the service and an epoch without it.

    Parameters
    ----------
    kind : str
        ``"pairing" "order" "counting" "neighbors" "grouping" "random" "captured" "python"
        "cached" "external"`` or ``"unknown"``.
    operation : str
        The operation in the user's notation, with its line if known.
    what : str
        The change, without a full stop.
    fix : str
        The next step.
    refused : bool
        Whether ``semantics="checked"`` refuses the dataset.
    """

    kind: str
    operation: str
    what: str
    fix: str
    refused: bool = False

    def __str__(self) -> str:
        return f"{self.operation}: {self.what}"


def check_semantics(semantics: Any) -> str:
    """Return `semantics`. Raise UnknownName if it is not one of `SEMANTICS`."""
    if isinstance(semantics, str) and semantics in SEMANTICS:
        return semantics
    raise UnknownName(
        f"invalid semantics={semantics!r}", fix=f"use one of {', '.join(map(repr, SEMANTICS))}"
    )


def refuse(changes: list[Change], mode: str, keeping: str = "") -> None:
    """Raise DataChanged for the first change that is refused. `keeping` is as in `steps`."""
    for change in changes:
        if change.refused:
            raise DataChanged(
                f'{change} (mode "{mode.lower()}")',
                fix=f'{steps([change], keeping)}. semantics="tensorflow" turns this check off',
            )


def reported(changes: list[Change]) -> list[Change]:
    """Return the changes of which ``distribute`` warns."""
    return [change for change in changes if change.kind != "grouping"]


def steps(changes: list[Change], keeping: str = "") -> str:
    """Return the next steps, first the arguments of `distribute` that keep the elements, if any."""
    first, *others = dict.fromkeys(change.fix for change in changes)
    first = f"use {keeping}. Otherwise {first}" if keeping else first
    return ". ".join([first, *(fix[0].upper() + fix[1:] for fix in others)])
