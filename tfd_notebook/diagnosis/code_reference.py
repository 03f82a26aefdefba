"""Explanations of codes, from the pages of the documentation that a wheel contains."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from tfd_notebook.errors import UnknownName, nearest

_HEADING = re.compile(r"^### (TFD\d{3}) · (\w+) · (.+)$")
_CELLS = 5


def codes() -> dict[str, str]:
    """Return the entries of all findings and errors by code, as text."""
    return dict(sorted({**_errors(_page("errors.md")), **_findings(_page("doctor.md"))}.items()))


def why(code: str, width: int = 100) -> str:
    """Return the explanation of a code, with the next step.

    Parameters
    ----------
    code : str
        A code such as ``"TFD811"`` or ``"811"``, or the name of an error such as ``"NoWorkers"``.
    width : int
        Columns. Default 100.

    Raises
    ------
    UnknownName
        The error suggests the nearest code.
    """
    entries = codes()
    name = code.strip().strip("[]").upper()
    name = f"TFD{name}" if name.isdecimal() else name
    codes_by_name = {text.split(" ", 2)[1].upper(): key for key, text in entries.items()}
    key = name if name in entries else codes_by_name.get(name)
    if key is None:
        raise UnknownName(
            f"no code {code!r}",
            fix=nearest(name, entries)
            + "errors start with their code in brackets, and tfd doctor shows codes",
        )
    head, *paragraphs = entries[key].split("\n")
    filled = (textwrap.fill(paragraph, max(width, 20)) for paragraph in paragraphs)
    return "\n".join([head, *filled])


def _page(name: str) -> str:
    page = Path(__file__).with_name("pages") / name
    if not page.exists():  # The package runs from a checkout.
        page = Path(__file__).parents[2] / "docs" / name
    return page.read_text(encoding="utf-8")


def _plain(text: str) -> str:
    """Return Markdown without code marks, and with the path of a page in place of a link to it."""
    links = re.sub(r"\[([^]]*)\]\(([^)#]*)[^)]*\)", lambda link: link[1] or f"docs/{link[2]}", text)
    return links.replace("`", "")


def _errors(page: str) -> dict[str, str]:
    """Return the entries of a page that has a row of a table for each error."""
    entries = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| TFD") and len(cells) == _CELLS:
            code, name, kinds, what, fix = map(_plain, cells)
            also = f", a {kinds}" if kinds else ""
            next_step = f"\nNext: {fix}" if fix else ""
            entries[code] = f"{code} {name} (error{also})\n{what}{next_step}"
    return entries


def _findings(page: str) -> dict[str, str]:
    """Return the entries of a page that has a section for each finding."""
    entries: dict[str, str] = {}
    code, paragraph = "", True
    for line in page.splitlines():
        if heading := _HEADING.match(line):
            code = heading[1]
            entries[code] = f"{code} {heading[3]} ({heading[2]})"
            paragraph = True
        elif line.startswith("#"):
            code = ""
        elif code and line:
            entries[code] += ("\n" if paragraph else " ") + _plain(line)
            paragraph = False
        else:
            paragraph = True
    return entries
