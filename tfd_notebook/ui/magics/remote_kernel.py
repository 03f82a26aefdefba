"""``%%tfd_kernel``: a cell that runs in a remote kernel."""

from __future__ import annotations

import argparse
from typing import Any

from tfd_notebook.errors import UsageError
from tfd_notebook.ui.argparsing import Command, CommandLine, Parser, SingleCommand
from tfd_notebook.ui.magics import lookup


def command_line(shell: Any, cell: str | None = None) -> CommandLine:
    """Return ``%tfd_kernel`` for `shell`, or ``%%tfd_kernel`` over `cell`."""
    if cell is None:
        summary = "Show a remote kernel and its clusters. %%tfd_kernel runs a cell in the kernel."
        line = Command("%tfd_kernel", summary, _Line(shell), _arguments, example="kernel")
        return SingleCommand(line)
    summary = (
        "Run the cell in a remote kernel. Its output is shown here. Variables that it assigns are "
        "in the remote kernel."
    )
    over = Command(
        "%%tfd_kernel", summary, _Cell(shell, cell), _cell_arguments, example="kernel --plain"
    )
    return SingleCommand(over, bare=True)


def _arguments(parser: Parser) -> None:
    parser.add_argument(
        "kernel", metavar="KERNEL", help="variable that holds a tfd.RemoteKernel, or an expression"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="interrupt it after S seconds")


def _cell_arguments(parser: Parser) -> None:
    _arguments(parser)
    parser.add_argument(
        "--plain", action="store_true", help="show text and images only, no HTML and no JavaScript"
    )


class _Line:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        return _kernel(self._shell, options)


class _Cell:
    def __init__(self, shell: Any, cell: str) -> None:
        self._shell = shell
        self._cell = cell

    def __call__(self, options: argparse.Namespace) -> None:
        _kernel(self._shell, options).run(self._cell, options.timeout, plain=options.plain)


def _kernel(shell: Any, options: argparse.Namespace) -> Any:
    # Import time: help and completion do not need NumPy and grpc.
    from tfd_notebook.remote_kernel import RemoteKernel

    kernel = lookup.evaluate(shell, options.kernel, "a tfd.RemoteKernel")
    if not isinstance(kernel, RemoteKernel):
        raise UsageError(
            f"invalid kernel {options.kernel}: expected a tfd.RemoteKernel, "
            f"got {type(kernel).__name__}",
            fix='kernel = tfd.RemoteKernel("https://host:8888/?token=...")',
        )
    return kernel
