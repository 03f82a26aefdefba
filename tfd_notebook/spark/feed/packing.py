"""From rows that come one by one to chunks of about a mebibyte."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from tfd_notebook.spark.feed.chunks import Packed, pack

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
