"""``%tfd_schedule`` and ``%%tfd_schedule``: functions that run on the workers."""

from __future__ import annotations

import argparse
import ast
import linecache
import types
from collections.abc import Callable
from typing import Any

from tfd_notebook.errors import UsageError
from tfd_notebook.ui.argparsing import Command, CommandLine, Parser, SingleCommand
from tfd_notebook.ui.magics import lookup


def command_line(shell: Any, cell: str | None = None) -> CommandLine:
    """Return ``%tfd_schedule`` for `shell`, or ``%%tfd_schedule`` over `cell`."""
    if cell is None:
        line = Command(
            "%tfd_schedule",
            "Schedule a tf.function on the workers. %%tfd_schedule over a cell schedules the cell.",
            _Line(shell),
            _line_args,
            example="step --args x --times 10",
        )
        return SingleCommand(line)
    over = Command(
        "%%tfd_schedule",
        "Schedule the cell on the workers. It becomes a tf.function that returns the value of its "
        "last line. Variables that it assigns are local; all others are those of the notebook.",
        _Cell(shell, cell),
        _common_args,
        example="--times 10",
    )
    return SingleCommand(over, bare=True)


def _common_args(parser: Parser) -> None:
    parser.add_argument(
        "--times", type=int, metavar="N", help="schedule it N times, and return a list"
    )
    parser.add_argument("--cluster", metavar="C", help="name of the cluster, if several run")


def _line_args(parser: Parser) -> None:
    parser.add_argument(
        "function", metavar="FUNCTION", help="variable that holds the tf.function, or an expression"
    )
    _common_args(parser)
    parser.add_argument(
        "--args",
        nargs="+",
        metavar="EXPR",
        help="expression for its arguments: a tuple, or a single argument",
    )


class _Line:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        function = lookup.evaluate(self._shell, options.function, "a tf.function")
        args: Any = ()
        if options.args is not None:
            args = lookup.evaluate(self._shell, " ".join(options.args), "the arguments")
        return _schedule(options, function, args if isinstance(args, tuple) else (args,))


class _Cell:
    def __init__(self, shell: Any, cell: str) -> None:
        self._shell = shell
        self._cell = cell

    def __call__(self, options: argparse.Namespace) -> Any:
        import tensorflow as tf

        name = f"cell_{self._shell.execution_count}"
        function = as_function(self._cell, name, self._shell.user_ns)
        return _schedule(options, tf.function(function), ())


def _schedule(options: argparse.Namespace, function: Any, args: tuple[Any, ...]) -> Any:
    if options.times is not None and options.times < 1:
        raise UsageError(
            f"--times {options.times} is not a valid number of closures", fix="use 1 or more"
        )
    clusters = lookup.coordinated()
    only = next(iter(clusters)) if len(clusters) == 1 else None
    coordinator = lookup.pick_own(options.cluster or only).coordinator()
    values = [coordinator.schedule(function, args=args) for _ in range(options.times or 1)]
    return values if options.times is not None else values[0]


def as_function(code: str, name: str, namespace: dict[str, Any]) -> Callable[[], Any]:
    """Return a function of `code` that returns the value of its last line.

    Parameters
    ----------
    code : str
        Statements; names that they assign are local to the function.
    name : str
        Name of the function.
    namespace : dict
        Globals of the function.

    Raises
    ------
    SyntaxError
    UsageError
        `code` has no statement.
    """
    body = ast.parse(code, f"<{name}>").body
    if not body:
        raise UsageError("the cell is empty", fix="write the function body below the first line")
    last = body[-1]
    if isinstance(last, ast.Expr):
        body[-1] = ast.copy_location(ast.Return(last.value), last)
    module = ast.parse(f"def {name}(): pass")
    definition = module.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.body = body
    # AutoGraph reads the source of a function by inspect.getsource, which uses linecache.
    source = ast.unparse(ast.fix_missing_locations(module)) + "\n"
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    compiled = compile(source, file, "exec")
    code_object = next(
        constant for constant in compiled.co_consts if isinstance(constant, types.CodeType)
    )
    function = types.FunctionType(code_object, namespace, name)
    function.__module__ = str(namespace.get("__name__", "__main__"))
    return function
