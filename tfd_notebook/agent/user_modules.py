"""The user's own modules that this process has imported, and how old they are."""

from __future__ import annotations

import os
import sys

_INSTALLED = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(__file__)))
#: TensorFlow writes these itself, for functions that it converts.
_GENERATED = "__autograph_generated_file"


def changed_at(module: str) -> float | None:
    """When the file of a module of the user changed; None for modules that were installed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file or file.startswith(_INSTALLED) or module.startswith(_GENERATED):
        return None
    try:
        return os.stat(file).st_mtime
    except OSError:
        return None


def loaded() -> dict[str, float]:
    """Return when the file of each loaded module of the user changed last."""
    return {
        name: changed for name in tuple(sys.modules) if (changed := changed_at(name)) is not None
    }


def stale(seen: dict[str, float]) -> list[str]:
    """Return the modules whose files have changed since `loaded` returned `seen`."""
    return sorted(
        name
        for name, then in seen.items()
        if (changed := changed_at(name)) is not None and changed > then
    )
