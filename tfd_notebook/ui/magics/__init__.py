"""The magics ``%tfd_...``: thin parsers over methods.

Only this module is imported when the extension is loaded. The other modules are imported when a
magic is first used.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfd_notebook.ui.argparsing import CommandLine

__all__ = ["load_ipython_extension", "unload_ipython_extension"]

#: The magics of the command table, which would take milliseconds to import with the extension.
NAMES = (
    *("tfd_cluster", "tfd_stream", "tfd_explain", "tfd_schedule", "tfd_spark", "tfd_kernel"),
    *(
        "tfd_resolve",
        "tfd_run",
        "tfd_pause",
        "tfd_resume",
        "tfd_step",
        "tfd_join",
        "tfd_cancel",
        "tfd_values",
    ),
)
#: Magics that are also cell magics.
CELL_MAGICS = ("tfd_kernel", "tfd_run", "tfd_schedule")
#: Matches "%tfd_cluster start", "c = %tfd_cluster start" and, with automagic, "tfd_cluster start".
_LINE = re.compile(rf"(?:^|=)\s*%{{0,2}}({'|'.join(NAMES)})\s+(.*)$")

_loaded: dict[int, Any] = {}


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and their completion in `shell`. A second call changes nothing."""
    from IPython.core.completer import context_matcher

    unload_ipython_extension(shell)
    magics = {name: _Magic(shell, name) for name in NAMES}
    for name, magic in magics.items():
        kind = "line_cell" if name in CELL_MAGICS else "line"
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
    for name in NAMES:
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop(name, None)


class _Magic:
    """A magic of tfd_notebook. Run it with ``--help``."""

    def __init__(self, shell: Any, name: str) -> None:
        self._shell = shell
        self.__name__ = name

    def _commands(self, *cell: str) -> CommandLine:
        # Import time: the extension registers magics that may never run.
        from tfd_notebook.ui.argparsing import CommandLine

        return CommandLine(f"{'%%' if cell else '%'}{self.__name__}", self._shell, *cell)

    def __call__(self, line: str, cell: str | None = None) -> Any:
        # Import time: the extension registers magics that may never run.
        from tfd_notebook.errors import TfdError
        from tfd_notebook.ui.argparsing import HelpRequested, split

        try:
            commands = self._commands() if cell is None else self._commands(cell)
            return commands.run(split(line))
        except HelpRequested as request:
            print(request.text)  # noqa: T201 - help is output of the cell
        except TfdError as error:
            # IPython shows this text instead of a traceback. The exception itself is unchanged, so
            # that programs can catch it.
            rendered = f"{type(error).__name__}: {error}"
            error._render_traceback_ = lambda: [rendered]  # type: ignore[method-assign]
            raise
        return None

    def getdoc(self) -> str:
        """Return the help that IPython shows for ``%tfd_cluster?``."""
        return self._commands().help()

    def complete(self, words: str) -> Any:
        """Return the completions after the magic's `words`, in the form of IPython's completer."""
        # Import time: it imports IPython.
        from tfd_notebook.ui.magics.completion import complete

        return complete(self._commands(), self._shell, words)
