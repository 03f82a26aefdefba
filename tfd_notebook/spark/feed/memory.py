"""Memory for large rows: kept by the process that reads them, rather than given back at once.

The C library asks the system for each piece of more than 128 KiB and gives it back when it is
freed; the system then clears every page of the next one. For rows of that size this costs four
times as much as copying them.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
#: Up to here a piece comes from memory that is reused; the library allows no more.
_PIECE = 32 << 20
#: Bytes that are free at the end of the heap and stay there, and that it grows by.
_KEPT = 256 << 20
_GROWTH = 16 << 20


def aligned(size: int) -> np.ndarray[Any, Any]:
    """Return so many bytes, not cleared, that begin where TensorFlow can use numbers in place."""
    made = np.empty(size + 64, np.uint8)
    begin = -made.__array_interface__["data"][0] % 64
    return made[begin : begin + size]


@functools.cache
def keep() -> bool:
    """Let this process reuse the memory of large rows; True where the C library can do that."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    settings = ((_MMAP_THRESHOLD, _PIECE), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, _GROWTH))
    return all(mallopt(name, value) for name, value in settings)
