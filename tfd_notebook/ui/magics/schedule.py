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
        args: Any = ()
        if self._cell is None:
            function = lookup.evaluate(self._shell, options.function, "a tf.function")
            if options.args is not None:
                args = lookup.evaluate(self._shell, " ".join(options.args), "the arguments")
        else:
            import tensorflow as tf

            name = f"cell_{self._shell.execution_count}"
            function = tf.function(as_function(self._cell, name, self._shell.user_ns))
        args = args if isinstance(args, tuple) else (args,)
        cluster = lookup.pick_coordinated(options.cluster)
        coordinator = lookup.pick_own(cluster.name).coordinator()
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
