"""``tfd``: clusters from a shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tfd_notebook._version import VERSION
from tfd_notebook.errors import TfdError, UsageError
from tfd_notebook.ui.argparsing import CommandLine, HelpRequested

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
        0 on success, 1 after an error, 2 for invalid arguments, 130 after Ctrl-C.
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
        # The reader of the pipe, such as head, has ended. Python would flush stdout at exit again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--version"]:
        print(f"tfd {VERSION}")
        return 0
    try:
        return int(CommandLine("tfd").run(arguments) or 0)
    except HelpRequested as request:
        print(request.text)
        return 0
