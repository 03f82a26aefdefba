"""What a code means, from the pages of the documentation, which a wheel carries as data."""

from __future__ import annotations

import difflib
import re
import textwrap
from pathlib import Path

from tfd_notebook.errors import UnknownName

_HEADING = re.compile(r"^### (TFD\d{3}) · (\w+) · (.+)$")
_CELLS = 5


def codes() -> dict[str, str]:
    """Return the entry of each code, findings and errors, as text."""
    return dict(sorted({**_errors(_page("errors.md")), **_findings(_page("doctor.md"))}.items()))


def why(code: str, width: int = 100) -> str:
    """Return what a code means and what to do.

    Parameters
    ----------
    code : str
        Such as ``"TFD811"``; ``"811"`` serves, and the name of an error such as ``"NoWorkers"``.
    width : int
        Columns. Default 100.

    Raises
    ------
    UnknownName
        With the nearest code.
    """
    known = codes()
    wanted = code.strip().strip("[]").upper()
    wanted = f"TFD{wanted}" if wanted.isdecimal() else wanted
    named = {text.split(" ", 2)[1].upper(): one for one, text in known.items()}
    found = wanted if wanted in known else named.get(wanted)
    if found is None:
        near = difflib.get_close_matches(wanted, known, n=1)
        raise UnknownName(
            f"there is no code {code!r}",
            fix=(f"did you mean {near[0]!r}? " if near else "")
            + "codes stand in brackets before an error, and in tfd doctor",
        )
    head, *paragraphs = known[found].split("\n")
    return "\n".join([head, *(textwrap.fill(one, max(width, 20)) for one in paragraphs)])


def _page(name: str) -> str:
    page = Path(__file__).with_name("pages") / name
    if not page.exists():  # a checkout, which the package runs from
        page = Path(__file__).parents[2] / "docs" / name
    return page.read_text(encoding="utf-8")


def _errors(page: str) -> dict[str, str]:
    """Return the entries of a page whose errors are rows of a table."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| TFD") and len(cells) == _CELLS:
            code, name, kinds, what, fix = (cell.replace("`", "") for cell in cells)
            also = f", a {kinds}" if kinds else ""
            found[code] = f"{code} {name} (error{also})\n{what}" + (f"\nNext: {fix}" if fix else "")
    return found


def _findings(page: str) -> dict[str, str]:
    """Return the entries of a page whose findings are sections."""
    found: dict[str, str] = {}
    code, paragraph = "", True
    for line in page.splitlines():
        if heading := _HEADING.match(line):
            code = heading[1]
            found[code] = f"{code} {heading[3]} ({heading[2]})"
            paragraph = True
        elif line.startswith("#"):
            code = ""
        elif code and line:
            found[code] += ("\n" if paragraph else " ") + line.replace("`", "")
            paragraph = False
        else:
            paragraph = True
    return found
