"""``tfd``: clusters from a shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tfd_notebook.errors import TfdError, UsageError
from tfd_notebook.ui.argparsing import HelpAsked
from tfd_notebook.ui.cli import commands

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``tfd`` and return its exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: those of the process.

    Returns
    -------
    int
        0; 1 when something failed, 2 when the arguments cannot be meant, 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except TfdError as error:
        print(f"tfd: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing must be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: Sequence[str]) -> int:
    try:
        return int(commands.command_line().run(arguments) or 0)
    except HelpAsked as asked:
        print(asked.text)
        return 0
