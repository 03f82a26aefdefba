"""Output of ranks in a notebook, in a collapsible section for each rank."""

from __future__ import annotations

from html import escape
from typing import Any, cast

#: Number of characters of each rank that stay visible, the latest ones.
_MAX_CHARACTERS = 50_000
#: Ranks whose section is open at first.
_OPEN_RANKS = 2
#: Metadata that marks outputs with HTML for a notebook whose kernel has ended.
_STATIC_FALLBACK: dict[str, Any] = {"tfd_notebook": {}}


class RankOutput:
    """Shows the output of ``Cluster.run``; pass it as ``output=``.

    It is a widget. Click a title to collapse its section, even during the run. At the end, the
    output is kept as HTML for front ends without widgets, and for reopened notebooks.
    """

    def __init__(self) -> None:
        import ipywidgets
        from IPython.display import display

        self._widgets: Any = ipywidgets
        self._text: dict[int, str] = {}
        self._sections: dict[int, Any] = {}
        self._box = ipywidgets.VBox()
        self._handle: Any = cast("Any", display)(
            self._bundle(), metadata=_STATIC_FALLBACK, raw=True, display_id=True
        )

    def __enter__(self) -> RankOutput:
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.update(self._bundle(), metadata=_STATIC_FALLBACK, raw=True)

    def __call__(self, rank: int, text: str) -> None:
        """Append lines of a rank."""
        if rank not in self._sections:
            self._add(rank)
        self._text[rank] = f"{self._text[rank]}{text}\n"[-_MAX_CHARACTERS:]
        self._sections[rank].children[0].value = self._html(rank)

    def _add(self, rank: int) -> None:
        self._text[rank] = ""
        self._sections[rank] = self._widgets.Accordion(
            [self._widgets.HTML()],
            titles=[f"rank {rank}"],
            selected_index=0 if rank < _OPEN_RANKS else None,
        )
        self._box.children = [self._sections[known] for known in sorted(self._sections)]

    def _html(self, rank: int) -> str:
        text = escape(self._text[rank])
        return f"<pre style='white-space: pre-wrap; line-height: 1.3'>{text}</pre>"

    def _bundle(self) -> dict[str, Any]:
        ranks = sorted(self._text)
        sections = "".join(
            f"<details open><summary>rank {rank}</summary>{self._html(rank)}</details>"
            for rank in ranks
        )
        lines = [f"[{rank}] {line}" for rank in ranks for line in self._text[rank].splitlines()]
        return {
            **self._box._repr_mimebundle_(),
            "text/html": sections,
            "text/plain": "\n".join(lines),
        }
