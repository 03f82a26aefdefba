"""What follows a cluster in a terminal, or in a file."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

from tfd_notebook.model.snapshot import Snapshot, as_dict

_TO_TOP_LEFT = "\x1b[H"
_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"
_OTHER_SCREEN = "\x1b[?1049h\x1b[?25l"
_FIRST_SCREEN = "\x1b[?1049l\x1b[?25h"


class Screen:
    """Draws text over the last one in a terminal; elsewhere prints it where its gist is news.

    As a context manager it takes Ctrl-C and SIGTERM as the wish to leave.

    Parameters
    ----------
    redraw : bool
        Whether a terminal is drawn over. Default true.
    """

    def __init__(self, redraw: bool = True) -> None:
        self._redraw = redraw and sys.stdout.isatty()
        self._leave = threading.Event()
        self._gist: object = None
        self._last = ""
        self._handlers: dict[int, Any] = {}

    @property
    def width(self) -> int:
        """Columns of the terminal, 110 where there is none."""
        return max(shutil.get_terminal_size((110, 24)).columns, 20)

    @property
    def leaving(self) -> bool:
        """Whether somebody asked to leave."""
        return self._leave.is_set()

    def wait(self, seconds: float) -> None:
        """Wait, unless somebody asks to leave."""
        self._leave.wait(seconds)

    @staticmethod
    def gist(snapshot: Snapshot | Mapping[str, Any]) -> object:
        """Return what in `snapshot` is worth another printing: states and numbers of tasks."""
        seen: Any = as_dict(snapshot) if isinstance(snapshot, Snapshot) else snapshot
        coordinator = seen.get("coordinator") or {}
        return (
            seen["state"],
            [(row["task"], row["state"], row["restarts"]) for row in seen["tasks"]],
            [(row["name"], row["state"]) for row in seen["streams"]],
            (coordinator.get("state"), coordinator.get("reason")),
        )

    def show(self, text: str, gist: object) -> None:
        """Show `text`."""
        self._last = text
        if self._redraw:
            rows = shutil.get_terminal_size((110, 24)).lines - 1
            lines = "\n".join(line + _CLEAR_LINE for line in text.splitlines()[:rows])
            print(_TO_TOP_LEFT + lines + _CLEAR_BELOW, end="", flush=True)
        elif gist != self._gist:
            if self._gist is not None:
                print()
            print(text, flush=True)
        self._gist = gist

    def __enter__(self) -> Screen:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._asked)
        if self._redraw:
            print(_OTHER_SCREEN, end="", flush=True)
        return self

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self._leave.set()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._redraw:
            print(_FIRST_SCREEN, end="")
            print(self._last, flush=True)
