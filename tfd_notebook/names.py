"""Names of the user's variables, for advice that can be run as it stands."""

from __future__ import annotations

import sys

__all__ = ["variable_of"]


def variable_of(value: object, default: str) -> str:
    """Return the name of a global variable of the notebook or script that holds `value`.

    Parameters
    ----------
    value : object
        None is never found: a variable may hold None for any reason.
    default : str
        Returned if no variable holds it.
    """
    if value is None:
        return default
    main = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    # IPython keeps results of cells under names such as _ and _12.
    names = (name for name, held in list(main.items()) if held is value and name[:1] != "_")
    return next(names, default)
