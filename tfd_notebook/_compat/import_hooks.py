"""Patches of other packages' modules, applied when these are imported."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

Change = Callable[[types.ModuleType], None]


def when_imported(name: str, change: Change) -> None:
    """Call `change` with the module `name`, now or after its import."""
    if name in sys.modules:
        change(sys.modules[name])
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    if change not in (waiting := finder.changes.setdefault(name, [])):
        waiting.append(change)


def remove_all() -> None:
    """Remove the patches of modules that are not imported yet."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


class _Finder:
    """Meta path finder that patches modules after their execution."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Change]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.changes:
            return None
        others = (f.find_spec for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next(filter(None, (find(fullname, path, target) for find in others)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                for change in self.changes.pop(fullname, ()):
                    change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
