"""The magics ``%tfd_...``: thin parsers over methods.

Loading must cost next to nothing, so all but this file is imported when a magic is first used.
"""

from __future__ import annotations

import re
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tfd_notebook.ui.argparsing import CommandLine

__all__ = ["load_ipython_extension", "unload_ipython_extension"]

#: Each magic's module, and what returns its command line there.
_HOMES = {
    "tfd_cluster": ("cluster", "command_line"),
    "tfd_stream": ("stream", "command_line"),
    "tfd_explain": ("explain", "command_line"),
    "tfd_schedule": ("schedule", "command_line"),
    "tfd_pause": ("stepper", "pause"),
    "tfd_resume": ("stepper", "resume"),
    "tfd_step": ("stepper", "step"),
    "tfd_join": ("stepper", "join"),
    "tfd_cancel": ("stepper", "cancel"),
    "tfd_values": ("stepper", "values"),
    "tfd_kernel": ("remote_kernel", "command_line"),
    "tfd_spark": ("spark", "command_line"),
    "tfd_resolve": ("resolve", "command_line"),
}
#: Those that may stand over a cell, too.
_OVER_CELLS = ("tfd_kernel", "tfd_schedule")
#: As in "%tfd_cluster st", "c = %tfd_cluster st" and, with automagic, "tfd_cluster st".
_LINE = re.compile(rf"(?:^|=)\s*%{{0,2}}({'|'.join(_HOMES)})\s+(.*)$")

_loaded: dict[int, Any] = {}


def load_ipython_extension(shell: Any) -> None:
    """Give `shell` the magics and their completion; doing it again changes nothing."""
    from IPython.core.completer import context_matcher

    unload_ipython_extension(shell)
    magics = {name: _Magic(shell, name) for name in _HOMES}
    for name, magic in magics.items():
        kind = "line_cell" if name in _OVER_CELLS else "line"
        shell.register_magic_function(magic, kind, name)

    def match(context: Any) -> Any:
        found = _LINE.search(context.text_until_cursor)
        return magics[found[1]].complete(found[2]) if found else {"completions": []}

    matcher = _loaded[id(shell)] = context_matcher(identifier="tfd_notebook")(match)
    shell.Completer.custom_matchers.append(matcher)


def unload_ipython_extension(shell: Any) -> None:
    """Take away what `load_ipython_extension` gave."""
    matcher = _loaded.pop(id(shell), None)
    if matcher is None:
        return
    if matcher in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(matcher)
    for name in _HOMES:
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop(name, None)


class _Magic:
    """A magic; add ``--help`` for what it does."""

    def __init__(self, shell: Any, name: str) -> None:
        self._shell = shell
        self.__name__ = name

    @cached_property
    def _commands(self) -> CommandLine:
        return self._home(self._shell)

    @property
    def _home(self) -> Callable[..., CommandLine]:
        module, function = _HOMES[self.__name__]
        home: Callable[..., CommandLine] = getattr(import_module(f"{__name__}.{module}"), function)
        return home

    def __call__(self, line: str, cell: str | None = None) -> Any:
        from tfd_notebook.errors import TfdError
        from tfd_notebook.ui.argparsing import HelpRequested, split

        try:
            commands = self._commands if cell is None else self._home(self._shell, cell)
            return commands.run(split(line))
        except HelpRequested as request:
            print(request.text)  # noqa: T201 - help is text for the reader of the cell
        except TfdError as error:
            # IPython shows this instead of a traceback through our own code; the type stays, so
            # that programs can still catch it.
            shown = f"{type(error).__name__}: {error}"
            error._render_traceback_ = lambda: [shown]  # type: ignore[attr-defined]
            raise
        return None

    def getdoc(self) -> str:
        """Return what ``%tfd_cluster?`` shows."""
        return self._commands.help()

    def complete(self, words: str) -> Any:
        """Return what can follow the magic's `words`, as a result for IPython's completer."""
        from tfd_notebook.ui.magics.completion import complete

        return complete(self._commands, self._shell, words)
