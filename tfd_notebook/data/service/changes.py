"""Reports of the changes that a tf.data service makes to elements: refusals and warnings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tfd_notebook.errors import DataChanged, UnknownName, one_of

#: Values of the argument ``semantics``.
SEMANTICS = ("checked", "same", "tensorflow")
#: The end of amounts that grow with the number of data workers.
JOINING = ", and more if data workers join later"
#: The start of a step that several operations can share.
_AFTER = " after distribute"
#: Largest number of changes, and of words, in a summary.
_CHANGES, _WORDS = 3, 90


@dataclass(frozen=True)
class Change:
    """A difference between an epoch through the service and an epoch without it.

    Parameters
    ----------
    kind : str
        ``"pairing" "order" "counting" "neighbors" "grouping" "random" "captured" "python"
        "cached" "external" "undivided"`` or ``"unknown"``.
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
    raise UnknownName(f"invalid semantics={semantics!r}", fix=one_of(semantics, SEMANTICS))


def refuse(changes: list[Change], mode: str, keeping: str = "") -> None:
    """Raise DataChanged if the first change is refused. `keeping` is as in `steps`."""
    if changes and changes[0].refused:
        # The doctor examines a dataset that no service reads as for this mode.
        what, fix = summary(changes, keeping, listed=mode == "DYNAMIC")
        raise DataChanged(
            f'{what} (mode "{mode.lower()}")',
            fix=f'{fix}. semantics="tensorflow" turns this check off',
        )


def reported(changes: list[Change]) -> list[Change]:
    """Return the changes of which ``distribute`` warns."""
    return [change for change in changes if change.kind != "grouping"]


def summary(changes: list[Change], keeping: str = "", listed: bool = True) -> tuple[str, str]:
    """Return the first changes with the number of the others, and the next steps.

    `keeping` is as in `steps`. If `listed` is true, ``tfd.doctor(dataset)`` lists the others.
    """
    for count in range(min(len(changes), _CHANGES), 0, -1):
        others = len(changes) - count
        what, fix = _described(changes[:count]), steps(changes[:count], keeping)
        if others:
            what += f". {others} other change{'s are' if others > 1 else ' is'} not named here"
            fix += ". tfd.doctor(dataset) lists all changes" if listed else ""
        if len(f"{what} {fix}".split()) <= _WORDS:
            break
    return what, fix


def _described(changes: list[Change]) -> str:
    texts = [str(change) for change in changes]
    growing = [number for number, text in enumerate(texts) if text.endswith(JOINING)]
    for number in growing[:-1]:  # the last one has the clause for all of them
        texts[number] = texts[number].removesuffix(JOINING)
    return ". ".join(texts)


def steps(changes: list[Change], keeping: str = "") -> str:
    """Return the next steps, first the arguments of `distribute` that keep the elements, if any."""
    first, *others = _joined(dict.fromkeys(change.fix for change in changes))
    first = f"use {keeping}. Otherwise {first}" if keeping else first
    return ". ".join([first, *(fix[0].upper() + fix[1:] for fix in others)])


def _joined(fixes: Iterable[str]) -> list[str]:
    """Return the steps, with one step for all operations to call in the same place."""
    places: dict[str, list[str]] = {}
    for fix in fixes:
        call, after, place = fix.partition(_AFTER)
        is_call = call.startswith("call ") and call.endswith("()") and " " not in call[5:]
        names = places.setdefault(after + place if is_call else fix, [])
        names += [call.removeprefix("call ")] if is_call else []
    return [
        f"call {' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))}{place}"
        if names
        else place
        for place, names in places.items()
    ]


def joining(mode: str) -> str:
    """Return a clause about data workers that join later, or an empty text."""
    return JOINING if mode == "DYNAMIC" else ""


def times(mode: str, workers: int) -> str:
    """Return how often each data worker delivers an element that it does not share."""
    return f"up to {workers} times{joining(mode)}"


def lost(mode: str, workers: int) -> str:
    """Return the amount if each data worker selects its share from another order."""
    return (
        f"so up to {1 - 1 / workers:.0%} of the elements are missing, and others occur "
        f"{times(mode, workers)}"
    )
