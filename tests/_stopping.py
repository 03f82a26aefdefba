"""A process that stops again and again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psutil


@contextlib.contextmanager
def stopping(process: psutil.Process) -> Iterator[None]:
    """Stop a process in 0.45 s of every 0.5 s."""
    over = threading.Event()

    def hinder() -> None:
        while not over.is_set():
            process.suspend()
            over.wait(0.45)
            process.resume()
            over.wait(0.05)

    thread = threading.Thread(target=hinder)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
