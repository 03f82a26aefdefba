"""Names of a package whose modules are imported when a name is first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def exports(
    package: str, modules: Mapping[str, str], on_first_use: Callable[[], None] = lambda: None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Parameters
    ----------
    package : str
        The ``__name__`` of the package.
    modules : Mapping[str, str]
        For each public name the module that defines it, relative to the package. An empty
        string stands for a module of that name.
    on_first_use : callable, optional
        Called once, before the first name is returned.
    """
    pending = [on_first_use]

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        while pending:
            pending.pop()()
        if not (home := modules[name]):
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(f"{package}.{home}"), name)
        setattr(importlib.import_module(package), name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *modules})

    return get_attribute, list_names
