"""The parts of a view. Each renders itself as text and as HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

from tfd_notebook.views import formatting as figures
from tfd_notebook.views.style import wrap


class Block(Protocol):
    """A part of a view, such as a `Table`."""

    def lines(self, width: int) -> list[str]:
        """Return the lines of text, at most `width` columns wide if possible."""

    def element(self) -> str:
        """Return the HTML without the style sheet."""


#: The blocks of a view in sections. Text has an empty line between two sections.
Sections = Iterable[Sequence[Block]]


def text(sections: Sections, width: int = 110) -> str:
    """Return a view as text without a trailing newline and without control characters."""
    parts = [[line for block in section for line in block.lines(width)] for section in sections]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def html(sections: Sections) -> str:
    """Return a view as one HTML element with its style sheet. All text is escaped."""
    return wrap("".join(block.element() for section in sections for block in section))


def bundle(sections: Sections) -> dict[str, str]:
    """Return the text and the HTML of a view by MIME type."""
    sections = list(sections)
    return {"text/plain": text(sections), "text/html": html(sections)}


@dataclass(frozen=True)
class Head:
    """The first line of a view.

    Parameters
    ----------
    words : str
        The first words of the line of text.
    spans : sequence of tuple of str and str
        These words in HTML, each with its tone, or with ``"name"``.
    facts : sequence of str
        Short facts after them.
    """

    words: str
    spans: Sequence[tuple[str, str]]
    facts: Sequence[str] = ()

    def lines(self, width: int) -> list[str]:
        return _wrapped(" · ".join(map(figures.clean, (self.words, *self.facts))), width)

    def element(self) -> str:
        spans = (*self.spans, *((fact, "quiet") for fact in self.facts))
        return f'<div class="tfd-head">{"".join(_span(*span) for span in spans)}</div>'


@dataclass(frozen=True)
class Sentence:
    """A sentence. `lead` are its first words, if `tone` is the color of these words only."""

    words: str
    tone: str = "quiet"
    lead: str = ""

    def lines(self, width: int) -> list[str]:
        lead = f"{self.lead}: " if self.lead else ""
        return _wrapped(figures.clean(lead + self.words), width)

    def element(self) -> str:
        if self.lead:
            return f"<div>{_span(self.lead, self.tone)}: {escape(self.words)}</div>"
        return f'<div class="tfd-{self.tone}">{escape(self.words)}</div>'


@dataclass(frozen=True)
class Code:
    """Lines of a log or of source code, with their spaces and without control characters.

    Parameters
    ----------
    source : sequence of str
    indent : str
        Spaces before each line of text.
    truncate : bool
        Whether text is truncated to the width.
    """

    source: Sequence[str]
    indent: str = ""
    truncate: bool = True

    def lines(self, width: int) -> list[str]:
        lines = [self.indent + printable(line) for line in self.source]
        return [figures.fit(line, max(width, 20)) for line in lines] if self.truncate else lines

    def element(self) -> str:
        return f'<pre class="tfd-source">{escape(chr(10).join(map(printable, self.source)))}</pre>'


@dataclass(frozen=True)
class Collapsible:
    """A block that HTML shows on request.

    Parameters
    ----------
    title : str
        Its title in HTML.
    body : Block
    heading : str, optional
        Its title in text. Empty without a title. Default: text does not contain the block.
    opened : bool
        Whether HTML shows it at once.
    tone : str
        Color of the title.
    """

    title: str
    body: Block
    heading: str | None = None
    opened: bool = False
    tone: str = "quiet"

    def lines(self, width: int) -> list[str]:
        if self.heading is None:
            return []
        return [*([self.heading] if self.heading else []), *self.body.lines(width)]

    def element(self) -> str:
        return (
            f'<details{" open" if self.opened else ""}><summary class="tfd-{self.tone}">'
            f"{escape(self.title)}</summary>{self.body.element()}</details>"
        )


def printable(line: str) -> str:
    """Return a line with its spaces, without control characters such as terminal escapes."""
    return "".join(char if char.isprintable() else "\ufffd" for char in line.expandtabs(4))


def _wrapped(words: str, width: int) -> list[str]:
    return textwrap.wrap(words, max(width, 20), subsequent_indent="  ")


def _span(words: str, kind: str) -> str:
    words = escape(words)
    # The style sheet truncates names, so the title has the whole name.
    title = f' title="{words}"' if kind == "name" else ""
    return f'<span class="tfd-{kind}"{title}>{words}</span>'
