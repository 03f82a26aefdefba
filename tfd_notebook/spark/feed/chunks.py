"""Chunks: some rows of a partition, as columns, and how they travel.

A message has a header of JSON values, which holds the layout of the columns and the size of each
buffer, and a body: the buffers, each beginning at a multiple of 64 bytes, where TensorFlow can use
numbers without copying them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
