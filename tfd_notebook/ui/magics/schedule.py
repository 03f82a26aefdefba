"""``%tfd_schedule`` and ``%%tfd_schedule``: functions that run on the workers."""

from __future__ import annotations

import argparse
import ast
import linecache
import types
from collections.abc import Callable
from typing import Any

from tfd_notebook.errors import UsageError
from tfd_notebook.ui.magics import lookup


class ScheduleMagic(lookup.ShellCommands):
    """``%tfd_schedule`` in a shell, or ``%%tfd_schedule`` over a cell."""

    def schedule(self, options: argparse.Namespace) -> Any:
        function, args = called(self._shell, self._cell, options, "a tf.function")
        if self._cell is not None:
            import tensorflow as tf

            function = tf.function(function)
        cluster = lookup.pick_coordinated(options.cluster)
        coordinator = lookup.pick_own(cluster.name).coordinator()
        values = [coordinator.schedule(function, args=args) for _ in range(options.times or 1)]
        return values if options.times is not None else values[0]


def called(
    shell: Any, cell: str | None, options: argparse.Namespace, kind: str
) -> tuple[Any, tuple[Any, ...]]:
    """Return the function that a magic calls, and its arguments.

    The function is the one of `cell`, or else the expression in `options`, a value of this kind.
    """
    if cell is not None:
        return as_function(cell, f"cell_{shell.execution_count}", shell.user_ns), ()
    function, args = lookup.evaluate(shell, options.function, kind), ()
    if options.args is not None:
        args = lookup.evaluate(shell, " ".join(options.args), "the arguments")
    return function, args if isinstance(args, tuple) else (args,)


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
