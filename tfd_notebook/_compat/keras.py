"""Keras under distribution strategies that it does not support."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def refuse_keras(strategy: Any, error: Callable[[], Exception]) -> None:
    """Raise `error` if Keras 3 trains under `strategy`, an object or a class.

    Keras 3 would read the parts of all workers in one process.
    """
    distribute = strategy.experimental_distribute_dataset

    def checked_distribute(*args: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # Modules of Keras 2.15 have the same names, and support the strategy.
        is_keras_2 = getattr(sys.modules.get("keras"), "__version__", "").startswith("2.")
        if caller.startswith("keras.src.") and not is_keras_2:
            raise error()
        return distribute(*args, **options)

    strategy.experimental_distribute_dataset = checked_distribute
