"""The functions that AutoGraph leaves as they are, and the lines of those that it rewrites.

AutoGraph rewrites the functions that a ``tf.function`` calls, and those that they call. Functions
of this package send messages and check values in Python, which graphs cannot do.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from tfd_notebook._compat import import_hooks

_MODULE = "tensorflow.python.autograph.core.config"
_TRANSPILER = "tensorflow.python.autograph.impl.api"
_PACKAGE = __name__.partition(".")[0]
#: Marks the modules and files of functions that AutoGraph has rewritten.
_GENERATED = "__autograph_generated_file"


def exclude_package() -> None:
    """Exclude the functions of this package that other functions call.

    Does not import TensorFlow. If it is not imported yet, its import applies the change.
    """
    import_hooks.when_imported(_MODULE, _change)


def undo() -> None:
    """Undo `exclude_package`."""
    config: Any = sys.modules.get(_MODULE)
    if hasattr(config, "CONVERSION_RULES"):
        rules = config.CONVERSION_RULES
        config.CONVERSION_RULES = tuple(rule for rule in rules if rule._prefix != _PACKAGE)


def keep_unconverted(function: Any) -> None:
    """Exclude one function, which can also be passed to ``tf.function`` itself."""
    function.autograph_info__ = None


def is_generated(name: str) -> bool:
    """Return True if AutoGraph has written the module or file `name`."""
    return _GENERATED in name


def original(file: str, line: int, function: str) -> tuple[str, int, str]:
    """Return the user's file, line and function for those of generated code.

    Other lines, and those that another process has generated, are returned as they are.
    """
    lines = _origins(file)
    before = [number for number in lines if number <= line]
    return _position(lines[max(before)], function) if before else (file, line, function)


def definition(code: types.CodeType) -> tuple[str, int, str]:
    """Return the user's file, line and name of a function, which AutoGraph may have generated."""
    lines = _origins(code.co_filename)
    inside = [line for _, _, line in code.co_lines() if line and line in lines]
    if inside:
        return _position(lines[min(inside)], code.co_name)
    return code.co_filename, code.co_firstlineno, code.co_name


def _origins(file: str) -> dict[int, Any]:
    """Return TensorFlow's origins of the lines of a generated file."""
    if not is_generated(file) or _TRANSPILER not in sys.modules:
        return {}
    functions: Any = sys.modules[_TRANSPILER]._TRANSPILER._cache._cache
    known = (functions.get(reference(), {}) for reference in functions.keyrefs())
    factories = (factory for each in known for factory in list(each.values()))
    found = next((each for each in factories if each.module.__file__ == file), None)
    return {} if found is None else {at.lineno: each for at, each in found.source_map.items()}


def _position(origin: Any, function: str) -> tuple[str, int, str]:
    return origin.loc.filename, origin.loc.lineno, origin.function_name or function


def _change(config: Any) -> None:
    # Without these names, TensorFlow itself names the functions that it fails to convert.
    if hasattr(config, "CONVERSION_RULES") and hasattr(config, "DoNotConvert"):
        undo()
        config.CONVERSION_RULES = (config.DoNotConvert(_PACKAGE), *config.CONVERSION_RULES)
