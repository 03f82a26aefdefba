"""The findings of the doctor, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from tfd_notebook.model.diagnostics import FIELDS, Finding, ordered
from tfd_notebook.views.table import Cell, Column, Table, state_cell

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = (
    Column("severity", lambda finding: state_cell(finding["severity"])),
    Column("code"),
    Column("where", drop=1),
    Column("what", note=True),
    Column("why", lambda finding: Cell(finding["why"], tone="quiet"), note=True),
    Column("next", lambda finding: f"Next: {finding['fix']}", note=True),
)


def findings_table(findings: Sequence[Mapping[str, str]], checked: Sequence[str]) -> Table:
    """Return the table of findings, each with the fields `model.diagnostics.FIELDS`.

    Parameters
    ----------
    findings : sequence of mapping
    checked : sequence of str
        The checked things, shown below the table.
    """
    return Table(
        _COLUMNS,
        findings,
        label="findings",
        empty="no findings",
        foot=f"checked: {', '.join(checked)}" + (". More: tfd why CODE" if findings else ""),
        names=FIELDS,
    )


class Findings(Sequence[Finding]):
    """Findings of the doctor, the most severe first, displayed as a table.

    Parameters
    ----------
    findings : iterable of Finding
    checked : sequence of str
        Short names of the checked things.
    """

    def __init__(self, findings: Iterable[Finding], checked: Sequence[str]) -> None:
        self._findings = ordered(findings)
        self.checked = tuple(checked)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Findings) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self._findings)

    @property
    def codes(self) -> tuple[str, ...]:
        """The distinct codes."""
        return tuple(dict.fromkeys(finding.code for finding in self))

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity ``error``."""
        return tuple(finding for finding in self if finding.severity == "error")

    @property
    def table(self) -> Table:
        """The table of the findings."""
        return findings_table(self.records(), self.checked)

    def records(self) -> list[dict[str, str]]:
        """Return the findings as dictionaries with code, severity, where, what, why and fix."""
        return [finding.as_dict() for finding in self]

    def to_frame(self) -> pd.DataFrame:
        """Return a DataFrame with the columns code, severity, where, what, why and fix."""
        return self.table.to_frame()

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, index: int | slice) -> Finding | tuple[Finding, ...]:
        return self._findings[index]

    def __len__(self) -> int:
        return len(self._findings)

    def __repr__(self) -> str:
        return self.table.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.table._repr_mimebundle_()
