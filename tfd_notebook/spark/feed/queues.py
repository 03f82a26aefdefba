"""Queues of chunks in a node, by the task that feeds them."""

from __future__ import annotations

import queue as plain
from collections import deque
from typing import Any

from tfd_notebook.net import secure_channel
from tfd_notebook.spark.feed.chunks import Chunk


class Source:
    """A task of Spark that feeds one partition.

    Parameters
    ----------
    queue : Queue
    channel : Channel
    infer : bool
        It waits for a result for each row.

    Attributes
    ----------
    gone : bool
        It has disconnected.
    """

    def __init__(self, queue: Queue, channel: secure_channel.Channel, infer: bool) -> None:
        self.queue = queue
        self.channel = channel
        self.infer = infer
        self.gone = False


class Queue:
    """Chunks that wait for the user's function. Its owner's lock guards it.

    Rows for training are taken in the order in which their chunks came. Of partitions whose results
    are awaited one is taken after the other, so that a batch never holds rows of two of them.

    Attributes
    ----------
    depth : int
        Chunks that wait.
    taken : int
        Rows that the user's function got.
    ended : bool
        Nobody will feed any more.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.taken = 0
        self.ended = False
        self.depth = 0
        self._common: deque[tuple[Source, Chunk | None]] = deque()
        self._lanes: dict[Source, deque[tuple[Source, Chunk | None]]] = {}
        self._current: Source | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that `pop` could return now."""
        if self._current is not None:
            return not self._lanes[self._current]
        return not self._common and not any(self._lanes.values())

    def put(self, source: Source, chunk: Chunk | None) -> None:
        """Append a chunk, or the end of the source's partition."""
        self.depth += chunk is not None
        if source.infer:
            self._lanes.setdefault(source, deque()).append((source, chunk))
        else:
            self._common.append((source, chunk))

    def pop(self) -> tuple[Source, Chunk | None] | None:
        """Return the next one, or None where there is none yet."""
        item = None
        if self._current is None:
            if self._common:
                item = self._common.popleft()
            else:
                self._current = next(iter(self._lanes), None)
        if item is None and self._current is not None:
            lane = self._lanes[self._current]
            if lane:
                item = lane.popleft()
                if item[1] is None:
                    del self._lanes[self._current]
                    self._current = None
        if item is not None:
            self.depth -= item[1] is not None
        return item

    def forget(self, source: Source) -> None:
        """Drop what a source that is gone has sent, and nobody has taken."""
        lane = self._lanes.pop(source, ())
        kept = deque(item for item in self._common if item[0] is not source)
        dropped = [*lane, *(item for item in self._common if item[0] is source)]
        self.depth -= sum(chunk is not None for _, chunk in dropped)
        self._common = kept
        if self._current is source:
            self._current = None

    def clear(self) -> None:
        """Drop everything."""
        self._common.clear()
        self._lanes.clear()
        self._current = None
        self.depth = 0


class Facade(plain.Queue[Any]):
    """A queue of plain values between the threads of a node."""
