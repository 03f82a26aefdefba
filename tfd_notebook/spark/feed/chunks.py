"""Chunks: some rows of a partition, as columns, and how they travel.

A message has a header of JSON values, which holds the layout of the columns and the size of each
buffer, and a body: the buffers, each beginning at a multiple of 64 bytes, where TensorFlow can use
numbers without copying them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from tfd_notebook.spark.feed import decode, encode

_ALIGNED = 64
_PADDING = bytes(_ALIGNED)


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows that are ready to be sent.

    Parameters
    ----------
    count : int
        How many rows.
    header : dict
        What the receiver needs to know, JSON values.
    body : list of memoryview
        The buffers with the padding between them; those of large values are the values' own.
    size : int
        Bytes of the body.
    """

    count: int
    header: dict[str, Any]
    body: list[memoryview]
    size: int


def pack(rows: Sequence[Any]) -> Packed:
    """Return `rows` as columns.

    Raises
    ------
    UsageError
        A row cannot be sent at all.
    """
    buffers: list[encode.Fragments] = []
    layout = encode.encode(rows, buffers)
    return packed_columns(len(rows), layout, buffers)


def packed_columns(
    count: int, layout: encode.Layout, buffers: Sequence[encode.Fragments]
) -> Packed:
    """Return `count` rows that are a column already."""
    body: list[memoryview] = []
    sizes = []
    total = 0
    for fragments in buffers:
        pieces = [view for view in map(_bytes, fragments) if len(view)]
        size = sum(map(len, pieces))
        body += pieces
        padding = -size % _ALIGNED
        if padding:
            body.append(memoryview(_PADDING)[:padding])
        sizes.append(size)
        total += size + padding
    return Packed(count, {"count": count, "layout": layout, "sizes": sizes}, body, total)


def _bytes(fragment: Any) -> memoryview:
    if isinstance(fragment, np.ndarray):
        fragment = fragment.reshape(-1).view(np.uint8)
    return memoryview(fragment)


class Chunk:
    """Rows that were received.

    Parameters
    ----------
    header : dict
    body : memoryview
        What `Packed` has under these names.

    Attributes
    ----------
    count : int
    """

    def __init__(self, header: dict[str, Any], body: memoryview) -> None:
        self.count = int(header["count"])
        self._header, self._body = header, body

    @cached_property
    def column(self) -> decode.Column:
        """The rows as a column, read when they are needed: what cannot be read fails there."""
        buffers = _buffers(self._header["sizes"], self._body)
        return decode.decode(self._header["layout"], self.count, buffers)

    def rows(self, start: int, stop: int) -> list[Any]:
        """Return the rows from `start` up to `stop`, as they were before."""
        return self.column.rows(start, stop)

    def arrays(self, start: int, stop: int) -> Any:
        """Return these rows as arrays: one, or a tuple or dict of them."""
        return self.column.arrays(start, stop)


def _buffers(sizes: list[int], body: memoryview) -> Iterator[memoryview]:
    at = 0
    for size in sizes:
        yield body[at : at + size]
        at += size + -size % _ALIGNED


#: Bytes that a chunk should have.
TARGET = 1 << 20
#: Seconds that a row may wait for others to fill its chunk.
LINGER = 0.2
#: Rows that are taken at a time: few enough that they fit into memory if they are suddenly large.
_MOST = 1024
_FEWEST = 16
#: Rows from this size on are measured one by one.
_LARGE = 4096


def packed(rows: Iterable[Any], target: int = TARGET, linger: float = LINGER) -> Iterator[Packed]:
    """Yield all of `rows` in chunks of about `target` bytes, in their order.

    A chunk is closed early where the rows come slowly.

    Parameters
    ----------
    rows : iterable
    target : int
        Bytes. Default 1 MiB.
    linger : float
        Seconds. Default 0.2.
    """
    for group in _groups(iter(rows), target, linger):
        yield pack(group)


def _groups(rows: Iterator[Any], target: int, linger: float) -> Iterator[list[Any]]:
    waiting: list[Any] = []
    size = 0.0
    pull = _FEWEST
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        piece = list(islice(rows, pull))
        ended = len(piece) < pull
        now = time.monotonic()
        if not waiting:
            began = asked
        for part, part_size in _measured(piece, target):
            if waiting and size + part_size > 1.5 * target:
                yield waiting
                waiting, size = [], 0.0
            if waiting:
                waiting += part
            else:
                waiting = part
            size += part_size
            if size >= target:
                yield waiting
                waiting, size = [], 0.0
        if ended:
            break
        if waiting and time.monotonic() - began > linger:
            yield waiting
            waiting, size = [], 0.0
        slow = now - asked > linger / 4
        pull = max(1, pull // 2) if slow else min(_MOST, pull * 2)
    if waiting:
        yield waiting


def _measured(piece: list[Any], target: int) -> Iterator[tuple[list[Any], float]]:
    """Yield parts of `piece` that fit into a chunk, each with its size in bytes."""
    if not piece:
        return
    samples = piece[:: max(1, len(piece) // 4)]
    if any(isinstance(row, (bytes, str, bytearray)) for row in samples):
        samples = piece  # these vary, and are measured quickly
    sizes = list(map(size_of, samples))
    if max(sizes) < _LARGE and max(sizes) * len(piece) <= target:
        yield piece, sum(sizes) / len(sizes) * len(piece)
        return
    part: list[Any] = []
    size = 0
    for row in piece:
        more = size_of(row)
        if part and size + more > target:
            yield part, size
            part, size = [], 0
        part.append(row)
        size += more
    yield part, size


def size_of(row: Any) -> int:
    """Return about how many bytes `row` takes in a chunk."""
    if isinstance(row, (bytes, str, bytearray)):
        return len(row) + 8
    if isinstance(row, np.ndarray):
        return int(row.nbytes)
    if isinstance(row, dict):
        row = list(row.values())
    if isinstance(row, (list, tuple)):
        if len(row) > 64:
            return size_of(row[0]) * len(row) + 8
        return sum(map(size_of, row)) + 8
    return 8
