"""The table of all views, with text of a given width, HTML and records."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from tfd_notebook.views import formatting as figures
from tfd_notebook.views.style import wrap

if TYPE_CHECKING:
    import pandas as pd

#: Maximum number of rows of `urgent_table`.
MAX_ROWS = 50
_URGENCY = (
    "failed",
    "lost",
    "hung",
    "restarting",
    "starting",
    "planned",
    "reserved",
    "paused",
    "new",
    "running",
    "idle",
    "ready",
    "finished",
    "stopped",
)
_GAP = "  "
#: Minimum width of truncated text.
_MIN_WIDTH = 8


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Parameters
    ----------
    text : str
    tone : str
        Color of the cell in HTML: ``"good"``, ``"warn"``, ``"bad"`` or ``"quiet"``.
    history : tuple of float
        Values of a sparkline that replaces the text.
    """

    text: str = ""
    tone: str = ""
    history: tuple[float, ...] = ()


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Parameters
    ----------
    title : str
    cell : callable, optional
        Returns the cell, or its text, of a row. Default: the row's value with the title as its
        name.
    right : bool
        Whether the cells are right-aligned, for numbers.
    drop : int
        If text is too wide, columns with the highest `drop` are removed first. 0 (the default)
        keeps the column.
    note : bool
        Whether the cells move below their row if text is too wide.
    """

    title: str
    cell: Callable[[Any], Cell | str | int | None] | None = None
    right: bool = False
    drop: int = 0
    note: bool = False

    def of(self, row: Any) -> Cell:
        """Return the cell of a row. None is empty."""
        value = self.cell(row) if self.cell else value_of(row, self.title)
        return value if isinstance(value, Cell) else Cell("" if value is None else str(value))


def value_of(row: Any, name: str) -> Any:
    """Return a value of a row, which is a mapping or an object with attributes."""
    return row[name] if isinstance(row, Mapping) else getattr(row, name)


def state_cell(state: str) -> Cell:
    """Return the cell of a state, with its sign, name and color."""
    return Cell(figures.signed(state), tone=figures.tone(state))


#: The column of the rows' states.
STATE = Column("state", lambda row: state_cell(str(value_of(row, "state"))))

Row = Sequence[Cell]


def _text_table(columns: Sequence[Column], rows: Sequence[Row], width: int) -> list[str]:
    """Return the lines of a table, at most `width` columns wide if possible."""
    if not rows:
        return []
    words = [[_cell_text(cell) for cell in row] for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i] for row in words)]

    def natural(i: int) -> int:
        return max(
            figures.columns_of(columns[i].title), *(figures.columns_of(row[i]) for row in words)
        )

    widths = {i: natural(i) for i in kept}

    def excess() -> int:
        return sum(widths[i] for i in kept) + len(_GAP) * (len(kept) - 1) - width

    notes = []
    if excess() > 0:
        notes = [i for i in kept if columns[i].note]
        kept = [i for i in kept if i not in notes]
    # Truncate long cells to a readable width before removing columns.
    elastic = [i for i in kept if not columns[i].right]
    _shrink(widths, elastic, excess, 3 * _MIN_WIDTH)
    while excess() > 0 and (droppable := [i for i in kept if columns[i].drop]):
        kept.remove(max(droppable, key=lambda i: columns[i].drop))
    _shrink(widths, [i for i in elastic if i in kept], excess, _MIN_WIDTH)

    def line(texts: Sequence[str]) -> str:
        cells = (
            figures.pad(figures.fit(texts[i], widths[i]), widths[i], columns[i].right) for i in kept
        )
        return _GAP.join(cells).rstrip()

    lines = [line([column.title for column in columns])]
    for row in words:
        lines.append(line(row))
        for i in notes:
            lines += textwrap.wrap(
                row[i], max(width, 20), initial_indent="  └ ", subsequent_indent="    "
            )
    return lines


def _shrink(widths: dict[int, int], among: list[int], excess: Any, least: int) -> None:
    while (over := excess()) > 0 and among:
        widest = max(among, key=widths.__getitem__)
        if widths[widest] <= least:
            return
        widths[widest] = max(least, widths[widest] - over)


def _cell_text(cell: Cell) -> str:
    return figures.sparkline(cell.history) if cell.history else figures.clean(cell.text)


def _html_table(columns: Sequence[Column], rows: Sequence[Row], label: str) -> str:
    """Return a table element. `label` is its name for screen readers."""
    if not rows:
        return ""
    kept = [
        i for i in range(len(columns)) if any(row[i].text.strip() or row[i].history for row in rows)
    ]
    head = "".join(
        f'<th scope="col"{_right(columns[i])}>{escape(columns[i].title)}</th>' for i in kept
    )
    body = "".join(f"<tr>{''.join(_td(columns[i], row[i]) for i in kept)}</tr>" for row in rows)
    return (
        f'<div class="tfd-scroll"><table aria-label="{escape(label)}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _right(column: Column) -> str:
    return ' class="tfd-r"' if column.right else ""


def _td(column: Column, cell: Cell) -> str:
    if cell.history:
        return f"<td>{_sparkline_svg(cell.history)}</td>"
    classes = [
        *(["tfd-r"] if column.right else []),
        *(["tfd-note"] if column.note else []),
        *([f"tfd-{cell.tone}"] if cell.tone else []),
    ]
    text = escape(cell.text)
    # The style sheet truncates long cells, so the title has the full text.
    title = f' title="{text}"' if len(cell.text) > 16 and not column.note else ""
    kind = f' class="{" ".join(classes)}"' if classes else ""
    return f"<td{kind}{title}>{text}</td>"


def _sparkline_svg(values: Sequence[float], width: int = 96, height: int = 16) -> str:
    """Return the last 60 values as an SVG line chart with a text alternative."""
    shown = [max(value, 0.0) for value in values[-60:]]
    top = max(shown, default=0.0) or 1.0
    step = width / max(len(shown) - 1, 1)
    points = [(i * step, height - 1 - value / top * (height - 2)) for i, value in enumerate(shown)]
    if len(points) == 1:
        points.append((float(width), points[0][1]))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    words = (
        f"elements per second over the last {len(shown)} s: "
        f"now {figures.count(shown[-1])}, at most {figures.count(max(shown))}"
    )
    return (
        f'<svg role="img" aria-label="{words}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><title>{words}</title><polyline points="{path}" '
        'fill="none" stroke="currentColor" stroke-width="1.5" stroke-linejoin="round"/></svg>'
    )


class Table:
    """A table that displays itself as text and HTML, with JSON records and a DataFrame.

    Parameters
    ----------
    columns : sequence of Column
    rows : iterable
        Mappings or objects, from which the columns take their cells.
    label : str
        Name of the rows, such as ``"clusters"``.
    empty : str
        Text for a table without rows.
    records : list of dict, optional
        The rows as JSON values. Default: the values of `names` or, without them, the text of the
        cells.
    foot : str
        A sentence below the rows.
    names : sequence of str
        The keys in the records, so that an empty DataFrame has columns.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Iterable[Any],
        *,
        label: str,
        empty: str = "",
        records: list[dict[str, Any]] | None = None,
        foot: str = "",
        names: Sequence[str] = (),
    ) -> None:
        rows = list(rows)
        # Without functions, which cannot be pickled.
        self.columns = tuple(replace(column, cell=None) for column in columns)
        self.rows = tuple(tuple(column.of(row) for column in columns) for row in rows)
        self.label = label
        self.empty = empty
        self.foot = foot
        if records is None and names:
            records = [{name: value_of(row, name) for name in names} for row in rows]
        self._records = records
        self._names = list(names) or None

    def records(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries of JSON values."""
        if self._records is not None:
            return self._records
        titles = [column.title for column in self.columns]
        return [dict(zip(titles, map(_cell_text, row), strict=True)) for row in self.rows]

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a DataFrame."""
        import pandas as pd

        return pd.DataFrame.from_records(self.records(), columns=self._names)

    def lines(self, width: int) -> list[str]:
        """Return the lines of text, at most `width` columns wide if possible."""
        lines = _text_table(self.columns, self.rows, width)
        if not lines and self.empty:
            lines = [self.empty]
        return [*lines, *textwrap.wrap(figures.clean(self.foot), max(width, 20))]

    def element(self) -> str:
        """Return the HTML without the style sheet."""
        empty = f"<div>{escape(self.empty)}</div>" if self.empty else ""
        foot = f'<div class="tfd-quiet">{escape(self.foot)}</div>' if self.foot else ""
        return (_html_table(self.columns, self.rows, self.label) or empty) + foot

    def text(self, width: int = 110) -> str:
        """Return the table as text, at most `width` columns wide if possible."""
        return "\n".join(self.lines(width))

    def html(self) -> str:
        """Return the table as HTML."""
        return wrap(self.element())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}


def urgent_table(columns: Sequence[Column], rows: Sequence[Any], label: str) -> Table:
    """Return the table of the rows with the most urgent states, and a foot about the others."""
    foot = ""
    if len(rows) > MAX_ROWS:
        rows = sorted(rows, key=urgency)
        left = Counter(str(row.state) for row in rows[MAX_ROWS:])
        kinds = ", ".join(f"{number:,} {state}" for state, number in left.items())
        foot = f"… and {len(rows) - MAX_ROWS:,} more ({kinds})"
    return Table(columns, rows[:MAX_ROWS], label=label, foot=foot)


def urgency(row: Any) -> int:
    """Return the sort key of a row, which is lower for states that are more urgent."""
    state = str(row.state)
    return _URGENCY.index(state) if state in _URGENCY else 0
