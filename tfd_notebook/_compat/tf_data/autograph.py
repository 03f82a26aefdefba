"""The functions that AutoGraph leaves as they are, although a ``tf.function`` calls them.

AutoGraph rewrites the functions that a ``tf.function`` calls, and those that they call. Functions
of this package send messages and check values in Python, which graphs cannot do.
"""

from __future__ import annotations

import sys
from typing import Any

from tfd_notebook._compat import import_hooks

_MODULE = "tensorflow.python.autograph.core.config"
_PACKAGE = __name__.partition(".")[0]


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


def _change(config: Any) -> None:
    # Without these names, TensorFlow itself names the functions that it fails to convert.
    if hasattr(config, "CONVERSION_RULES") and hasattr(config, "DoNotConvert"):
        undo()
        config.CONVERSION_RULES = (config.DoNotConvert(_PACKAGE), *config.CONVERSION_RULES)
