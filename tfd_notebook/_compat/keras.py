"""Keras under distribution strategies that it does not support, and the epochs of ``fit``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tfd_notebook._compat.frames import callers


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


def most_batches() -> int | None:
    """Return the most batches that the calling ``fit`` reads in this epoch, or None.

    If the number of batches is unknown, Keras 3 counts those of the first epoch. In each later
    epoch it reads at most one more.
    """
    if "keras.src.trainers.epoch_iterator" not in sys.modules:
        return None
    for frame in callers(sys._getframe(1)):
        reading = frame.f_locals.get("epoch_iterator")
        if reading is not None and frame.f_globals.get("__name__", "").startswith("keras.src."):
            is_known = reading.steps_per_epoch or reading.data_adapter.num_batches
            return None if is_known else getattr(reading, "_num_batches", None)
    return None
