"""Ctrl-C for a main thread in C++ code, in which Python's signal handlers do not run.

Python's C-level handler writes the signal's number to a file descriptor at once
(`signal.set_wakeup_fd`). A thread of this module reads it and cancels the blocking call of the
main thread. Python's own handler then runs and raises KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfd_notebook._compat.tf_data.meter import IteratorMetrics

#: Seconds from Ctrl-C to the cancellation. Most calls end earlier, and an iterator that was not
#: cancelled remains usable.
GRACE = 0.1

#: Seconds after which the wakeup descriptor is set again, because an event loop may replace it.
REARM = 1.0

#: Packages whose handlers interrupt the running code. Other handlers are left alone.
_INTERRUPTING = ("asyncio", "ipykernel", "pyspark")

MAIN_THREAD = threading.main_thread().ident


class _Watch:
    """The socket pair, the thread that reads it, and the meters that it can cancel."""

    def __init__(self) -> None:
        self.meters: weakref.WeakSet[IteratorMetrics] = weakref.WeakSet()
        self.read, self.write = socket.socketpair()
        self.write.setblocking(False)
        self.previous = -1
        self.thread = threading.Thread(target=self._run, name="tfd-ctrl-c", daemon=True)
        self.thread.start()

    def arm(self) -> None:
        descriptor = signal.set_wakeup_fd(self.write.fileno(), warn_on_full_buffer=False)
        if descriptor != self.write.fileno():
            self.previous = descriptor

    def disarm(self) -> None:
        descriptor = signal.set_wakeup_fd(-1)
        was_armed = descriptor == self.write.fileno()
        # An event loop may have closed its descriptor in the meantime.
        with contextlib.suppress(OSError, ValueError):
            signal.set_wakeup_fd(self.previous if was_armed else descriptor)
        self.write.close()  # end of file ends the thread
        self.thread.join(1.0)

    def _run(self) -> None:
        pressed: float | None = None
        presses = 0
        with self.read:
            while True:
                self.read.settimeout(GRACE / 2 if pressed else None)
                try:
                    data = self.read.recv(64)
                except TimeoutError:
                    data = None
                if data == b"":
                    return
                if data:
                    self._forward(data)
                    if signal.SIGINT in data and _interrupts(signal.getsignal(signal.SIGINT)):
                        pressed, presses = time.perf_counter(), presses + 1
                if pressed and not self._cancel(pressed, force=presses > 1):
                    pressed, presses = None, 0

    def _forward(self, data: bytes) -> None:
        if self.previous != -1:
            with contextlib.suppress(OSError):
                os.write(self.previous, data)

    def _cancel(self, pressed: float, force: bool) -> bool:
        """Cancel the blocking call of the main thread. Return True if the decision is pending."""
        assert MAIN_THREAD is not None
        undecided = False
        for meter in list(self.meters):
            call = meter.blocked.get(MAIN_THREAD)
            if call is None or call[0] > pressed:
                continue
            late = time.perf_counter() - pressed > GRACE
            clock = meter.clock
            starved = not call[2] or clock is None or clock.starved()
            if force or (late and starved):
                meter.interrupt(MAIN_THREAD)
            else:
                undecided = True
        return undecided


def _interrupts(handler: object) -> bool:
    if handler is signal.default_int_handler:
        return True
    module = getattr(getattr(handler, "func", handler), "__module__", None) or ""
    return module.split(".")[0] in _INTERRUPTING


_watch: _Watch | None = None


def arm(meter: IteratorMetrics) -> None:
    """Make Ctrl-C cancel `meter`. The main thread calls this before it blocks."""
    global _watch
    if _watch is None:
        _watch = _Watch()
    _watch.meters.add(meter)
    _watch.arm()


def release(meter: IteratorMetrics) -> None:
    """Remove `meter`. After the last one, undo `arm` if this is the main thread."""
    global _watch
    if _watch is None:
        return
    _watch.meters.discard(meter)
    # Only the main thread may call set_wakeup_fd. Otherwise the next iterator reuses the watch.
    if not _watch.meters and threading.get_ident() == MAIN_THREAD:
        undo()


def undo() -> None:
    """Undo `arm` until the main thread blocks again. The main thread calls this."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.disarm()


def _reset_in_child() -> None:
    global _watch
    if _watch is not None:
        signal.set_wakeup_fd(-1)
        _watch = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
