"""A consumer that reads in a background thread, with a timeout for each wait."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import tensorflow as tf

from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.data.consume.stream import Stream

SECONDS = 60.0


class Reader:
    """Reader of a dataset of numbers, or of batches of numbers, in a background thread."""

    def __init__(self, dataset: Any) -> None:
        self.elements: list[Any] = []
        self._stream = Stream(dataset, Consumers(), sinks=[self._take]).start()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stream.stop()

    def _take(self, element: Any) -> None:
        self.elements.append(tf.nest.map_structure(lambda tensor: tensor.numpy().tolist(), element))

    @property
    def error(self) -> BaseException | None:
        """The error that ended the epoch."""
        return self._stream.error

    def first(self, count: int) -> list[Any]:
        """Return the elements once `count` of them have arrived; raise TimeLimit on a timeout."""
        self._stream.wait(elements=count, timeout=SECONDS)
        return list(self.elements)

    def more(self, count: int) -> list[Any]:
        """Return all elements so far, once `count` more of them have arrived."""
        return self.first(len(self.elements) + count)

    def all(self) -> list[Any]:
        """Return all elements of the epoch; raise TimeLimit if it does not end."""
        self._stream.wait(timeout=SECONDS)
        return list(self.elements)


def read(dataset: Any) -> list[Any]:
    """Return all elements of `dataset`; raise TimeLimit if it does not end."""
    with Reader(dataset) as reader:
        return reader.all()
