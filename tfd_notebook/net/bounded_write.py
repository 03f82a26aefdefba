"""Writes to pipes and sockets with a timeout, even if the other end does not read."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from typing import IO

#: Seconds without progress after which a write fails.
STALL_SECONDS = 30.0
#: Seconds of one wait. A signal that arrives just before ``poll`` does not end it.
_POLL_SECONDS = 0.1


def write_all(fileno: int, write: Callable[[memoryview], int], data: bytes) -> None:
    """Write all of `data`.

    Parameters
    ----------
    fileno : int
        Descriptor to wait for when it accepts nothing.
    write : callable
        Writes some bytes without blocking and returns their number. Raises BlockingIOError if it
        would block.
    data : bytes

    Raises
    ------
    TimeoutError
        The other end read nothing for `STALL_SECONDS`.
    OSError
        The connection is broken.
    """
    rest = memoryview(data)
    deadline = time.monotonic() + STALL_SECONDS
    while rest:
        try:
            rest = rest[write(rest) :]
            deadline = time.monotonic() + STALL_SECONDS
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the other end read nothing for {STALL_SECONDS:g} s") from None
            _wait_writable(fileno, min(left, _POLL_SECONDS))


def write_to_pipe(pipe: IO[bytes], data: bytes) -> None:
    """Write all of `data` to the write end of a pipe, as `write_all` does.

    The file's buffer is not used: an interrupted write would leave bytes in it.

    Raises
    ------
    TimeoutError, OSError
    """
    try:
        fileno = pipe.fileno()
        os.set_blocking(fileno, False)
        # Look the descriptor up for each write: after close() it may belong to another file.
        write_all(fileno, lambda rest: os.write(pipe.fileno(), rest), data)
    except ValueError:
        raise BrokenPipeError("the pipe is closed") from None


def _wait_writable(fileno: int, seconds: float) -> None:
    # PollSelector needs no descriptor itself, and supports descriptors above 1023.
    selector = getattr(selectors, "PollSelector", selectors.SelectSelector)()
    with selector:
        selector.register(fileno, selectors.EVENT_WRITE)
        selector.select(seconds)
