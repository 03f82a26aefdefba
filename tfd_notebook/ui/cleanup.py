"""Callbacks that run when the IPython extension is unloaded."""

from __future__ import annotations

from collections.abc import Callable

_callbacks: list[Callable[[], object]] = []


def on_unload(callback: Callable[[], object]) -> None:
    """Call `callback` whenever the extension is unloaded."""
    _callbacks.append(callback)


def run() -> None:
    """Call the callbacks of `on_unload`."""
    for callback in _callbacks:
        callback()
