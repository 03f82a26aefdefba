"""What the doctor found, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from tfd_notebook.model.diagnostics import FIELDS, Finding, ordered
from tfd_notebook.views.table import Cell, Column, Table, state_cell

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = (
    Column("severity"),
    Column("code"),
    Column("where", drop=1),
    Column("what", note=True),
    Column("why", note=True),
    Column("next", note=True),
)


def findings_table(found: Sequence[Mapping[str, str]], looked_at: Sequence[str]) -> Table:
    """Return the table of findings, each with the fields `model.diagnostics.FIELDS`.

    Parameters
    ----------
    found : sequence of mapping
    looked_at : sequence of str
        Said below the table.
    """
    rows = [
        (
            state_cell(one["severity"]),
            Cell(one["code"]),
            Cell(one["where"]),
            Cell(one["what"]),
            Cell(one["why"], tone="quiet"),
            Cell(f"Next: {one['fix']}"),
        )
        for one in found
    ]
    looked = ", ".join(looked_at)
    return Table(
        _COLUMNS,
        rows,
        label="findings",
        empty="nothing was found",
        records=[dict(one) for one in found],
        foot=f"looked at: {looked}" + (". tfd why CODE tells more" if rows else ""),
        names=FIELDS,
    )


class Findings(Sequence[Finding]):
    """What was found, the worst first; it shows itself as a table.

    Parameters
    ----------
    found : iterable of Finding
    looked_at : sequence of str
        In a few words each.
    """

    def __init__(self, found: Iterable[Finding], looked_at: Sequence[str]) -> None:
        self._found = ordered(found)
        self.looked_at = tuple(looked_at)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes, each once."""
        return tuple(dict.fromkeys(one.code for one in self))

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Those that keep something from working."""
        return tuple(one for one in self if one.severity == "error")

    @property
    def table(self) -> Table:
        """The table of them."""
        return findings_table(self.records(), self.looked_at)

    def records(self) -> list[dict[str, str]]:
        """Return them as JSON values: dictionaries of code, severity, where, what, why and fix."""
        return [one.as_dict() for one in self]

    def to_frame(self) -> pd.DataFrame:
        """Return them as a DataFrame with the columns code, severity, where, what, why and fix."""
        import pandas as pd

        return pd.DataFrame.from_records(self.records(), columns=list(FIELDS))

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, index: int | slice) -> Finding | tuple[Finding, ...]:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return self.table.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.table.text(), "text/html": self.table.html()}
