"""Names of the user's variables, so that suggested code runs without changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["variable_of"]


def variable_of(
    value: object, default: str, inner: Callable[[Any], object] = lambda value: value
) -> str:
    """Return the name of a global variable of the notebook or script that holds `value`.

    Parameters
    ----------
    value : object
        Never None: many variables can hold None for other reasons.
    default : str
        Returned if no variable holds it.
    inner : callable, optional
        Returns the object that another one wraps. Wrappers count as the wrapped object.
    """
    if value is None:
        return default
    main = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    # IPython keeps results of cells under names such as _ and _12.
    target, variables = inner(value), [pair for pair in list(main.items()) if pair[0][:1] != "_"]
    names = (name for name, candidate in variables if inner(candidate) is target)
    return next(names, default)
