"""The magics ``%tfd_...``: thin parsers over methods.

Only this module is imported when the extension is loaded. The other modules are imported when a
magic is first used.
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

#: The module of each magic, and the function that returns its command line.
_FACTORIES = {
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
#: Magics that are also cell magics.
_CELL_MAGICS = ("tfd_kernel", "tfd_schedule")
#: Matches "%tfd_cluster st", "c = %tfd_cluster st" and, with automagic, "tfd_cluster st".
_LINE = re.compile(rf"(?:^|=)\s*%{{0,2}}({'|'.join(_FACTORIES)})\s+(.*)$")

_loaded: dict[int, Any] = {}


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and their completion in `shell`. A second call changes nothing."""
    from IPython.core.completer import context_matcher

    unload_ipython_extension(shell)
    magics = {name: _Magic(shell, name) for name in _FACTORIES}
    for name, magic in magics.items():
        kind = "line_cell" if name in _CELL_MAGICS else "line"
        shell.register_magic_function(magic, kind, name)

    def complete(context: Any) -> Any:
        match = _LINE.search(context.text_until_cursor)
        return magics[match[1]].complete(match[2]) if match else {"completions": []}

    matcher = _loaded[id(shell)] = context_matcher(identifier="tfd_notebook")(complete)
    shell.Completer.custom_matchers.append(matcher)


def unload_ipython_extension(shell: Any) -> None:
    """Remove the magics and the completion that `load_ipython_extension` registered."""
    matcher = _loaded.pop(id(shell), None)
    if matcher is None:
        return
    if matcher in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(matcher)
    for name in _FACTORIES:
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop(name, None)


class _Magic:
    """A magic of tfd_notebook. Run it with ``--help``."""

    def __init__(self, shell: Any, name: str) -> None:
        self._shell = shell
        self.__name__ = name

    @cached_property
    def _commands(self) -> CommandLine:
        return self._factory(self._shell)

    @property
    def _factory(self) -> Callable[..., CommandLine]:
        name, function = _FACTORIES[self.__name__]
        module = import_module(f"{__name__}.{name}")
        factory: Callable[..., CommandLine] = getattr(module, function)
        return factory

    def __call__(self, line: str, cell: str | None = None) -> Any:
        # Import time: the extension registers magics that may never run.
        from tfd_notebook.errors import TfdError
        from tfd_notebook.ui.argparsing import HelpRequested, split

        try:
            commands = self._commands if cell is None else self._factory(self._shell, cell)
            return commands.run(split(line))
        except HelpRequested as request:
            print(request.text)  # noqa: T201 - help is output of the cell
        except TfdError as error:
            # IPython shows this text instead of a traceback. The exception itself is unchanged, so
            # that programs can catch it.
            rendered = f"{type(error).__name__}: {error}"
            error._render_traceback_ = lambda: [rendered]  # type: ignore[attr-defined]
            raise
        return None

    def getdoc(self) -> str:
        """Return the help that IPython shows for ``%tfd_cluster?``."""
        return self._commands.help()

    def complete(self, words: str) -> Any:
        """Return the completions after the magic's `words`, in the form of IPython's completer."""
        # Import time: it imports IPython.
        from tfd_notebook.ui.magics.completion import complete

        return complete(self._commands, self._shell, words)
