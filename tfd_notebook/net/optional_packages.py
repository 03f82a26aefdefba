"""Import of packages that an extra of this package installs."""

from __future__ import annotations

import importlib
from typing import Any

from tfd_notebook.errors import Unsupported


def load(name: str, user: str, extra: str) -> Any:
    """Import an optional package for `user`, which the extra `extra` installs.

    Raises
    ------
    Unsupported
        It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unsupported(
            f"{user} needs the package {error.name}", fix=f'pip install "tfd-notebook[{extra}]"'
        ) from error
