"""What the doctor found, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfd_notebook.model.diagnostics import FIELDS
from tfd_notebook.views.table import Cell, Column, Table, state_cell

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
