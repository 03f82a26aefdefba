"""Workers whose executors keep to themselves what their last operation met."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import executor


class _Executor(executor.Executor):
    """An executor that does not print, when it is collected, what its last operation met."""

    __slots__ = ()

    def __del__(self) -> None:
        try:
            super().__del__()
        except tf.errors.OpError:  # what TensorFlow's wait() raises, and again until it is cleared
            self.clear_error()
            super().__del__()


def quieten(workers: Iterable[Any]) -> None:
    """Have workers not tell, when they are collected, what failed last: their queue has told."""
    for worker in workers:
        worker.executor.__class__ = _Executor
