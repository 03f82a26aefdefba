"""Output that follows a cluster, in a terminal or in a file."""

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
_ALTERNATE_SCREEN = "\x1b[?1049h\x1b[?25l"
_MAIN_SCREEN = "\x1b[?1049l\x1b[?25h"


class Screen:
    """A screen that replaces its text in a terminal, and otherwise prints each changed text.

    As a context manager it handles Ctrl-C and SIGTERM: both set `leaving`.

    Parameters
    ----------
    redraw : bool
        Whether a new text replaces the last one in a terminal. Default true.
    """

    def __init__(self, redraw: bool = True) -> None:
        self._redraw = redraw and sys.stdout.isatty()
        self._leave = threading.Event()
        self._change_key: object = None
        self._last = ""
        self._handlers: dict[int, Any] = {}

    @property
    def width(self) -> int:
        """Columns of the terminal. 110 without a terminal."""
        return max(shutil.get_terminal_size((110, 24)).columns, 20)

    @property
    def leaving(self) -> bool:
        """True after Ctrl-C or SIGTERM."""
        return self._leave.is_set()

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until Ctrl-C or SIGTERM."""
        self._leave.wait(seconds)

    @staticmethod
    def change_key(snapshot: Snapshot | Mapping[str, Any]) -> object:
        """Return the states and numbers of tasks. `show` prints a text only if they changed."""
        record: Any = as_dict(snapshot) if isinstance(snapshot, Snapshot) else snapshot
        coordinator = record.get("coordinator") or {}
        return (
            record["state"],
            [(row["task"], row["state"], row["restarts"]) for row in record["tasks"]],
            [(row["name"], row["state"]) for row in record["streams"]],
            (coordinator.get("state"), coordinator.get("reason")),
        )

    def show(self, text: str, change_key: object) -> None:
        """Show `text`. Without a terminal, print it only if `change_key` differs from the last."""
        self._last = text
        if self._redraw:
            rows = shutil.get_terminal_size((110, 24)).lines - 1
            lines = "\n".join(line + _CLEAR_LINE for line in text.splitlines()[:rows])
            print(_TO_TOP_LEFT + lines + _CLEAR_BELOW, end="", flush=True)
        elif change_key != self._change_key:
            if self._change_key is not None:
                print()
            print(text, flush=True)
        self._change_key = change_key

    def __enter__(self) -> Screen:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._handle_signal)
        if self._redraw:
            print(_ALTERNATE_SCREEN, end="", flush=True)
        return self

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
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
            print(_MAIN_SCREEN, end="")
            print(self._last, flush=True)
