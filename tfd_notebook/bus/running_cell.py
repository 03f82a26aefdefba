"""Tracks whether a cell runs. Without a subshell, front ends' messages wait until it ends."""

from __future__ import annotations

import time
from typing import Any

_shell: Any = None
#: Nested executions that are running.
_depth = 0
_idle_since = 0.0


def follow(shell: Any) -> None:
    """Track the executions of an IPython shell."""
    # Import time: %load_ext imports this module, also without a kernel.
    import asyncio

    global _shell, _depth
    unfollow()
    _shell = shell
    try:
        asyncio.get_running_loop()
        _depth = 1  # called in a cell, such as that of %load_ext
    except RuntimeError:
        _depth = 0
    shell.events.register("pre_execute", _on_start)
    shell.events.register("post_execute", _on_end)


def unfollow() -> None:
    """Stop tracking. Afterwards, no cell counts as running."""
    global _shell, _depth
    if _shell is not None:
        _shell.events.unregister("pre_execute", _on_start)
        _shell.events.unregister("post_execute", _on_end)
        _shell, _depth = None, 0


def idle_since() -> float | None:
    """Return the monotonic time at which the last cell ended, or None while one runs."""
    return None if _depth else _idle_since


def _on_start() -> None:
    global _depth
    _depth += 1


def _on_end() -> None:
    global _depth, _idle_since
    _idle_since = time.monotonic()
    _depth = max(_depth - 1, 0)
