"""Chunks: columns of some rows of a partition, and their transport.

A message has a header and a body. The header is JSON values with the layout of the columns and the
size of each buffer. The body has the buffers, each aligned to 64 bytes, so that TensorFlow can use
numbers without a copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.spark.feed import decode, encode

_ALIGNED = 64
_PADDING = bytes(_ALIGNED)


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows in the form in which they are sent.

    Parameters
    ----------
    count : int
        Number of rows.
    header : dict
        JSON values that the receiver needs for decoding.
    body : list of memoryview
        Buffers and padding. Large values are not copied.
    size : int
        Bytes of the body.
    """

    count: int
    header: dict[str, Any]
    body: list[memoryview]
    size: int


def pack(rows: Sequence[Any]) -> Packed:
    """Return `rows` encoded as columns.

    Raises
    ------
    UsageError
        A row cannot be pickled.
    """
    buffers: list[encode.Fragments] = []
    layout = encode.encode(rows, buffers)
    return packed_columns(len(rows), layout, buffers)


def packed_columns(
    count: int, layout: encode.Layout, buffers: Sequence[encode.Fragments]
) -> Packed:
    """Return `count` encoded rows."""
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
    """Received rows.

    Parameters
    ----------
    header : dict
    body : memoryview
        See `Packed`.

    Attributes
    ----------
    count : int
    """

    def __init__(self, header: dict[str, Any], body: memoryview) -> None:
        self.count = int(header["count"])
        self._header, self._body = header, body

    @cached_property
    def column(self) -> decode.Column:
        """The rows as a column, decoded on first use: errors occur in the user's function."""
        buffers = _buffers(self._header["sizes"], self._body)
        return decode.decode(self._header["layout"], self.count, buffers)

    def rows(self, start: int, stop: int) -> list[Any]:
        """Return the rows from `start` up to `stop` as Python values."""
        return self.column.rows(start, stop)

    def arrays(self, start: int, stop: int) -> Any:
        """Return these rows as an array, or as a tuple or dict of arrays."""
        return self.column.arrays(start, stop)


def _buffers(sizes: list[int], body: memoryview) -> Iterator[memoryview]:
    at = 0
    for size in sizes:
        yield body[at : at + size]
        at += size + -size % _ALIGNED


#: Target size of a chunk in bytes.
TARGET = 1 << 20
#: Maximum time in seconds that a row waits for others to fill its chunk.
LINGER = 0.2
#: Maximum number of rows read at a time. It bounds memory if rows suddenly become large.
_MAX_ROWS = 1024
_MIN_ROWS = 16
#: Rows of at least this size in bytes are measured one by one.
_LARGE = 4096


def packed(rows: Iterable[Any], target: int = TARGET, linger: float = LINGER) -> Iterator[Packed]:
    """Yield all `rows` in chunks of about `target` bytes, in order.

    A chunk is smaller if the rows arrive slowly.

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
    pull = _MIN_ROWS
    started_at = time.monotonic()
    while True:
        requested_at = time.monotonic()
        piece = list(islice(rows, pull))
        ended = len(piece) < pull
        now = time.monotonic()
        if not waiting:
            started_at = requested_at
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
        if waiting and time.monotonic() - started_at > linger:
            yield waiting
            waiting, size = [], 0.0
        slow = now - requested_at > linger / 4
        pull = max(1, pull // 2) if slow else min(_MAX_ROWS, pull * 2)
    if waiting:
        yield waiting


def _measured(piece: list[Any], target: int) -> Iterator[tuple[list[Any], float]]:
    """Yield parts of `piece` that fit into a chunk, with their sizes in bytes."""
    if not piece:
        return
    samples = piece[:: max(1, len(piece) // 4)]
    if any(isinstance(row, (bytes, str, bytearray)) for row in samples):
        samples = piece  # sizes vary, and are cheap to get
    sizes = list(map(size_of, samples))
    if max(sizes) < _LARGE and max(sizes) * len(piece) <= target:
        yield piece, sum(sizes) / len(sizes) * len(piece)
        return
    part: list[Any] = []
    size = 0
    for row in piece:
        row_size = size_of(row)
        if part and size + row_size > target:
            yield part, size
            part, size = [], 0
        part.append(row)
        size += row_size
    yield part, size


def by_name(row: Any) -> dict[str, Any] | None:
    """Return the values of a dict, Row or named tuple by name.

    None if the values have no names, or if several values have the same name.
    """
    if isinstance(row, dict):
        return row
    if not isinstance(row, tuple):
        return None
    names = compat_pyspark.row_fields([row]) or getattr(row, "_fields", None)
    if not names or len(set(names)) < len(row):
        return None
    return dict(zip(names, row, strict=True))


def size_of(row: Any) -> int:
    """Return the approximate size of `row` in a chunk, in bytes."""
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
