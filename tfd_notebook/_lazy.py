"""Names of a package whose modules are imported when a name is first used."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

_lock = threading.RLock()
_pending: list[Callable[[], None]] = []


def on_first_use(function: Callable[[], None]) -> None:
    """Call `function` once, at the first use of a public name."""
    _pending.append(function)


def first_use() -> None:
    """Call the functions of `on_first_use` that have not succeeded yet.

    Other threads wait until they have. Calls from such a function return at once.
    """
    with _lock:
        while _pending:
            function = _pending.pop()
            try:
                function()
            except BaseException:
                _pending.append(function)
                raise


def exports(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Parameters
    ----------
    package : str
        The ``__name__`` of the package.
    modules : Mapping[str, str]
        For each public name the module that defines it, relative to the package. An empty
        string stands for a module of that name, whose import is not a use.
    """

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not (home := modules[name]):
            return importlib.import_module(f"{package}.{name}")
        first_use()
        value = getattr(importlib.import_module(f"{package}.{home}"), name)
        setattr(importlib.import_module(package), name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *modules})

    return get_attribute, list_names, sorted(modules)
